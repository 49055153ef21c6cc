"""Rollouts as a configuration asks for them: made by its engine, or found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from decode.errors import UserError
from decode.load import stop_tokens
from decode.plan import Plan
from decode.target import Target
from distill.chat import Chat
from distill.engine import Engine, InProcess
from distill.estimate import estimate
from distill.files import sha256, write_json
from distill.openai_engine import OpenAIEngine
from distill.progress import bar, first_rank, say
from distill.prompts import Prompt
from distill.provenance import digest
from distill.rollouts import RolloutPlan, RolloutStore
from distill.server import Server
from distill.writer import Writer
from drafters import hub


def rollout_plan(cfg: DictConfig, target: Target, chat: Chat, prompts: list[Prompt]) -> RolloutPlan:
    """What decides the rows."""
    rollout = cfg.rollout
    return RolloutPlan(
        target=target.fingerprint(),
        tokenizer=chat.fingerprint(),
        dtype=str(target.dtype).removeprefix("torch."),
        stop=stop_tokens(target),
        template=cfg.prompts.template,
        answers=rollout.answers,
        server=str(rollout.model or cfg.target.path) if rollout.engine == "openai" else "",
        drafter=_fingerprint(hub.fetch(rollout.drafter)) if rollout.drafter else "",
        prompts=digest(json.dumps(prompts)),
        samples=rollout.samples,
        self_prompts=cfg.prompts.self,
        until=rollout.until,
        sampler={"temperature": rollout.temperature, "top_k": rollout.top_k, "top_p": rollout.top_p},
        prompt_sampler={"temperature": rollout.prompt_temperature},
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_new_tokens=rollout.max_new_tokens,
        shard_size=rollout.shard_size,
        batch_size=rollout.batch_size,
        seed=rollout.seed,
    )


def _fingerprint(drafter: Path) -> str:
    return digest("".join(sha256(drafter / name) for name in hub.FILES if (drafter / name).exists()))


def in_process(cfg: DictConfig, target: Target, _chat: Chat, plan: RolloutPlan) -> Engine:
    """The target in this process, drafted for by `rollout.drafter`.

    Raises:
        UserError: a drafter that would change what it says, or whose drafts have a shape it cannot.
    """
    if not cfg.rollout.drafter:
        return InProcess(target, plan.batch_size, plan.seed)
    drafter, shape = hub.load(hub.fetch(cfg.rollout.drafter), target), instantiate(cfg.decode)
    if not isinstance(shape, Plan) or shape.lossy:
        raise UserError(
            "rollout.drafter: answers are drafted by one lossless plan; choose decode=chain or dynamic"
        )
    if drafter.verifier(target) is not target:
        raise UserError("rollout.drafter: it has tuned its target, whose answers would be another's")
    drafter.check(shape)
    return InProcess(target, plan.batch_size, plan.seed, drafter, shape)


def from_server(cfg: DictConfig, target: Target, chat: Chat, plan: RolloutPlan) -> Engine:
    """The target as an OpenAI-compatible server has it.

    Raises:
        UserError: what a server cannot do is asked of it, or it does not answer.
    """
    rollout = cfg.rollout
    if rollout.drafter:
        raise UserError("rollout.drafter: a server drafts by its own means; set it with rollout=hf alone")
    if plan.until != "answer" or not plan.stop:
        raise UserError(
            "rollout=openai: a server ends its answers; needs rollout.until=answer and a target with "
            "end tokens"
        )
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


# rollout.engine -> what makes it
ENGINES: dict[str, Callable[[DictConfig, Target, Chat, RolloutPlan], Engine]] = {
    "hf": in_process,
    "openai": from_server,
}


def check_given(chat: Chat, prompts: list[Prompt]) -> None:
    """Refuse records whose answers are to be taken and are not there.

    Raises:
        UserError: the first of them.
    """
    for prompt in prompts:
        if prompt.messages[-1]["role"] != "assistant":
            raise UserError(f"rollout=given: record {prompt.id} does not end with an answer")
    if prompts:
        chat.encode_answered(prompts[0].messages, prompts[0].tools)


def produce(
    cfg: DictConfig, target: Target, chat: Chat, prompts: list[Prompt], drafter: nn.Module, folder: Path
) -> RolloutStore:
    """The answers to the training prompts.

    Args:
        cfg: with `rollout`, `prompts`, `decode` and `output_dir`.
        target: answers.
        chat: renders.
        prompts: to be answered.
        drafter: that will be trained, for the estimate of memory.
        folder: of the run, which may not go on with other data than it began with.
    """
    plan = rollout_plan(cfg, target, chat, prompts)
    store = RolloutStore(Path(cfg.output_dir) / "rollouts", plan, prompts)
    _same_rollouts(folder, plan)
    if store.complete:
        store.check()
        say(f"rollouts: reusing all {store.shards} shards in {store.folder}")
        return store
    engine = ENGINES[cfg.rollout.engine](cfg, target, chat, plan)
    fill(store, Writer(engine, chat, plan), lambda: estimate(store, target, drafter))
    return store


def _same_rollouts(folder: Path, plan: RolloutPlan) -> None:
    note = folder / "rollouts.json"
    if not note.exists():
        if first_rank():
            write_json(note, {"store": plan.key})
    elif json.loads(note.read_text())["store"] != plan.key:
        raise UserError(
            f"{folder}: the prompts or the target have changed since this run began; "
            "resume=never starts another"
        )


def fill(store: RolloutStore, writer: Writer, cost: Callable[[], str]) -> None:
    """Make what is missing, under a progress bar, and say what there is."""
    missing = len(store.missing())
    say(cost())
    if missing < store.shards:
        say(f"rollouts: {store.shards - missing} of {store.shards} shards are there already")
    with bar(store.shards, "rollouts", "shards", store.shards - missing) as shown:

        def done(missing: int) -> None:
            shown.update(store.shards - missing - shown.n)

        store.fill(writer, done)
    shards = store.manifest()["shards"]
    rows, answered = sum(s["rows"] for s in shards), sum(s["answered"] for s in shards)
    say(f"rollouts: {rows} rows, {answered} supervised tokens in {store.folder}")
