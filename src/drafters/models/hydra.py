"""Hydra (Ankner et al., arXiv:2402.05109): Medusa heads that read the tokens drafted so far."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from decode.kernels.packed_linear import Linear
from decode.model.head import Head
from decode.model.target import Target
from drafters.base import constructor_arguments
from drafters.families.feature_heads import ChainedHeadsDrafter, check_positive
from drafters.layers.lm_heads import PerDepthHeads, ResBlock


class HydraBlock(nn.Module):
    """R x + SiLU(W x) of a feature and token embeddings x, followed by residual layers.

    R is initialised to select the feature and W to 0, so that a new block returns the feature.

    Args:
        hidden_size: D.
        tokens: number of embeddings after the feature in x.
        layers: number of layers, this one included.
    """

    def __init__(self, hidden_size: int, tokens: int, layers: int) -> None:
        super().__init__()
        size = (1 + tokens) * hidden_size
        self.skip = Linear(size, hidden_size, bias=False)
        self.linear = Linear(size, hidden_size, bias=False)
        self.rest = ResBlock(hidden_size, layers - 1)
        nn.init.eye_(self.skip.weight)
        nn.init.zeros_(self.linear.weight)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.skip(x) + F.silu(self.linear(x)))


class Hydra(ChainedHeadsDrafter):
    """Head j reads [f_t; e(x_{t+1}); ...; e(x_{t+j})] and predicts x_{t+1+j}.

    Embeddings are the target's, frozen. The input of a head grows with its depth, so each has its own
    block. (The authors' code repeats one block if a head has several layers.)

    Args:
        hidden_size: D of the target.
        vocab_size: V of the target.
        depth: number of heads K, the maximum draft length.
        layers: layers of a head; the first maps (1 + j) D to D.
        own_head: each depth has its own output head; see `PerDepthHeads`.
        draft_vocab_size: see `Drafter`.

    Raises:
        UserError: no head, or a head without a layer.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        depth: int,
        layers: int,
        own_head: bool,
        draft_vocab_size: int | None = None,
    ) -> None:
        super().__init__(draft_vocab_size)
        self.settings = constructor_arguments(locals())
        check_positive(depth=depth, layers=layers)
        self.depth = depth
        self.blocks = nn.ModuleList(HydraBlock(hidden_size, j, layers) for j in range(1, depth + 1))
        self.lm_heads = PerDepthHeads(hidden_size, vocab_size, depth if own_head else 0)

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        drafter = cls(hidden_size=target.hidden_size, vocab_size=target.vocab_size, **options)
        drafter.lm_heads.copy_head(target.head)
        return drafter

    @override
    def initial_state(self, feature: Tensor) -> Tensor:
        return feature.to(self.dtype)

    @override
    def cell(self, state: Tensor, token: Tensor, index: int, target: Target) -> Tensor:
        return torch.cat([state, target.embed(token).to(state.dtype)], -1)

    @override
    def head_input(self, state: Tensor, index: int) -> Tensor:
        return self.blocks[index](state)

    @override
    def head_for(self, depth: int, target: Target) -> Head:
        return self.output_head(self.lm_heads.head_for(depth, target.head))
