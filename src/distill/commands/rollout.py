"""The target's answers and nothing else: foredraft rollout."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from decode.errors import UserError
from distill.config.build import build_target, quiet, read_chat, read_limit
from distill.config.validate import check_ranges, refused
from distill.prompts import split as inputs
from distill.rollouts.produce import fill, open_store, rollout_plan
from distill.utils.progress import say


def roll_out(cfg: DictConfig) -> float:
    """Make a store, or what is missing of it; `train.py` with the same settings finds it.

    Args:
        cfg: composed from conf/rollout_alone.yaml.

    Returns:
        Answer tokens in it.

    Raises:
        UserError: bad input; it is found before any work starts.
    """
    quiet()
    check_ranges(cfg)
    chat = read_chat(cfg)
    found = inputs.read(cfg, chat, read_limit(cfg), cfg.rollout.answers == "given")
    if cfg.rollout.refresh_every:
        raise UserError("rollout.refresh_every: answers are made anew in training; leave it 0 here")
    target = build_target(cfg)
    plan = rollout_plan(cfg, target, chat, found.train)
    with refused():
        store = open_store(cfg, Path(cfg.stores), target, chat, plan, found.train)
        inputs.list_rejected(found, store.folder)
        inputs.describe(found, store.folder)
        fill(cfg, target, chat, store, cfg.rollout.drafter, None)
    say(str(store.mirror.url if store.mirror else store.folder))
    return float(store.manifest()["counts"]["answer_tokens"])
