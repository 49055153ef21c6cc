"""Rollout stores in tests: a plan, a writer in this process, and what came of it."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq

from decode.model.target import Target
from distill.engines.base import InProcess
from distill.prompts.chat_template import Chat
from distill.rollouts.store import Make, RolloutPlan, RolloutStore
from distill.rollouts.writer import Writer

NAMES = {"target": "t", "config": "c", "tokenizer": "k", "dtype": "float32", "template": "chat"}
SIZES = {"max_prompt_tokens": 24, "max_new_tokens": 12, "shard_size": 4, "batch_size": 3, "stop": [3]}
PLAN = RolloutPlan(
    **(NAMES | SIZES),
    prompts="p",
    samples=1,
    self_prompts=5,
    until="answer",
    answers="write",
    seed=0,
    sampler={"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    prompt_sampler={"temperature": 1.0},
    server="",
    drafter="",
)


def make_writer(target: Target, chat: Chat, plan: RolloutPlan) -> Writer:
    """Rows from the target in this process."""
    return Writer(InProcess(target, plan.batch_size, plan.seed), chat, plan)


def rows_of(store: RolloutStore) -> list[list[dict[str, Any]]]:
    """Of every shard."""
    return [pq.read_table(store.path(i)).to_pylist() for i in range(store.shards)]


def fill(store: RolloutStore, make: Make) -> None:
    """Make what is missing, telling nobody."""
    store.fill(make, lambda missing: None)
