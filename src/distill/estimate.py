"""One line on what a run will cost, before it starts."""

from __future__ import annotations

import time

import torch
from torch import nn

from decode.generate import generate
from decode.sampling import Sampler
from decode.target import Target
from distill.rollouts import RolloutStore

STEPS = 4  # decoding steps that are timed


def estimate(store: RolloutStore, target: Target, drafter: nn.Module) -> str:
    """Tokens, time and disk of the missing rollouts, and memory; upper bounds, from a timed sample."""
    plan = store.plan
    memory = sum(p.numel() * p.itemsize for p in target.model.parameters())
    # Weights, gradients and two moments in fp32.
    memory += 16 * sum(p.numel() for p in drafter.parameters())
    missing = len(store.missing())
    if not missing or plan.answers == "given":
        return f"estimate: no rollouts to make, weights and optimizer {memory / 2**20:.0f} MiB"
    given = len(store.prompts) * plan.samples + plan.self_prompts
    rows = min(missing * plan.shard_size * plan.samples, given)
    batch = min(plan.batch_size, rows)
    start = time.perf_counter()
    generate(target, None, [[1]] * batch, max_new_tokens=STEPS, sampler=Sampler(**plan.sampler))
    step = (time.perf_counter() - start) / STEPS
    prompts = plan.self_prompts and plan.until == "answer"
    length = plan.max_new_tokens + (plan.max_prompt_tokens if prompts else 0)
    tokens = rows * length
    memory += batch * (plan.max_prompt_tokens + plan.max_new_tokens) * target.cache.store.bytes_per_token
    seconds = -(-rows // batch) * length * step
    return (
        f"estimate: up to {tokens:,} rollout tokens in {rows:,} rows, up to {seconds / 60:.1f} min, "
        f"{tokens * 3 / 2**20:.0f} MiB on disk; {memory / 2**20:.0f} MiB for weights, cache and optimizer "
        f"on {torch.get_num_threads()} threads"
    )
