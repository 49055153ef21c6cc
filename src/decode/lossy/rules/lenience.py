"""`lenience`: DistillSpec's rule, which accepts drawn tokens more often."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.rng import Coin, Purpose
from decode.verification.descent import descend, try_sampled
from decode.verification.result import VerificationResult
from decode.verification.rule import LossyRule
from decode.verification.shape import Shape
from decode.verification.target_probs import TargetProbs


@dataclass(frozen=True)
class Lenience(LossyRule):
    """DistillSpec's lenience f(p) = p / e (arXiv:2310.08461): `recursive`, where a sampled child is accepted
    with probability min(1, r(x) / (e q(x))). With e = 1 it is `recursive`.

    Args:
        factor: e.

    Raises:
        UserError: outside (0, 1].
    """

    name = "lenience"
    accepts = "any chain or tree whose sampled nodes carry their q, lossily"
    reads_probs = True
    factor: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.factor <= 1:
            raise UserError(f"decode.rule.factor={self.factor}: must be above 0 and at most 1")

    @override
    def check(self, plan: Shape) -> None:
        if plan.depth and plan.proposal not in ("sampled", "hybrid"):
            raise UserError(
                "decode.rule=lenience weighs drawn tokens by their q: set decode.proposal=sampled for a "
                "chain or a static tree, or hybrid for a tree"
            )

    @override
    def verify(self, draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
        return descend(draft, target, coin, Purpose.RESIDUAL, partial(try_sampled, lenience=self.factor))

    @override
    def emitted(self, p: Tensor, q: Tensor) -> Tensor:
        """Return m + (1 - sum m) norm (p - q)+, with m = min(q, p / e)."""
        kept, rest = torch.minimum(q, p / self.factor), (p - q).clamp_min(0)
        mass = rest.sum(-1, keepdim=True)
        rest = torch.where(mass > 0, rest / mass, p)
        return kept + (1 - kept.sum(-1, keepdim=True)) * rest
