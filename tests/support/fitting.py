"""A drafter that knows a few texts, for tests in which much has to be accepted."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from decode.model.target import Target
from drafters.base import Batch, Drafter


def fit(drafter: Drafter, target: Target, batch: Batch, rate: float, steps: int) -> Drafter:
    """Train on the tokens of a batch by Adam; returns the drafter, frozen."""
    optimizer = torch.optim.Adam(drafter.parameters(), rate)
    for _ in range(steps):
        losses = []
        for step in drafter.unroll(batch, target):
            wanted = batch.tokens.flatten()[step.anchor + 1 + step.depth]
            losses.append(F.cross_entropy(step.head(step.hidden), wanted))
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    return drafter.eval().requires_grad_(False)
