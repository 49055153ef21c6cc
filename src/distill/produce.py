"""Rollouts as a configuration asks for them: made by its engine, or found."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from decode.errors import UserError
from decode.load import stop_tokens
from decode.plan import Plan
from decode.target import Target
from distill.chat import Chat
from distill.engine import Engine, InProcess
from distill.estimate import estimate
from distill.files import sha256, write_json
from distill.loading import build_target, read_chat
from distill.progress import bar, first_rank, say
from distill.prompts import Prompt
from distill.provenance import digest, local
from distill.ray_engine import Fleet
from distill.rollouts import RolloutPlan, RolloutStore
from distill.runs import checkpoints
from distill.writer import Writer
from drafters import hub


def rollout_plan(
    cfg: DictConfig, target: Target, chat: Chat, prompts: list[Prompt], phase: int = 0
) -> RolloutPlan:
    """What decides the rows."""
    rollout = cfg.rollout
    # Later phases are drafted by what has been trained so far. That changes no row, but for rounding, and
    # a resumed run must find the store that it began.
    drafter = "current" if phase else _fingerprint(hub.fetch(rollout.drafter)) if rollout.drafter else ""
    seed = int(np.random.SeedSequence([rollout.seed, phase]).generate_state(1)[0]) if phase else rollout.seed
    return RolloutPlan(
        target=target.fingerprint(),
        tokenizer=chat.fingerprint(),
        dtype=str(target.dtype).removeprefix("torch."),
        stop=stop_tokens(target),
        template=cfg.prompts.template,
        answers=rollout.answers,
        server="",
        drafter=drafter,
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
        seed=seed,
    )


def _fingerprint(drafter: Path) -> str:
    return digest("".join(sha256(drafter / name) for name in hub.FILES if (drafter / name).exists()))


def engine_of(cfg: DictConfig, target: Target, plan: RolloutPlan, helper: str | Path | None) -> Engine:
    """What answers.

    Args:
        cfg: with `rollout` and `decode`.
        target: answers, where no other engine is asked for.
        plan: of the rows.
        helper: a drafter's folder or hub id, or None.

    Raises:
        UserError: a drafter that is to help, with a `decode` that it cannot.
    """
    if not helper:
        return InProcess(target, plan.batch_size, plan.seed)
    drafter, shape = hub.load(hub.fetch(str(helper)), target), instantiate(cfg.decode)
    if not isinstance(shape, Plan) or shape.lossy:
        raise UserError(
            "rollout.drafter: answers are drafted by one lossless plan; choose decode=chain or dynamic"
        )
    if drafter.verifier(target) is not target:
        raise UserError("rollout.drafter: it has tuned its target, whose answers would be another's")
    drafter.check(shape)
    return InProcess(target, plan.batch_size, plan.seed, drafter, shape)


def check_given(cfg: DictConfig, chat: Chat, prompts: list[Prompt]) -> None:
    """Refuse records whose answers are to be taken and are not there.

    Raises:
        UserError: the first of them, or answers that are left out.
    """
    if cfg.prompts.answers == "drop":
        raise UserError("rollout=given: prompts.answers=drop leaves given answers out; set it to keep")
    for prompt in prompts:
        if prompt.messages[-1]["role"] != "assistant":
            raise UserError(f"rollout=given: record {prompt.id} does not end with an answer")
    if prompts:
        chat.encode_answered(prompts[0].messages, prompts[0].tools)


def produce(
    cfg: DictConfig,
    target: Target,
    chat: Chat,
    prompts: list[Prompt],
    drafter: nn.Module,
    folder: Path,
    phase: int = 0,
) -> RolloutStore:
    """The answers to the training prompts.

    Args:
        cfg: with `rollout`, `prompts`, `decode` and `output_dir`.
        target: answers.
        chat: renders.
        prompts: to be answered.
        drafter: that will be trained, for the estimate of memory.
        folder: of the run, which may not go on with other data than it began with.
        phase: which time it is that they are answered (`rollout.refresh_every`). From the second on, the
            newest checkpoint drafts (online distillation, arXiv:2310.07177).

    Raises:
        UserError: answers that are given cannot be made again.
    """
    if cfg.rollout.refresh_every and cfg.rollout.answers == "given":
        raise UserError("rollout.refresh_every: given answers are not made anew; set it to 0")
    plan = rollout_plan(cfg, target, chat, prompts, phase)
    helper = next(reversed(checkpoints(folder)), None) if phase else cfg.rollout.drafter
    store = open_store(cfg, plan, prompts, phase)
    if phase:
        say(f"rollouts: time {phase + 1}, drafted by {helper or 'nothing, for want of a checkpoint'}")
    else:
        _same_rollouts(folder, plan)
    fill(store, worker(cfg, target, chat, store, helper), lambda: estimate(store, target, drafter))
    return store


def open_store(cfg: DictConfig, plan: RolloutPlan, prompts: list[Prompt], phase: int = 0) -> RolloutStore:
    """The store that a configuration names; later phases have a place of their own in it.

    Raises:
        UserError: it holds something else.
    """
    place = cfg.rollout.store
    if place and phase:
        place = f"{place}/again-{phase}"
    origin = {"target": cfg.target.path, "revision": cfg.target.revision}
    store = RolloutStore(Path(cfg.output_dir) / "rollouts", plan, prompts, place, origin)
    store.open()
    return store


def worker(
    cfg: DictConfig, target: Target, chat: Chat, store: RolloutStore, helper: str | Path | None
) -> Callable[[Callable[[int], None]], None]:
    """What fills a store, telling how many shards are missing still."""
    if cfg.rollout.engine == "ray":
        return partial(
            Fleet(cfg.rollout, partial(load_writer, portable(cfg), store.plan, helper)).fill, store
        )
    return partial(store.fill, Writer(engine_of(cfg, target, store.plan, helper), chat, store.plan))


def load_writer(cfg: DictConfig, plan: RolloutPlan, helper: str | Path | None) -> Writer:
    """What makes shards, in a process that has nothing yet.

    Raises:
        UserError: this machine has another target or tokenizer under the same name.
    """
    chat, target = read_chat(cfg), build_target(cfg)
    if (target.fingerprint(), chat.fingerprint()) != (plan.target, plan.tokenizer):
        raise UserError(f"target={cfg.target.path}: a worker has another model there than this machine")
    return Writer(engine_of(cfg, target, plan, helper), chat, plan)


def portable(cfg: DictConfig) -> DictConfig:
    """The configuration as a worker needs it, which runs in another folder and on devices of its own."""
    away: Any = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    for node, key in ((away.target, "path"), (away.rollout, "drafter")):
        if node[key] and (path := Path(local(node[key])).expanduser()).exists():
            node[key] = str(path.absolute())
    away.target.device = "cuda" if cfg.rollout.get("gpus_per_worker") else "cpu"
    return away


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


def fill(store: RolloutStore, work: Callable[[Callable[[int], None]], None], cost: Callable[[], str]) -> None:
    """Make what is missing, under a progress bar, and say what there is.

    Args:
        store: opened.
        work: makes it, and tells how many shards are missing still.
        cost: one line on what that will take.
    """
    missing = len(store.missing())
    if store.complete:
        store.check()
        say(f"rollouts: reusing all {store.shards} shards in {store.folder}")
        return
    say(cost())
    if missing < store.shards:
        say(f"rollouts: {store.shards - missing} of {store.shards} shards are there already")
    with bar(store.shards, "rollouts", "shards", store.shards - missing) as shown:

        def done(missing: int) -> None:
            shown.update(store.shards - missing - shown.n)

        work(done)
    counts = store.manifest()["counts"]
    say(f"rollouts: {counts['rows']} rows, {counts['answer_tokens']} supervised tokens in {store.folder}")
