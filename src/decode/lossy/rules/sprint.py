"""`sprint`: accept all drafted tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from decode.errors import UserError
from decode.lossy.accepting import Relaxed
from decode.verification.shape import Shape


@dataclass(frozen=True)
class Sprint(Relaxed):
    """Accept every token (SPRINTER, arXiv:2502.04557): the draft ends at low confidence."""

    name = "sprint"

    @override
    def check(self, plan: Shape) -> None:
        if plan.depth and not plan.min_confidence:
            raise UserError(
                "decode.rule=sprint accepts a chain up to where the drafter is not confident: set "
                "decode.min_confidence, such as 0.5"
            )

    @override
    def acceptable(self, p: Tensor) -> Tensor:
        return torch.ones_like(p, dtype=torch.bool)
