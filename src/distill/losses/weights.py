"""Weights of the loss at (anchor, depth): by depth, or by expected acceptance.

`constant` and `decay` are functions of the depth, from 1. `Streak` (SpecDiff-2, arXiv:2511.00606)
and `DPace` (arXiv:2605.18810) map acceptance probabilities (A, K) of A anchors at K depths to weights (A, K),
without gradient. `weigh` gives the rows of all steps their weights. `weighted` scales rows of the batch by
(B,) weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from decode.errors import UserError
from distill.losses.row_plan import RowPlan
from drafters.base import DraftStep

DepthWeights = Callable[[int], float]


def constant(depth: int) -> float:
    """Every depth counts the same."""
    del depth
    return 1.0


def decay(depth: int, rate: float) -> float:
    """rate^(depth - 1); Medusa and EAGLE-3 use 0.8 (arXiv:2401.10774, arXiv:2503.01840)."""
    return rate ** (depth - 1)


def first(depth: int) -> float:
    """1 for depth 1, and 0 for the others: the baseline that SpecDiff-2 (arXiv:2511.00606) compares with."""
    return float(depth == 1)


class RowWeights(ABC):
    """Weights from the acceptance probabilities alpha_j of all depths of an anchor, held constant.

    With `overlap`, alpha is sum min(p, q), the acceptance probability of the token rule. With `token`, it is
    q(x) of the text's next token x: for texts by the target, the acceptance probability of the match rule.
    With `greedy`, it is 1 where the most likely tokens of draft and target are equal, else 0.
    """

    acceptance: str

    def check(self, choices: Sequence[str]) -> None:
        """Check the acceptance.

        Raises:
            UserError: it is none of `choices`.
        """
        if self.acceptance not in choices:
            raise UserError(f"weights.acceptance={self.acceptance}: choose {' or '.join(choices)}")

    @abstractmethod
    def __call__(self, alpha: Tensor, present: Tensor, progress: float, counts: Tensor) -> Tensor:
        """(A, K) weights.

        Args:
            alpha: (A, K) acceptance of every anchor, depth 1 first.
            present: (A, K) bool; an anchor's streak ends before a missing depth.
            progress: finished share of the training steps.
            counts: (A, K) counts; above 1 if sampled anchors represent all.
        """


@dataclass(frozen=True)
class SmoothedWeights(RowWeights):
    """Weights by acceptance that begin as functions of the depth.

    Products of alphas vanish for a poor draft, so that only depth 1 would learn. Alpha is therefore smoothed
    to (1 - s) alpha + s. During the first `warmup` of the steps, s falls linearly from 1 (a weight is then
    the number of remaining depths) to `smoothing`.

    Args:
        smoothing: s after the warm-up, from 0 (exact) to 1.
        warmup: share of the training steps.
        acceptance: `overlap` or `token`.

    Raises:
        UserError: a number out of range, another acceptance.
    """

    smoothing: float
    warmup: float
    acceptance: str = "overlap"

    def __post_init__(self) -> None:
        self.check(("overlap", "token"))
        for name in ("smoothing", "warmup"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"weights.{name}={getattr(self, name)}: must be from 0 to 1")

    @override
    def __call__(self, alpha: Tensor, present: Tensor, progress: float, counts: Tensor) -> Tensor:
        """(A, K) weights of terms prod_{l <= j} alpha_l, multiplied by `counts[:, j]`."""
        s = self.smoothing
        if progress < self.warmup:
            s = 1 - (1 - s) * progress / self.warmup
        return self._weigh((alpha * (1 - s) + s) * present, counts)

    @abstractmethod
    def _weigh(self, alpha: Tensor, counts: Tensor) -> Tensor:
        """(A, K) smoothed alphas, 0 at missing depths -> (A, K) weights."""


@dataclass(frozen=True)
class Focal(RowWeights):
    """w_j = prod_{l < j} alpha_l (1 - alpha_j)^gamma: the probability that depth j is the first error.

    With `greedy`, the weight is 1 at the first depth whose most likely token differs from the target's, and 0
    elsewhere: the first-error focal term of arXiv:2606.11552, a cross-entropy that is added to that of all
    depths. We know the paper's term from summaries and from the implementation in vLLM's speculators; gamma,
    after the focal loss (arXiv:1708.02002), and the other acceptances are ours. With `greedy` and gamma 0,
    all depths up to the first error have weight 1: accept-until-fail (Spec-AUF, arXiv:2607.01893).

    Args:
        gamma: at least 0.
        acceptance: `greedy`, `overlap` or `token`.

    Raises:
        UserError: a negative gamma, another acceptance.
    """

    gamma: float
    acceptance: str = "greedy"

    def __post_init__(self) -> None:
        self.check(("greedy", "overlap", "token"))
        if not 0 <= self.gamma < math.inf:
            raise UserError(f"weights.gamma={self.gamma}: must be a number, at least 0")

    @override
    def __call__(self, alpha: Tensor, present: Tensor, progress: float, counts: Tensor) -> Tensor:
        """(A, K) weights, multiplied by `counts`."""
        del progress
        # Rounding may put alpha above 1.
        return _before(alpha * present) * (1 - alpha).clamp_min(0) ** self.gamma * counts


class Streak(SmoothedWeights):
    """w_i = d/d alpha_i of sum_j prod_{l <= j} alpha_l, the expected accepted length.

    Without smoothing, it is exactly the gradient of - sum_j prod_{l <= j} alpha_l. Objective `hit` with
    acceptance `token` is streak-distillation (SpecDiff-2, arXiv:2511.00606); objective `tv` with acceptance
    `overlap` is the same for the token rule.
    """

    @override
    def _weigh(self, alpha: Tensor, counts: Tensor) -> Tensor:
        return _before(alpha) * _after(alpha, counts)


class DPace(SmoothedWeights):
    """w_i = sum_{j >= i} prod_{l <= j} alpha_l, for logarithmic objectives (`lk`, `ce`, `kl`).

    D-PACE (arXiv:2605.18810; smoothing 0.5, acceptance `token`, objective `nll`) is `Streak` times alpha_i.
    Without smoothing, `nll` with D-PACE has the gradient of `hit` with streak weights; `lk` by `overlap` has
    the gradient of `tv`.
    """

    @override
    def _weigh(self, alpha: Tensor, counts: Tensor) -> Tensor:
        return _before(alpha) * alpha * _after(alpha, counts)


Weights = DepthWeights | RowWeights


def weigh(
    weights: Weights,
    steps: Sequence[DraftStep],
    plan: RowPlan,
    chances: Sequence[Tensor],
    progress: float,
) -> list[Tensor]:
    """(M,) weights of every step's rows, multiplied by `step.weight`.

    Depth 0 is no draft and has weight 1. A `training_only` step has the weights of its depth.

    Args:
        weights: by depth or by acceptance.
        steps: steps of `Drafter.unroll`.
        plan: of their rows.
        chances: (M,) acceptance probabilities of each step's rows.
        progress: finished share of the training steps.
    """
    drafts, ones = plan.drafts, [torch.ones_like(a) for a in chances]
    drafted = weights, [steps[i] for i in drafts], plan, [chances[i] for i in drafts], progress
    counts = [ones[i] * steps[i].weight for i in drafts]
    found = dict(zip(drafts, _draft_weights(*drafted, counts), strict=True))
    of_depth = dict[int, Tensor]()
    if any(step.training_only for step in steps):
        plain = _draft_weights(*drafted, [ones[i] for i in drafts])
        of_depth = {steps[i].depth: weight for i, weight in zip(drafts, plain, strict=True)}
    return [
        found[i] if i in found else ones[i] * step.weight * of_depth.get(step.depth, 1.0)
        for i, step in enumerate(steps)
    ]


def _draft_weights(
    weights: Weights,
    steps: Sequence[DraftStep],
    plan: RowPlan,
    chances: Sequence[Tensor],
    progress: float,
    counts: Sequence[Tensor],
) -> list[Tensor]:
    """(M,) weights per drafted step; `counts` (M,) are the counts of its rows."""
    if not isinstance(weights, RowWeights):
        return [count * weights(step.depth) for step, count in zip(steps, counts, strict=True)]
    if not steps:
        return []
    chance, present = plan.table(chances)
    return plan.columns(weights(chance, present, progress, plan.table(counts)[0]))


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
