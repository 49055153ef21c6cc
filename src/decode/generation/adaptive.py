"""Chains whose length follows what was accepted: a proposer around any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.depth_policy import Pace
from decode.draft import PAD, Draft, Laws
from decode.generation.types import Proposer
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler


def paced(drafter: Proposer, plan: Plan) -> Proposer:
    """The drafter, at the plan's pace if it has one."""
    return drafter if plan.adapt is None else Paced(drafter, plan, plan.adapt)


@dataclass(slots=True)
class _State:
    inner: Any
    counts: np.ndarray  # (2, B) what `Pace` keeps of the past
    offered: Tensor | None = None  # (B,) depth of the newest draft


class Paced:
    """Decides how deep to draft by settled rounds alone, before a coin is tossed for the next one.

    Chosen tokens are verified by `match`, which draws the text of plain decoding whatever is drafted, so
    the rows of a batch agree on a depth. Where tokens are drawn, the length of a draft says which keys
    decide the text, so there every row goes by its own past and keeps its text in any company, unless
    what a drafter remembers of a draft depends on how deep that was (Lyanna's `logit_sum`).

    Args:
        drafter: drafts.
        plan: of the longest chain.
        pace: says how long.
    """

    def __init__(self, drafter: Proposer, plan: Plan, pace: Pace) -> None:
        self.drafter, self.pace = drafter, pace
        self.drawn = plan.rule != "match" and plan.proposal != "fixed"
        self.plans = [replace(plan, depth=k, nodes=0, adapt=None) for k in range(plan.depth + 1)]

    def new_state(self, rows: int) -> _State:
        """State for `rows` fresh sequences."""
        return _State(self.drafter.new_state(rows), self.pace.start(rows))

    def advance(
        self, state: _State, target: Target, tokens: Tensor, taps: Tensor, counts: Sequence[int], root: Tensor
    ) -> None:
        """See `decode.generation.types.Proposer.advance`; of a round, `counts` says what was accepted."""
        if state.offered is not None:
            accepted = [count - 1 for count in counts]
            state.counts = self.pace.seen(state.counts, accepted, state.offered.tolist())
            state.offered = None
        self.drafter.advance(state.inner, target, tokens, taps, counts, root)

    def select(self, state: _State, rows: Sequence[int]) -> None:
        """Keep these rows of the state, in this order."""
        self.drafter.select(state.inner, rows)
        state.counts = state.counts[:, list(rows)]
        if state.offered is not None:
            state.offered = state.offered[list(rows)]

    def propose(self, state: _State, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan) -> Draft:
        """Draft below the root, as deep as the past advises."""
        del plan
        depths = self.pace.depths(state.counts, self.drawn)
        draft = self._draft(state, target, sampler, coin, depths)
        state.offered = draft.offered()
        return draft

    def _draft(
        self, state: _State, target: Target, sampler: Sampler, coin: KeyedCoin, depths: Sequence[int]
    ) -> Draft:
        device = target.device
        if not max(depths):
            none = Draft.empty(len(depths), device)
            if not self.drawn:
                return none
            # It draws by the keys of a row that drafts nothing beside one that does.
            laws = torch.zeros(len(depths), 0, target.vocab_size, device=device)
            return replace(none, laws=Laws(laws, none.tokens, (), none.tokens.bool()))
        draft = self.drafter.propose(state.inner, target, sampler, coin, self.plans[max(depths)])
        if min(depths) == max(depths) or not draft.depth:
            return draft
        # What was drawn behind a row's end has no part in where the end is.
        end = torch.tensor(depths).to(device)[:, None]
        level = torch.arange(draft.tokens.shape[1], device=device)
        return replace(draft, tokens=draft.tokens.masked_fill(level >= end, PAD))
