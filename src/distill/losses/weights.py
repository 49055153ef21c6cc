"""Weights of the loss at (anchor, depth): by depth, or by expected acceptance.

`constant` and `decay` are functions of the depth, from 1. `Streak` (SpecDiff-2, arXiv:2511.00606) and `DPace`
(arXiv:2605.18810) map acceptance probabilities (A, K) of A anchors at K depths to weights (A, K), without
gradient. `weighted` scales rows of the batch by (B,) weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.errors import UserError
from drafters.base import DraftStep

DepthWeights = Callable[[int], float]


def constant(depth: int) -> float:
    """Every depth counts the same."""
    del depth
    return 1.0


def decay(depth: int, rate: float) -> float:
    """rate^(depth - 1); Medusa and EAGLE-3 use 0.8 (arXiv:2401.10774, arXiv:2503.01840)."""
    return rate ** (depth - 1)


@dataclass(frozen=True)
class RowWeights(ABC):
    """Weights from the acceptance probabilities alpha_j of all depths of an anchor, held constant.

    With `overlap`, alpha is sum min(p, q), the acceptance probability of the token rule. With `token`, it is
    q(x) of the text's next token x: for texts by the target, the acceptance probability of the match rule.

    Products of alphas vanish for a poor draft, so that only depth 1 would learn. Alpha is therefore smoothed
    to (1 - s) alpha + s. During the first `warmup` of the steps, s falls linearly from 1 (a weight is then
    the number of remaining depths) to `smoothing`.

    Args:
        smoothing: s after the warm-up, from 0 (exact) to 1.
        warmup: share of the training steps.
        acceptance: `overlap` or `token`.
    """

    smoothing: float
    warmup: float
    acceptance: str = "overlap"

    def __post_init__(self) -> None:
        if self.acceptance not in ("overlap", "token"):
            raise UserError(f"weights.acceptance={self.acceptance}: choose overlap or token")
        for name in ("smoothing", "warmup"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"weights.{name}={getattr(self, name)}: must be from 0 to 1")

    def __call__(self, alpha: Tensor, present: Tensor, progress: float, counts: Tensor) -> Tensor:
        """(A, K) weights of terms prod_{l <= j} alpha_l, multiplied by `counts[:, j]`.

        Args:
            alpha: (A, K) acceptance of every anchor, depth 1 first.
            present: (A, K) bool; an anchor's streak ends before a missing depth.
            progress: finished share of the training steps.
            counts: (A, K) counts; above 1 if sampled anchors represent all.
        """
        s = self.smoothing
        if progress < self.warmup:
            s = 1 - (1 - s) * progress / self.warmup
        return self._weigh((alpha * (1 - s) + s) * present, counts)

    @abstractmethod
    def _weigh(self, alpha: Tensor, counts: Tensor) -> Tensor:
        """(A, K) smoothed alphas, 0 at missing depths -> (A, K) weights."""


class Streak(RowWeights):
    """w_i = d/d alpha_i of sum_j prod_{l <= j} alpha_l, the expected accepted length.

    Without smoothing, it is exactly the gradient of - sum_j prod_{l <= j} alpha_l. Objective `hit` with
    acceptance `token` is streak-distillation (SpecDiff-2, arXiv:2511.00606); objective `tv` with acceptance
    `overlap` is the same for the token rule.
    """

    def _weigh(self, alpha: Tensor, counts: Tensor) -> Tensor:
        return _before(alpha) * _after(alpha, counts)


class DPace(RowWeights):
    """w_i = sum_{j >= i} prod_{l <= j} alpha_l, for logarithmic objectives (`lk`, `ce`, `kl`).

    D-PACE (arXiv:2605.18810; smoothing 0.5, acceptance `token`, objective `nll`) is `Streak` times alpha_i.
    Without smoothing, `nll` with D-PACE has the gradient of `hit` with streak weights; `lk` by `overlap` has
    the gradient of `tv`.
    """

    def _weigh(self, alpha: Tensor, counts: Tensor) -> Tensor:
        return _before(alpha) * alpha * _after(alpha, counts)


Weights = DepthWeights | RowWeights


def _before(alpha: Tensor) -> Tensor:
    """(A, K) product of the alphas before each depth."""
    return torch.cat([torch.ones_like(alpha[:, :1]), alpha[:, :-1]], 1).cumprod(1)


def _after(alpha: Tensor, counts: Tensor) -> Tensor:
    """(A, K) c_i + a_{i+1} c_{i+1} + a_{i+1} a_{i+2} c_{i+2} + ..., from the last depth back."""
    *before, last = counts.unbind(1)
    sums = [last]
    for count, following in zip(before[::-1], alpha[:, 1:].unbind(1)[::-1], strict=True):
        sums.append(count + following * sums[-1])
    return torch.stack(sums[::-1], 1)


def weighted(steps: Iterator[DraftStep], weight: Tensor, length: int) -> Iterator[DraftStep]:
    """Yield the steps with a weight per row of the batch, such as a reward (ReSpec, arXiv:2510.26475).

    Args:
        steps: steps of an unroll.
        weight: (B,) weights of the rows.
        length: T of the batch.
    """
    for step in steps:
        yield step._replace(weight=step.weight * weight[step.place // length])
