"""Adaptive draft length: a wrapper around any proposer of chains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.depth_policy import DepthPolicy
from decode.draft import PAD, Draft, DraftProbs
from decode.generation.types import Observes, Proposer
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin, to_device
from decode.sampling import Sampler
from decode.transfer import RowInts, Settled


def adapt_depth(drafter: Proposer, plan: Plan) -> Proposer:
    """Wrap the drafter if the plan has a depth policy."""
    if plan.adapt is None:
        return drafter
    return (_Observing if isinstance(drafter, Observes) else AdaptiveDepth)(drafter, plan, plan.adapt)


@dataclass(slots=True)
class _State:
    inner: Any
    counts: np.ndarray  # (2, B) history of `DepthPolicy`
    lengths: Tensor | None = None  # (B,) draft lengths of the current round


class AdaptiveDepth:
    """A proposer that chooses its draft length from settled rounds, before the next round's draws.

    Fixed drafts are verified by `match` and do not affect its output, so all rows of a batch use one length.
    With sampled drafts the length decides which random keys determine the text, so each row uses its own
    history and its text does not depend on the rest of the batch. The exception is a drafter with state
    that depends on the depth of the draft (Lyanna's `logit_sum`).

    Args:
        drafter: the wrapped proposer.
        plan: plan of the longest chain.
        policy: chooses the length.
    """

    def __init__(self, drafter: Proposer, plan: Plan, policy: DepthPolicy) -> None:
        self.drafter, self.policy = drafter, policy
        self.traits = drafter.traits
        self.per_row = not plan.rule.keeps_text and plan.proposal != "fixed"
        self.plans = [replace(plan, depth=k, nodes=0, adapt=None) for k in range(plan.depth + 1)]

    def new_state(self, rows: int) -> _State:
        """Return state for `rows` new sequences."""
        return _State(self.drafter.new_state(rows), self.policy.initial_counts(rows))

    def advance(
        self, state: _State, target: Target, tokens: Tensor, taps: Tensor, counts: Sequence[int], root: Tensor
    ) -> None:
        """See `Proposer.advance`; after a round, `counts` also gives the number of accepted tokens."""
        if state.lengths is not None:
            accepted = [count - 1 for count in counts]
            lengths = counts.draft_lengths if isinstance(counts, Settled) else state.lengths.tolist()
            state.counts = self.policy.update(state.counts, accepted, lengths)
            state.lengths = None
        self.drafter.advance(state.inner, target, tokens, taps, counts, root)

    def select(self, state: _State, rows: Sequence[int]) -> None:
        """Keep these rows of the state, in this order."""
        self.drafter.select(state.inner, rows)
        state.counts = state.counts[:, list(rows)]
        if state.lengths is not None:
            state.lengths = state.lengths[RowInts.of(rows).on(state.lengths.device)]

    def append(self, state: _State, target: Target, other: _State) -> None:
        """Append another state's rows; both have advanced since they drafted."""
        self.drafter.append(state.inner, target, other.inner)
        state.counts = np.concatenate([state.counts, other.counts], 1)

    def propose(self, state: _State, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan) -> Draft:
        """Draft below the root with the policy's length."""
        del plan
        depths = self.policy.depths(state.counts, self.per_row)
        draft = self._draft(state, target, sampler, coin, depths)
        state.lengths = draft.lengths()
        return draft

    def _draft(
        self, state: _State, target: Target, sampler: Sampler, coin: KeyedCoin, depths: Sequence[int]
    ) -> Draft:
        device = target.device
        if not max(depths):
            empty = Draft.empty(len(depths), device)
            if not self.per_row:
                return empty
            # With empty `probs` the rule uses the same random keys as for an empty row of a mixed batch.
            q = torch.zeros(len(depths), 0, target.vocab_size, device=device)
            return replace(empty, probs=DraftProbs(q, empty.tokens, (), empty.tokens.bool()))
        plan = self.plans[max(depths)]
        if min(depths) == max(depths):
            return self.drafter.propose(state.inner, target, sampler, coin, plan)
        end = to_device(depths, device, coin)[:, None]  # before any draw, so that draws are uploaded with it
        draft = self.drafter.propose(state.inner, target, sampler, coin, plan)
        if not draft.depth:
            return draft
        # Cut each row at its own length; the cut does not depend on the tokens removed.
        level = torch.arange(draft.tokens.shape[1], device=device)
        return replace(draft, tokens=draft.tokens.masked_fill(level >= end, PAD))


class _Observing(AdaptiveDepth):
    """Wrapper of a proposer that observes."""

    def observe(self, state: _State, answers: Sequence[Sequence[int]]) -> None:
        """See `Observes`."""
        assert isinstance(self.drafter, Observes)
        self.drafter.observe(state.inner, answers)
