"""Build the rollout engine from options, and the function that fills a store with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import torch

from decode.errors import UserError
from decode.model.head_target import HeadTarget
from decode.model.target import Target
from decode.plan import Plan
from decode.planning.auto import Auto
from distill.config.build import TargetSource
from distill.engines.base import Engine, InProcess
from distill.engines.engine_target import GONE, EngineTarget
from distill.engines.http import Server
from distill.engines.openai import OpenAIEngine
from distill.engines.vllm import VLLM
from distill.options.answers import AnswerOptions, OpenAIRolloutOptions, RayRolloutOptions
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt
from distill.rollouts.ray_workers import Fleet
from distill.rollouts.store import Make, RolloutPlan, RolloutStore, Row
from distill.rollouts.vllm_server import NO_KEY, fill_with_vllm
from distill.rollouts.writer import Writer
from distill.utils.paths import bundled
from distill.utils.progress import say
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.checkpoint.folder import target_origin

Work = Callable[[Callable[[int], None]], None]  # calls its argument with the number of missing shards
HELPED = "rollout.drafter, rollout.refresh_every: the target"  # prefix of error messages
# Fixed nodes, verified by `match`: answers do not depend on the plan.
HELPING = Auto(
    [{"depth": 1}, {"depth": 2}, {"depth": 3}, {"depth": 5}, {"depth": 3, "width": 2, "nodes": 5}], repeats=5
)
Helper = str | Path | None  # a drafter's folder or hub id


def work_of(
    options: AnswerOptions,
    target: Target,
    chat: Chat,
    store: RolloutStore,
    helper: Helper,
    part: Callable[[float], None] | None = None,
) -> Work:
    """Build the function that fills a store.

    Args:
        options: options of the engine, and plan of the helper's drafts.
        target: model that answers, for the in-process engine.
        chat: renders prompts.
        store: an opened store.
        helper: checkpoint of a drafter that speeds up the answers.
        part: called with the share of a shard that is made, if this process makes shards.

    Raises:
        UserError: an option that the engine needs is missing, or it cannot load the target.
    """
    rollout = options.rollout
    if rollout.engine == "ray":
        if options.target.placement == "sharded":
            raise UserError(
                "target.placement=sharded: workers of rollout=ray need whole targets; use rollout=hf"
            )
        if not isinstance(rollout, RayRolloutOptions):
            raise UserError("rollout.engine=ray: choose it with rollout=ray, which has its settings")
        away: tuple[AnswerOptions, RolloutPlan] = (portable(options), store.plan)
        if rollout.engine_python:
            _check_started(options, store.plan, rollout)
            load: Callable[[], Make] = partial(EngineWriter, *away)
        elif rollout.engine_arguments:
            raise UserError(
                "rollout.engine_arguments: of an engine in the workers; give rollout.engine_python"
            )
        else:
            load = partial(load_writer, *away, helper and str(_absolute(helper)))
        return partial(Fleet(rollout, load).fill, store)
    if rollout.engine == "vllm":
        _check_served(options, store.plan)
        _check_identified(options, store.plan)
        return partial(fill_with_vllm, options, target, chat, store)
    engine = from_server if rollout.engine == "openai" or isinstance(target, EngineTarget) else in_process
    make = Writer(engine(options, target, chat, store.plan, helper), chat, store.plan, part)
    return partial(store.fill, make, pause=target.idle)


def in_process(
    options: AnswerOptions, target: Target, chat: Chat, plan: RolloutPlan, helper: Helper
) -> Engine:
    """Build an engine that runs the target in this process.

    Raises:
        UserError: the drafter would change the answers, or does not support the plan.
    """
    del chat
    if not helper:
        return InProcess(target, plan.batch_size, plan.seed)
    target.abilities.check_decode(HELPED)
    # The target may have changed since (`foredraft follow`).
    folder = checkpoint_io.fetch(str(helper))
    drafter = checkpoint_io.load(folder, target, same_weights=False)
    if (made_for := target_origin(folder).fingerprint) and made_for != target.fingerprint():
        say(f"rollouts: {helper} was trained for other weights; fewer of its drafts may be accepted")
    helping = helping_plan(options, drafter)
    return InProcess(drafter.verifier(target), plan.batch_size, plan.seed, drafter, helping)


def helping_plan(options: AnswerOptions, drafter: Drafter) -> Plan | Auto:
    """The plan, or plans to choose from, with which a drafter speeds up rollouts.

    With proposal `auto`, nodes are fixed and verified by `match`, so answers equal plain decoding up to
    rounding.

    Raises:
        UserError: the plan is lossy, or the drafter does not support it.
    """
    decode = options.decode
    if drafter.traits.tunes_target:
        raise UserError("rollout.drafter: this drafter tunes its target, which changes answers; give another")
    if options.rollout.decode == "auto" or isinstance(decode, Auto):
        return HELPING
    if not isinstance(decode, Plan) or decode.lossy:
        raise UserError(
            "rollout: where a drafter helps (rollout.drafter, rollout.refresh_every), answers are drafted by "
            "one lossless plan; choose decode=chain or dynamic, or rollout.decode=auto"
        )
    drafter.check(decode)
    return decode.resolved(0.0)


def from_server(
    options: AnswerOptions, target: Target, chat: Chat, plan: RolloutPlan, helper: Helper
) -> Engine:
    """Build an engine that sends requests to an OpenAI-compatible server, or to the engine of `taps=engine`.

    Raises:
        UserError: an option that servers do not support, or no server.
    """
    del helper
    rollout = options.rollout
    _check_served(options, plan)
    if isinstance(target, EngineTarget) and rollout.engine != "openai":
        return target.answers(chat, plan.seed)
    assert isinstance(rollout, OpenAIRolloutOptions)  # `check_server` has refused others
    server = Server(
        rollout.url,
        plan.server,
        rollout.concurrency,
        rollout.timeout,
        rollout.retries,
        rollout.patience,
        rollout.api_key_env,
    )
    return OpenAIEngine(server, chat, plan.seed, target.max_positions)


def _check_served(options: AnswerOptions, plan: RolloutPlan) -> None:
    """Reject options that servers do not support.

    Raises:
        UserError: names the first such option.
    """
    if options.rollout.drafter:
        raise UserError("rollout.drafter: a server drafts by its own means; set it only with rollout=hf")
    if plan.until != "answer" or not plan.stop:
        raise UserError(
            "rollout=openai, rollout=vllm, rollout.engine_python, taps=engine: a server ends its answers; "
            "needs rollout.until=answer and a target with end tokens"
        )


def load_writer(options: AnswerOptions, plan: RolloutPlan, helper: Helper = None) -> Writer:
    """Load target and tokenizer in a worker process and return its shard writer.

    Raises:
        UserError: this machine has another target or tokenizer under the same name.
    """
    source, prompts = TargetSource(options.target), options.prompts
    target = source.load(decodes=False)
    chat = source.chat(prompts.template, prompts.template_options, plan.moment or None)
    _check_same(options, target, chat, plan)
    return Writer(in_process(options, target, chat, plan, helper), chat, plan)


class EngineWriter:
    """Shard writer of a worker process; starts a vLLM server with the target and stops it at the end.

    Args:
        options: options of a worker, see `portable`.
        plan: plan of the rows.

    Raises:
        UserError: no such interpreter, a server that does not start, or another target or tokenizer.
    """

    def __init__(self, options: AnswerOptions, plan: RolloutPlan) -> None:
        rollout, prompts, name = options.rollout, options.prompts, options.target.name
        assert isinstance(rollout, RayRolloutOptions)
        assert rollout.engine_python
        head = _head(options)
        source, moment = TargetSource(options.target), plan.moment or None
        chat = source.chat(prompts.template, prompts.template_options, moment)
        _check_same(options, head, chat, plan)
        option = "rollout.engine_python"
        engine = VLLM(rollout.engine_python, rollout.engine_arguments, rollout.engine_patience, option)
        log = Path(mkdtemp(prefix="foredraft-engine-")) / "engine.log"
        with ExitStack() as running:  # errors in this block include the engine's output
            url = running.enter_context(engine.serve_target(options.target, name, log)).url
            limits = rollout.engine_timeout, rollout.engine_retries, GONE
            server = Server(f"{url}/v1", name, plan.batch_size, *limits, NO_KEY, "rollout.engine_")
            self.writer = Writer(OpenAIEngine(server, chat, plan.seed, head.max_positions), chat, plan)
            self._running = running.pop_all()

    def __call__(self, shard: int, prompts: list[Prompt], self_written: int) -> list[Row]:
        """See `Writer`."""
        with self._running.pop_all() as running:
            rows = self.writer(shard, prompts, self_written)
            self._running = running.pop_all()
        return rows


def _head(options: AnswerOptions) -> HeadTarget:
    """Load what identifies a target without its layers, and its maximum length."""
    target = options.target
    return HeadTarget.load(
        str(bundled(target.name)), target.dtype, "cpu", target.revision, target.trust_remote_code
    )


def _check_started(options: AnswerOptions, plan: RolloutPlan, rollout: RayRolloutOptions) -> None:
    """Reject options that engines in workers do not support.

    Raises:
        UserError: see `_check_served`; a target that its files do not identify, or engines that share a GPU.
    """
    _check_served(options, plan)
    _check_identified(options, plan)
    if torch.cuda.is_available() and rollout.workers > 1 and not rollout.gpus_per_worker:
        raise UserError(
            f"rollout.gpus_per_worker=0: the engines of {rollout.workers} workers would share a GPU; set 1"
        )


def _check_identified(options: AnswerOptions, plan: RolloutPlan) -> None:
    """Reject a target that an engine would load from other weights.

    Raises:
        UserError: the weights here are not those of the target's files.
    """
    if _head(options).fingerprint() != plan.target:
        raise UserError(
            "rollout.engine_python: an engine would load other weights, since the target's here differ from "
            "its files (quantised?); start the engines yourself, and use rollout=openai"
        )


def _check_same(options: AnswerOptions, target: Target, chat: Chat, plan: RolloutPlan) -> None:
    here = target.fingerprint(), target.config_hash(), chat.fingerprint()
    if here != (plan.target, plan.config, plan.tokenizer):
        raise UserError(f"target={options.target.path}: a worker has another model there than this machine")


def portable(options: AnswerOptions) -> AnswerOptions:
    """Adapt options to a worker, which has another working directory and other devices."""
    rollout = options.rollout
    gpus = rollout.gpus_per_worker if isinstance(rollout, RayRolloutOptions) else 0
    path, device = str(_absolute(bundled(options.target.name))), "cuda" if gpus else "cpu"
    target = replace(options.target, path=path, device=device)
    return AnswerOptions(target=target, prompts=options.prompts, rollout=rollout, decode=options.decode)


def _absolute(name: str | Path) -> str | Path:
    """Absolute path of a folder; a hub id unchanged."""
    path = Path(name).expanduser()
    return path.absolute() if path.exists() else name
