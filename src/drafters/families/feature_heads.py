"""Bases of drafters that read only the newest feature and the root, without a KV cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.model.head import Head
from decode.model.target import LAST, Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.transfer import RowInts
from drafters.base import Batch, Drafter, DraftStep
from drafters.drafting.tree import expand
from drafters.layers.anchor_rows import rows_by_depth
from drafters.vocabulary import Vocabulary


@dataclass(slots=True)
class FeatureState:
    """Newest feature and root of each row; None before the first `advance`."""

    feature: Tensor | None = None  # (B, D) the target's last, at the token before the root
    root: Tensor | None = None  # (B,)


class FeatureHeadsDrafter(Drafter):
    """Base of Medusa-like drafters; implements state and `advance`.

    Attributes:
        depth: number of heads K, the maximum draft length.
    """

    taps = (LAST,)
    depth: int

    @property
    @override
    def max_depth(self) -> int:
        """One head per depth."""
        return self.depth

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return next(self.parameters()).dtype

    @override
    def new_state(self, rows: int) -> FeatureState:
        return FeatureState()

    @override
    def advance(
        self,
        state: FeatureState,
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        end = RowInts.of(counts).on(taps.device) - 1  # (B,)
        state.feature = taps[torch.arange(len(end), device=taps.device), end, 0]
        state.root = root


class ChainedHeadsDrafter(FeatureHeadsDrafter):
    """Recurrent heads: the state at depth j is computed from the previous state and x_{t+j}."""

    @abstractmethod
    def initial_state(self, feature: Tensor) -> Tensor:
        """(..., D) features -> (..., C) initial states."""

    @abstractmethod
    def cell(self, state: Tensor, token: Tensor, index: int, target: Target) -> Tensor:
        """(..., C) states and (...) tokens -> (..., C') states of depth index + 1."""

    @abstractmethod
    def head_input(self, state: Tensor, index: int) -> Tensor:
        """(..., C') states of depth index + 1 -> (..., D') input of the head."""

    @abstractmethod
    def head_for(self, depth: int, target: Target) -> Head:
        """The head of `depth`."""

    # -- training ----------------------------------------------------------------------------

    @override
    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        tokens = batch.tokens.flatten()
        supervised = rows_by_depth(batch.loss_mask, self.depth, tokens.device)
        if not supervised:
            return
        before = supervised[0]
        state = self.initial_state(batch.taps[:, :, 0].flatten(0, 1)[before.place])
        for depth, rows in enumerate(supervised, 1):
            if len(rows.row) < len(before.row):
                state = state[torch.searchsorted(before.row, rows.row)]
            state, before = self.cell(state, tokens[rows.place + depth], depth - 1, target), rows
            hidden, head = self.head_input(state, depth - 1), self.head_for(depth, target)
            yield DraftStep(hidden, rows.anchor, depth, head, {}, copied=rows.place)

    # -- decoding ----------------------------------------------------------------------------

    @override
    def propose(
        self, state: FeatureState, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        assert state.feature is not None
        assert state.root is not None
        self.check(plan)
        states, depth = self.initial_state(state.feature)[:, None], 0  # (B, W, C) of the last level
        hidden = states  # (B, W, D') head input of the last level

        def step(token: Tensor, parent: Tensor) -> Tensor:
            nonlocal states, depth, hidden
            states = states.gather(1, parent[..., None].expand(-1, -1, states.shape[-1]))
            states = self.cell(states, token, depth, target)
            depth += 1
            hidden = self.head_input(states, depth - 1)
            return self.head_for(depth, target)(hidden)

        root = state.root[:, None]
        first = step(root, torch.zeros_like(root))[:, 0]
        vocabulary = Vocabulary.of(self.head_for(1, target), target)
        return expand(first, step, sampler, coin, plan, vocabulary, self.confidence_of(lambda: hidden))


def check_positive(**settings: Any) -> None:
    """Check that settings are at least 1.

    Raises:
        UserError: names a setting below 1.
    """
    for name, value in settings.items():
        if value < 1:
            raise UserError(f"drafter.{name}={value} must be at least 1")
