"""The engine that a configuration names, and what fills a store with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from decode.errors import UserError
from decode.model.target import Target
from decode.plan import Plan
from distill.config.build import build_target, read_chat
from distill.engines.base import Engine, InProcess
from distill.engines.http import Server
from distill.engines.openai import OpenAIEngine
from distill.prompts.chat_template import Chat
from distill.rollouts.ray_workers import Fleet
from distill.rollouts.store import RolloutPlan, RolloutStore
from distill.rollouts.writer import Writer
from distill.utils.paths import bundled
from drafters.base import Drafter
from drafters.checkpoint import io as hub

Work = Callable[[Callable[[int], None]], None]  # told whom to tell how many shards are missing still
Helper = str | Path | None  # a drafter's folder or hub id


def work_of(cfg: DictConfig, target: Target, chat: Chat, store: RolloutStore, helper: Helper) -> Work:
    """What fills a store.

    Args:
        cfg: with `rollout` and `decode`.
        target: answers, where no other engine is asked for.
        chat: renders.
        store: opened.
        helper: drafts the answers.
    """
    if cfg.rollout.engine == "ray":
        if cfg.target.placement == "sharded":
            raise UserError(
                "target.placement=sharded: workers of rollout=ray need whole targets; use rollout=hf"
            )
        load = partial(load_writer, portable(cfg), store.plan, helper and str(_away(helper)))
        return partial(Fleet(cfg.rollout, load).fill, store)
    engine = from_server if cfg.rollout.engine == "openai" else in_process
    make = Writer(engine(cfg, target, chat, store.plan, helper), chat, store.plan)
    return partial(store.fill, make, pause=target.wait)


def in_process(cfg: DictConfig, target: Target, chat: Chat, plan: RolloutPlan, helper: Helper) -> Engine:
    """The target in this process.

    Raises:
        UserError: a drafter that would change what it says, or whose drafts have a shape it cannot.
    """
    del chat
    if not helper:
        return InProcess(target, plan.batch_size, plan.seed)
    drafter = hub.load(hub.fetch(str(helper)), target)
    return InProcess(target, plan.batch_size, plan.seed, drafter, helping_plan(cfg, drafter))


def helping_plan(cfg: DictConfig, drafter: Drafter) -> Plan:
    """How a drafter helps to write answers.

    Raises:
        UserError: it would change what they say, or its drafts have a shape that it cannot make.
    """
    shape = instantiate(cfg.decode)
    if not isinstance(shape, Plan) or shape.lossy:
        raise UserError(
            "rollout: where a drafter helps (rollout.drafter, rollout.refresh_every), answers are drafted by "
            "one lossless plan; choose decode=chain or dynamic"
        )
    if type(drafter).verifier is not Drafter.verifier:
        raise UserError("rollout: a drafter that has tuned its target would change the answers it helps with")
    drafter.check(shape)
    return shape


def from_server(cfg: DictConfig, target: Target, chat: Chat, plan: RolloutPlan, helper: Helper) -> Engine:
    """The target as an OpenAI-compatible server has it, which drafts by its own means.

    Raises:
        UserError: what a server cannot do is asked of it, or it does not answer.
    """
    del helper
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


def load_writer(cfg: DictConfig, plan: RolloutPlan, helper: Helper = None) -> Writer:
    """What makes shards, in a process that has nothing yet.

    Raises:
        UserError: this machine has another target or tokenizer under the same name.
    """
    chat, target = read_chat(cfg), build_target(cfg)
    if (target.fingerprint(), chat.fingerprint()) != (plan.target, plan.tokenizer):
        raise UserError(f"target={cfg.target.path}: a worker has another model there than this machine")
    return Writer(in_process(cfg, target, chat, plan, helper), chat, plan)


def portable(cfg: DictConfig) -> DictConfig:
    """The configuration as a worker needs it, which runs in another folder and on devices of its own."""
    away: Any = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    away.target.path = str(_away(bundled(away.target.path)))
    away.target.device = "cuda" if cfg.rollout.get("gpus_per_worker") else "cpu"
    return away


def _away(name: str | Path) -> str | Path:
    """A folder's path from anywhere; a hub id as it is."""
    path = Path(name).expanduser()
    return path.absolute() if path.exists() else name
