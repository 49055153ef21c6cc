"""`threshold`: accept tokens with at least some probability."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from decode.lossy.accepting import LongestPath


@dataclass(frozen=True)
class Threshold(LongestPath):
    """Accept the longest path of tokens with p(x) >= threshold.

    Args:
        threshold: a probability.
    """

    name = "threshold"
    threshold: float = 0.09

    @override
    def acceptable(self, p: Tensor) -> Tensor:
        return p >= self.threshold
