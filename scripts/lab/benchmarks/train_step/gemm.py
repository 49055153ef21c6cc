"""A square matrix product, for `worker`: the upper bound on FLOP/s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def build(case: dict[str, Any]) -> Callable[[Sequence[int]], Callable[[], float]]:
    """See `worker`."""
    size, dtype = case["size"], getattr(torch, case["dtype"])
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    out = torch.empty_like(left)

    def prepare(loss_mask: Sequence[int]) -> Callable[[], float]:
        del loss_mask

        def step() -> float:
            torch.mm(left, right, out=out)
            return 0.0

        return step

    return prepare
