"""What a drafter expects of its own tokens: a head that any of them can have."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override


class Confidence(nn.Module):
    """sigmoid(w . s + b): the chance that the token drawn from the law that is read off state s is
    accepted (DSpark, arXiv:2607.05147; SpecDec++, arXiv:2405.19715).

    It is taught alpha = sum min(p, q), the exact chance, beside the drafter and not with it: states
    are detached, so that what is drafted is the same with and without it. It begins at 1/2.

    Args:
        hidden_size: D of the states.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        # Vectors, so that no optimizer takes them for a hidden matrix.
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """(..., D + r) -> (...) logits; columns behind the first D are not read."""
        states = hidden[..., : len(self.weight)].detach()
        return states.to(self.weight.dtype) @ self.weight + self.bias
