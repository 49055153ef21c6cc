"""MLP speculator (Wertheimer et al., arXiv:2404.19124) and Snowflake Arctic's LSTM speculator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from decode.kernels.norm import rms_norm
from decode.kernels.packed_linear import Linear
from decode.model.head import Head
from decode.model.target import Target
from drafters.base import constructor_arguments
from drafters.families.feature_heads import ChainedHeadsDrafter, check_positive

EPS = 1e-6


class Norm(nn.Module):
    """x / rms(x), scaled and shifted, as vLLM's MLPSpeculatorLayerNorm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, None, EPS) * self.weight + self.bias


def per_depth(depth: int, make: Callable[[int], nn.Module], alike: int) -> nn.ModuleList:
    """One module per depth; depths from index `alike` share one."""
    modules = [make(i) for i in range(min(depth, alike + 1))]
    return nn.ModuleList(modules[min(i, alike)] for i in range(depth))


class Speculator(ChainedHeadsDrafter):
    """Base of speculators with a small recurrent cell; the initial state is the feature f_t.

    At depth j the cell reads x_{t+j}, and the depth's head predicts x_{t+1+j} from the new state. The cell's
    input is a weighted sum of state and token; the state has a share s^2 of the power, s^(2 K) = 1/2, for
    states with mean square 1/2 and embeddings with the initial 1 / S.

    Args:
        hidden_size: D of the target.
        vocab_size: V of the target.
        inner_size: size of the state, S; 0: D.
        depth: maximum draft length, K.
        tie_weights: all depths share embedding, head and norm; depths from 2 share the projection.
        scale_input: whether the feature is divided by sqrt(2) times its rms.
        draft_vocab_size: see `Drafter`.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        inner_size: int,
        depth: int,
        tie_weights: bool,
        scale_input: bool,
        draft_vocab_size: int | None = None,
    ) -> None:
        super().__init__(draft_vocab_size)
        check_positive(depth=depth, inner_size=inner_size or hidden_size)
        self.inner = size = inner_size or hidden_size
        self.depth, self.scale_input = depth, scale_input
        self.alike = 0 if tie_weights else depth - 1
        keep = 0.5 ** (0.5 / depth)  # s
        self.token_weight = math.sqrt((1 - keep**2) * size / 2) / keep
        self.head = per_depth(depth, lambda _: Linear(size, vocab_size, bias=False), self.alike)

    @torch.no_grad()
    def _initialise(self) -> None:
        """Normal initialisation with variance 1 / S."""
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=self.inner**-0.5)

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        return cls(target.hidden_size, target.vocab_size, **options)

    @property
    @override
    def state_size(self) -> int:
        return self.inner

    @override
    def initial_state(self, feature: Tensor) -> Tensor:
        feature = feature.to(self.dtype)
        if not self.scale_input:
            return feature
        return rms_norm(feature, None, EPS) / math.sqrt(2)

    @override
    def head_input(self, state: Tensor, index: int) -> Tensor:
        return state[..., : self.inner]

    @override
    def head_for(self, depth: int, target: Target) -> Head:
        return self.output_head(Head(self.get_parameter(f"head.{depth - 1}.weight")))


class Mlp(Speculator):
    """s_j = GELU(norm(W_j s_{j-1} + a E_j(x_{t+j}))), the speculator of fms-fsdp."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        inner_size: int,
        depth: int,
        tie_weights: bool,
        scale_input: bool,
        draft_vocab_size: int | None = None,
    ) -> None:
        settings = constructor_arguments(locals())
        super().__init__(**settings)
        self.settings = settings
        size, alike = self.inner, self.alike
        self.emb = per_depth(depth, lambda _: nn.Embedding(vocab_size, size), alike)
        self.proj = per_depth(
            depth, lambda i: Linear(size if i else hidden_size, size, bias=False), max(alike, 1)
        )
        self.ln = per_depth(depth, lambda _: Norm(size), alike)
        self._initialise()

    @override
    def cell(self, state: Tensor, token: Tensor, index: int, target: Target) -> Tensor:
        state = cast("Linear", self.proj[index]).add(self.token_weight * self.emb[index](token), state)
        return F.gelu(self.ln[index](state))


class Lstm(Speculator):
    """LSTM cell instead of the MLP (ArcticTraining's `sum_lstm`).

    Depths share all weights except the first projection, of the feature. The state tensor is the hidden state
    and the memory cell concatenated, S each.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        inner_size: int,
        depth: int,
        scale_input: bool,
        draft_vocab_size: int | None = None,
    ) -> None:
        settings = constructor_arguments(locals())
        super().__init__(**settings, tie_weights=True)
        self.settings = settings
        size = self.inner
        self.emb = nn.Embedding(vocab_size, size)
        self.proj = per_depth(
            min(depth, 2), lambda i: Linear(size if i else hidden_size, 4 * size, bias=False), 1
        )
        self.cell_ln, self.state_ln = Norm(size), Norm(size)
        self._initialise()

    @override
    def initial_state(self, feature: Tensor) -> Tensor:
        feature = super().initial_state(feature)
        return torch.cat([feature, feature.new_zeros(*feature.shape[:-1], self.inner)], -1)

    @override
    def cell(self, state: Tensor, token: Tensor, index: int, target: Target) -> Tensor:
        state, memory = state[..., : -self.inner], state[..., -self.inner :]
        token_part = self.token_weight * self.emb(token)  # (..., S), the same for all gates
        parts = self.proj[min(index, 1)](state).unflatten(-1, (4, -1)) + token_part[..., None, :]
        forget, take, give = parts[..., :3, :].sigmoid().unbind(-2)
        memory = memory * forget + F.gelu(self.cell_ln(parts[..., 3, :])) * take
        return torch.cat([F.gelu(self.state_ln(memory)) * give, memory], -1)
