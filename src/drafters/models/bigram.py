"""Bigram table counted on the rollouts: a baseline for trained drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from decode.draft import Draft
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from drafters.drafting.tree import expand
from drafters.families.pair_table import PairTable


@dataclass(slots=True)
class BigramState:
    """The newest token of every row."""

    root: Tensor | None = None  # (B,)


class Bigram(PairTable):
    """Drafts from the table of token pairs."""

    @override
    def new_state(self, rows: int) -> BigramState:
        return BigramState()

    @override
    def advance(
        self,
        state: BigramState,
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        state.root = root

    @override
    def propose(
        self, state: BigramState, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        assert state.root is not None

        def step(token: Tensor, parent: Tensor) -> Tensor:
            del parent  # children depend on the token only
            return self.logits(token, target.dtype)

        return expand(self.logits(state.root, target.dtype), step, sampler, coin, plan)
