"""Residual blocks and output heads for drafters with one head per depth."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from decode.kernels.packed_linear import Linear
from decode.model.head import Head


class ResBlock(nn.Module):
    """Layers x + SiLU(W x + b), with W and b initialised to 0, so that a new block is the identity."""

    def __init__(self, hidden_size: int, layers: int, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(hidden_size, hidden_size, bias=bias) for _ in range(layers))
        for weight in self.parameters():
            nn.init.zeros_(weight)

    @override
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class PerDepthHeads(nn.ModuleList):
    """One trained output head (V x D) per depth, initialised with the target's.

    With no heads, all depths share the target's frozen head.

    Args:
        hidden_size: D of the target.
        vocab_size: V of the target.
        count: number of heads.
    """

    def __init__(self, hidden_size: int, vocab_size: int, count: int) -> None:
        # No random initialisation: `copy_head` or a checkpoint fills the weights in.
        super().__init__(
            nn.utils.skip_init(Linear, hidden_size, vocab_size, bias=False, device=torch.get_default_device())
            for _ in range(count)
        )

    @torch.no_grad()
    def copy_head(self, head: Head) -> None:
        """Copy a head's weight into the head of every depth."""
        for weight in self.parameters():
            weight.copy_(head.weight)

    def head_for(self, depth: int, head: Head) -> Head:
        """Head of `depth`, from 1, with the scale, bias and soft cap of `head`, the target's."""
        return replace(head, weight=self.get_parameter(f"{depth - 1}.weight")) if self else head
