"""`bild`: accept tokens that do not surprise the target much."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from decode.errors import UserError
from decode.lossy.accepting import Relaxed


@dataclass(frozen=True)
class BiLD(Relaxed):
    """Accept tokens whose surprisal -log p(x) is at most `rollback` (BiLD, arXiv:2302.07863).

    Args:
        rollback: in nats.

    Raises:
        UserError: a negative number.
    """

    name = "bild"
    rollback: float = 2.0

    def __post_init__(self) -> None:
        if self.rollback < 0:
            raise UserError(f"decode.rule.rollback={self.rollback}: must be at least 0")

    @override
    def acceptable(self, p: Tensor) -> Tensor:
        return p >= math.exp(-self.rollback)
