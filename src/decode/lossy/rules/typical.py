"""`typical`: Medusa's typical acceptance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from decode.lossy.accepting import LongestPath


@dataclass(frozen=True)
class Typical(LongestPath):
    """Accept the longest path of tokens with p(x) >= min(threshold, alpha exp(-entropy)).

    Medusa, arXiv:2401.10774, section 3.3.1.

    Args:
        alpha: lowers the threshold if the target is uncertain.
        threshold: a probability.
    """

    name = "typical"
    alpha: float = 0.3
    threshold: float = 0.09

    @override
    def acceptable(self, p: Tensor) -> Tensor:
        entropy = torch.special.entr(p).sum(-1, keepdim=True)
        return p >= entropy.neg().exp().mul(self.alpha).clamp_max(self.threshold)
