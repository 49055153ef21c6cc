"""What drafters with a head for every depth are made of."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from decode.model.head import Head
from decode.model.target import Target


class ResBlock(nn.Module):
    """x + SiLU(W x + b), layer after layer; W and b begin at 0, so that a fresh block changes nothing."""

    def __init__(self, hidden_size: int, layers: int, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(layers))
        for weight in self.parameters():
            nn.init.zeros_(weight)

    @override
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class PerDepthHeads(nn.ModuleList):
    """An output head for each of the first depths, begun as the target's and trained (V D weights each).

    Without any, all depths share the target's, frozen.

    Args:
        hidden_size: D of the target.
        vocab_size: V of the target.
        count: heads.
    """

    def __init__(self, hidden_size: int, vocab_size: int, count: int) -> None:
        # Not worth a random start: `copy_head` or a checkpoint fills them in.
        super().__init__(
            nn.utils.skip_init(
                nn.Linear, hidden_size, vocab_size, bias=False, device=torch.get_default_device()
            )
            for _ in range(count)
        )

    @torch.no_grad()
    def copy_head(self, target: Target) -> None:
        """As copies of the target's."""
        for weight in self.parameters():
            weight.copy_(target.head.weight)

    def head_for(self, depth: int, target: Target) -> Head:
        """The head of `depth`, with what the target's family puts behind the linear map."""
        if not self:
            return target.head
        return replace(target.head, weight=self.get_parameter(f"{depth - 1}.weight"))
