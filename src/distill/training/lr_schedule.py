"""The learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch


def warm_up_and_decay(
    optimizer: torch.optim.Optimizer,
    steps: int,
    warmup: float,
    final_lr: float,
    decay: str = "cosine",
    factors: Sequence[Callable[[float], float]] = (),
) -> torch.optim.lr_scheduler.LambdaLR:
    """A linear rise over `warmup` of the steps, then a cosine or a line to `final_lr` of the rate.

    Args:
        optimizer: whose groups it drives.
        steps: of the run.
        warmup: share of them.
        final_lr: share of the learning rate.
        decay: `cosine` or `linear`.
        factors: of each group, from the share of the steps that are done; none: all 1.
    """
    rise = max(1, round(warmup * steps))

    def rate(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        done = min(1.0, (step - rise) / max(1, steps - rise))
        left = 1 - done if decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return final_lr + (1 - final_lr) * left

    def times(factor: Callable[[float], float]) -> Callable[[int], float]:
        return lambda step: rate(step) * factor(step / steps)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, [times(f) for f in factors] or rate)
