"""Produce a command's rollouts: reuse existing shards, generate the missing ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np

from decode.errors import UserError
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.sampling import Sampler
from distill.distributed.ranks import gather
from distill.engines.engine_target import EngineTarget
from distill.options.answers import AnswerOptions, OpenAIRolloutOptions, RolloutOptions, StartedEngineOptions
from distill.options.run import RunOptions
from distill.prompts.chat_template import Chat
from distill.prompts.length import strictest
from distill.prompts.prompt import Prompt, prompts_digest
from distill.rollouts.answers_bar import AnswersBar
from distill.rollouts.build import HELPED, Helper, helping_plan, work_of
from distill.rollouts.estimate import estimate
from distill.rollouts.shard import count
from distill.rollouts.store import EVERY, RolloutPlan, RolloutStore, whole_plan
from distill.rollouts.surprisal import mismatch_warning
from distill.rollouts.writer import check_plan
from distill.utils.atomic_files import read_json, sha256, write_json
from distill.utils.phase_log import STARTING, PhaseLog
from distill.utils.progress import counted, first_rank, rank_and_world, say
from distill.utils.provenance import digest
from distill.utils.run_folder import checkpoints
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io

CHECKED_ROWS = 32  # number of external answers to check by surprisal


def rollout_plan(
    options: AnswerOptions, target: Target, chat: Chat, prompts: list[Prompt], phase: int = 0
) -> RolloutPlan:
    """Collect all settings that determine the rows."""
    rollout = options.rollout
    model = rollout.model if isinstance(rollout, OpenAIRolloutOptions) else None
    served = _served(options, target) and rollout.answers == "write"
    # Later phases use the drafter in training. It is not part of the plan, since it changes rows only by
    # rounding and a resumed run must find its store.
    drafter = "current" if phase else ""
    if rollout.drafter and not phase:
        drafter = _fingerprint(checkpoint_io.fetch(rollout.drafter))
    seed = int(np.random.SeedSequence([rollout.seed, phase]).generate_state(1)[0]) if phase else rollout.seed
    return RolloutPlan(
        target=target.fingerprint(),
        config=target.config_hash(),
        tokenizer=chat.fingerprint(),
        dtype=str(target.dtype).removeprefix("torch."),
        stop=stop_tokens(target),
        template=options.prompts.template,
        answers=rollout.answers,
        server=(model or options.target.name) + _arguments(rollout) if served else "",
        drafter=drafter,
        prompts=prompts_digest(prompts),
        samples=rollout.answers_each(len(prompts)),
        self_prompts=options.prompts.self,
        until=rollout.until,
        sampler={name: getattr(rollout.sampler, name) for name in ("temperature", "top_k", "top_p")},
        prompt_sampler={"temperature": Sampler(rollout.prompt_temperature).temperature},
        max_prompt_tokens=strictest(options.prompts.max_tokens, None, target.max_positions).tokens,
        max_new_tokens=rollout.max_new_tokens,
        shard_size=rollout.shard_size,
        batch_size=rollout.batch_size,
        seed=seed,
        moment=chat.moment,
    )


def _arguments(rollout: RolloutOptions) -> str:
    """Arguments of an engine that is started; they may affect rows (length, quantization)."""
    given = rollout.engine_arguments if isinstance(rollout, StartedEngineOptions) else ()
    return "".join(f" {argument}" for argument in given)


def _served(options: AnswerOptions, target: Target) -> bool:
    """Whether answers come from a server, which does its own drafting."""
    rollout = options.rollout
    started = isinstance(rollout, StartedEngineOptions) and rollout.engine_python is not None
    return rollout.engine == "openai" or started or isinstance(target, EngineTarget)


def _fingerprint(drafter: Path) -> str:
    paths = [path for name in checkpoint_io.FILES for path in sorted(drafter.glob(name))]
    return digest("".join(sha256(path) for path in paths))


def produce(
    options: RunOptions,
    target: Target,
    chat: Chat,
    prompts: list[Prompt],
    drafter: Drafter,
    folder: Path,
    phase: int = 0,
) -> RolloutStore:
    """Generate or reuse the answers to the training prompts.

    Args:
        options: options of the run.
        target: model that answers.
        chat: renders prompts.
        prompts: prompts to answer.
        drafter: drafter to train, for the memory estimate.
        folder: folder of the run; a resumed run must keep its data.
        phase: number of the refresh (`rollout.refresh_every`). After the first, the newest checkpoint
            drafts (online distillation, arXiv:2310.07177).

    Raises:
        UserError: given answers cannot be refreshed.
    """
    rollout = options.rollout
    if rollout.refresh_every and rollout.answers == "given":
        raise UserError("rollout.refresh_every: given answers are not refreshed; set it to 0")
    drafts = not _served(options, target)
    if rollout.refresh_every and drafts:
        target.abilities.check_decode(HELPED)
        helping_plan(options, drafter)
    plan = rollout_plan(options, target, chat, prompts, phase)
    store = open_store(options, Path(options.output_dir) / "rollouts", target, chat, plan, prompts, phase)
    helper: Helper = rollout.drafter
    if phase:
        helper = next(reversed(checkpoints(folder)), None) if drafts else None
        say(f"rollouts: time {phase + 1}" + (f", drafted by {helper}" if helper else ""))
    else:
        _same_rollouts(folder, store.plan)
    missing, before = store.missing(), target.starting_seconds
    with PhaseLog(folder).time("rollouts") as part:
        fill(options, target, chat, store, helper, drafter)
        target.join()
        made = gather(store.made)
        part |= store.amounts(missing if rollout.answers == "write" else [])
        part[STARTING] = target.starting_seconds - before
    if len(made) > 1 and any(made):
        say(f"rollouts: shards made by each of {len(made)} processes: {', '.join(map(str, map(len, made)))}")
    return store


def open_store(
    options: AnswerOptions,
    root: Path,
    target: Target,
    chat: Chat,
    plan: RolloutPlan,
    prompts: list[Prompt],
    phase: int = 0,
) -> RolloutStore:
    """Open the store that the options name, or one below `root`; later phases have their own.

    Raises:
        UserError: the store has another plan, or the plan is invalid.
    """
    check_plan(plan, chat, target.max_positions)  # before anything is written
    place = options.rollout.store
    if place and phase:
        place = f"{place}/again-{phase}"
    # private API: the commit of a hub id or the SHA-256 of a GGUF file has no public attribute
    revision = options.target.revision or getattr(target.model.config, "_commit_hash", None)
    origin = {"target": options.target.path, "revision": revision}
    if isinstance(target, EngineTarget):
        plan = whole_plan(plan, root, place)
    store = RolloutStore(root, plan, prompts, place, origin)
    store.open()
    return store


def _same_rollouts(folder: Path, plan: RolloutPlan) -> None:
    note = folder / "rollouts.json"
    advice = "remove it to continue with the rollouts as they are now; resume=never starts another run"
    if not (began := read_json(note, advice, store=str)):
        if first_rank():
            write_json(note, {"store": plan.key})
    elif began["store"] != plan.key:
        raise UserError(
            f"{folder}: the prompts, the target or settings of its rollouts have changed since this run "
            "began; resume=never starts another"
        )


def fill(
    options: AnswerOptions,
    target: Target,
    chat: Chat,
    store: RolloutStore,
    helper: Helper,
    drafter: Drafter | None,
    watch: Callable[[int], None] | None = None,
) -> None:
    """Generate the missing shards under a progress bar, print a summary, and check every row.

    Args:
        options: options of the engine.
        target: model that answers.
        chat: renders prompts.
        store: an opened store.
        helper: drafter that speeds up the answers.
        drafter: drafter to train, for the memory estimate; None without training.
        watch: called with the number of missing shards; if it raises, finished shards are kept.

    Raises:
        UserError: a stored row is none of this target.
    """
    if store.complete:
        store.check()
        store.check_rows(target.vocab_size)
        say(f"rollouts: reusing all {counted(store.shards, 'shard')} in {store.folder}")
        return
    if store.missing():
        _make(options, target, chat, store, helper, drafter, watch)
    else:  # killed before the manifest
        store.seal()
    store.check_rows(target.vocab_size)


def _make(
    options: AnswerOptions,
    target: Target,
    chat: Chat,
    store: RolloutStore,
    helper: Helper,
    drafter: Drafter | None,
    watch: Callable[[int], None] | None,
) -> None:
    missing = len(store.missing())
    shown = AnswersBar(store, "rollouts", leave=True)
    work = work_of(options, target, chat, store, helper, shown.part)
    say(estimate(store, target, drafter))
    if missing < store.shards:
        say(f"rollouts: {store.shards - missing} of {counted(store.shards, 'shard')} are there already")
    if missing < (world := rank_and_world()[1]) and options.rollout.engine != "ray":
        say(
            f"rollouts: {counted(missing, 'shard')} for {world} processes, so some wait; a smaller "
            f"rollout.shard_size={store.plan.shard_size} gives each a part"
        )
    with shown:
        speed = _speed(store)

        def done(missing: int) -> None:
            shown.shards(missing, speed())
            if watch:
                watch(missing)

        work(done)
    counts = store.manifest()["counts"]
    rows = counted(counts["rows"], "row")
    say(f"rollouts: {rows}, {counts['answer_tokens']} supervised tokens in {store.folder}")
    if counts["rows"] and (store.plan.answers == "given" or store.plan.server):
        texts = islice(store.texts(), CHECKED_ROWS)
        rows = [{name: np.asarray(part).tolist() for name, part in text._asdict().items()} for text in texts]
        if warning := mismatch_warning(target, rows, asdict(store.plan)):
            say(warning)


def _speed(store: RolloutStore) -> Callable[[], str]:
    """Tokens per second of new shards from all workers, updated every `EVERY` seconds."""
    todo, begun, tokens, looked = set(store.missing()), time.monotonic(), 0, 0.0

    def speed() -> str:
        nonlocal todo, tokens, looked
        if (now := time.monotonic()) - looked > EVERY:
            looked, left = now, set(store.missing())
            tokens += sum(count(store.path(shard))["answer_tokens"] for shard in todo - left)
            todo = left
        return f"{tokens / (now - begun):,.0f} tokens/s"

    return speed
