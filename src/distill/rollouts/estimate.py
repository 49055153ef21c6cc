"""Estimate of time, disk and memory that missing rollouts need."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn

from decode.errors import UserError
from decode.generation.generate import generate
from decode.hardware import memory_bytes
from decode.model.target import Target
from decode.sampling import Sampler
from distill.prompts.prompt import turns, unanswered
from distill.rollouts.store import RolloutStore
from distill.utils.progress import counted, rank_and_world

STEPS = 4  # number of timed decoding steps


def estimate(store: RolloutStore, target: Target, drafter: nn.Module | None) -> str:
    """Format upper bounds on tokens, time, disk and memory of the missing rollouts as one line.

    Args:
        store: store with missing shards.
        target: model that answers; a few decoding steps are timed.
        drafter: drafter to train; None: no training.

    Raises:
        UserError: more memory is needed than the device has.
    """
    plan = store.plan
    memory = target.bytes
    # Weights, gradients and two optimizer moments in fp32: 16 bytes per parameter.
    memory += 16 * sum(p.numel() for p in drafter.parameters()) if drafter else 0
    missing = len(store.missing())
    if not missing or plan.answers == "given":
        return f"estimate: no rollouts to make, weights and optimizer {memory / 2**20:.0f} MiB"
    num_turns = sum(len(turns(unanswered(p.messages))) for p in store.prompts)
    num_answers = plan.samples * num_turns + plan.self_prompts
    rows = -(-num_answers * missing // store.shards)
    batch = min(plan.batch_size, rows)
    prompts = plan.self_prompts and plan.until == "answer"
    # A prompt has at most as many tokens as bytes; the few that the template adds are ignored.
    longest = max((sum(len(m["content"].encode()) for m in p.messages) for p in store.prompts), default=0)
    longest = min(plan.max_prompt_tokens, max(longest, plan.max_new_tokens if plan.self_prompts else 0))
    length = plan.max_new_tokens * (2 if prompts else 1)
    tokens = rows * length
    if plan.server:  # speed unknown
        duration, contents = f"from {plan.server}", "weights"
    else:
        sharing = min(rank_and_world()[1], missing)
        seconds = -(-rows // batch) * length * _step(target, batch, plan.sampler) / sharing
        context = min(longest + plan.max_new_tokens, target.max_positions or sys.maxsize)
        if not target.abilities.own_cache:  # its cache size is unknown
            memory += batch * context * target.cache.store.bytes_per_token
        by = f" by {sharing} processes" if sharing > 1 else ""
        duration, contents = f"up to {seconds / 60:.1f} min{by}", "weights, cache"
        if memory > (limit := memory_bytes(target.device)):
            raise UserError(
                f"rollout: needs up to {memory / 2**30:.1f} GiB for {contents} and optimizer, and there are "
                f"{limit / 2**30:.1f}; lower rollout.batch_size={plan.batch_size} or "
                f"rollout.max_new_tokens={plan.max_new_tokens}"
            )
    return (
        f"estimate: up to {tokens:,} rollout tokens in {rows:,} answers, {duration}, "
        f"{tokens * 3 / 2**20:.0f} MiB on disk; {memory / 2**20:.0f} MiB for {contents} and optimizer "
        f"on {', '.join(filter(None, (counted(torch.get_num_threads(), 'thread'), target.products)))}"
    )


def _step(target: Target, batch: int, sampler: dict[str, Any]) -> float:
    """Seconds per decoding step, averaged over STEPS steps."""
    start = time.perf_counter()
    generate(target, None, [[1]] * batch, max_new_tokens=STEPS, sampler=Sampler(**sampler))
    return (time.perf_counter() - start) / STEPS
