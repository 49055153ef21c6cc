"""Boosted drafters: the second is trained on tokens that the first misses; drafts mix nodes of both.

Collective boost-tuning of small models (Col-BT), of SpecInfer (Miao et al., arXiv:2305.09781).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.generation.types import Traits
from decode.model.target import Tap, Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from drafters import optional
from drafters.base import Batch, Drafter, DraftStep
from drafters.drafting.merge import mix_trees
from drafters.families.hf_model import check_no_adapters
from drafters.families.two_drafters import PARTS, TwoDrafters, built, check_rounds
from drafters.registry import short_name

ROWS = 256  # of logits computed at a time


@dataclass(slots=True)
class BoostedState:
    """The states of both drafters."""

    first: Any
    second: Any


class Boosted(TwoDrafters[Drafter]):
    """A frozen, trained first drafter, and a second one trained where the first is wrong.

    The second is trained by its own `unroll`, with row weights

        c / mean(c),    c = 1 if the first's most probable token is not the text's, else `hit_weight`.

    The mean is over the batch's rows of a depth, so the loss stays an average over anchors. Since the target
    drew the text, the expected c is 1 - p(the first's token), the chance that `match` rejects it. The first's
    tokens come from its own unroll, without gradients and in evaluation mode; a missing one counts as wrong.

    Each drafter grows a tree of fixed nodes, and the draft has the most probable paths under
    w q_1 + (1 - w) q_2 (`mix_trees`), w = `first_weight`; `match` verifies such a tree losslessly. All other
    plans use only the first drafter, since it is trained on all anchors.

    Args:
        first: a drafter, or its short name and constructor settings, {drafter: ..., settings: ...}.
        second: the same; a trained one is not trained further.
        first_weight: from 0 to 1.
        hit_weight: from 0 to 1; 1: the second is trained equally on all anchors, as in an ensemble.

    Raises:
        UserError: drafters that cannot be combined, or an option out of range.
    """

    trained_part = "second"
    needs = "is no dynamic tree of fixed nodes (decode=dynamic decode.proposal=fixed)"
    traits = Traits()

    def __init__(
        self,
        first: Mapping[str, Any] | Drafter,
        second: Mapping[str, Any] | Drafter,
        first_weight: float = 0.5,
        hit_weight: float = 0.0,
    ) -> None:
        options = {"first_weight": first_weight, "hit_weight": hit_weight}
        super().__init__(built(first), built(second), options)
        for name, value in options.items():
            if not 0 <= value <= 1:
                raise UserError(f"drafter.{name}={value}: must be from 0 to 1")
        self.first_weight, self.hit_weight = first_weight, hit_weight
        parts: list[Drafter] = [self.first, self.second]
        for name, part in zip(PARTS, parts, strict=True):
            _check(name, part)
        self.first.requires_grad_(False).eval()
        self.taps = tuple(dict.fromkeys(tap for part in parts for tap in part.taps))
        self.traits = replace(self.traits, reads_cache=any(part.traits.reads_cache for part in parts))

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        """See `TwoDrafters.for_target`.

        Raises:
            UserError: the first drafter is not trained.
        """
        drafter = super().for_target(target, **options)
        if (first := drafter.first).trains and first.origin is None:
            name = short_name(first)
            raise UserError(
                f"drafter.first={name}: not trained, so the second cannot learn from its errors; "
                f"train it (foredraft train drafter={name}) and give its checkpoint's folder"
            )
        return drafter

    # -- training ------------------------------------------------------------------------------

    @override
    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.first.eval()
        return self

    @override
    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        chosen = self._first_tokens(batch._replace(taps=self._taps_of(self.first, batch.taps)), target)
        text = batch.tokens.flatten()
        for step in self.second.unroll(batch._replace(taps=self._taps_of(self.second, batch.taps)), target):
            depth, anchor = step.depth, step.place
            if self.first.traits.depth_invariant:
                depth, anchor = 1, anchor + (depth - 1)
            guess = chosen[depth][anchor] if depth in chosen else torch.full_like(anchor, -1)
            hit = guess == text[step.place + (1 + step.depth)]
            yield step._replace(weight=step.weight * self._row_weights(hit))

    @torch.no_grad()
    def _first_tokens(self, batch: Batch, target: Target) -> dict[int, Tensor]:
        """Depth -> (B * T,) the first's most probable tokens at its anchors, -1 elsewhere."""
        chosen: dict[int, Tensor] = {}
        for step in self.first.unroll(batch, target):
            if step.training_only:
                continue
            best = [step.head(rows).argmax(-1) for rows in step.hidden.split(ROWS)]
            token = torch.cat(best) if best else step.place
            if step.head.d2t is not None:
                token = step.head.d2t[token]
            empty = torch.full_like(batch.tokens.flatten(), -1)
            chosen[step.depth] = empty.index_copy(0, step.place, token)
        return chosen

    def _row_weights(self, hit: Tensor) -> Tensor:
        """(M,) bool -> (M,) weights of the rows, 1 on average; 0 if all rows have weight 0."""
        counts = torch.where(hit, self.hit_weight, 1.0)
        total = counts.sum()
        return counts * torch.where(total > 0, len(hit) / total, 0.0)

    @property
    @override
    def state_size(self) -> int | None:
        """None: a tree has no confidences, and chains are the first drafter's."""
        return None

    @override
    def add_confidence(self) -> None:
        raise UserError(
            "drafter.confidence=true: chains are the first drafter's, which is trained already; leave it "
            "false"
        )

    # -- plans ---------------------------------------------------------------------------------

    @override
    def combines(self, plan: Plan) -> bool:
        return plan.depth > 0 and plan.width > 1 and plan.proposal == "fixed" and not plan.tree

    @override
    def check(self, plan: Plan) -> None:
        parts: Sequence[str] = PARTS if self.combines(plan) else PARTS[:1]
        for name in parts:
            self.check_part(name, self._plan_of(name, plan))

    def _plan_of(self, name: str, plan: Plan) -> Plan:
        """The plan of one of the two drafters; the second may have fewer levels."""
        deepest = self.second.max_depth
        return plan if name == "first" or deepest is None else _with_depth(plan, min(plan.depth, deepest))

    # -- decoding ------------------------------------------------------------------------------

    @override
    def new_state(self, rows: int) -> BoostedState:
        return BoostedState(self.first.new_state(rows), self.second.new_state(rows))

    @override
    def advance(
        self,
        state: BoostedState,
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        self.first.advance(state.first, target, tokens, self._taps_of(self.first, taps), counts, root)
        self.second.advance(state.second, target, tokens, self._taps_of(self.second, taps), counts, root)

    @override
    def append(self, state: BoostedState, target: Target, other: BoostedState) -> None:
        self.first.append(state.first, target, other.first)
        self.second.append(state.second, target, other.second)

    @override
    def propose(
        self, state: BoostedState, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        first = self.first.propose(state.first, target, sampler, coin, plan)
        if not self.combines(plan):
            return first
        cut = self._plan_of("second", plan)
        second = self.second.propose(state.second, target, sampler, coin, cut)
        return mix_trees(first, second, self.first_weight, plan.nodes)

    @override
    def kv_bytes_per_token(self, state: BoostedState) -> int:
        parts = [(self.first, state.first), (self.second, state.second)]
        return sum(optional.kv_bytes_per_token(*part) for part in parts)

    def _taps_of(self, part: Drafter, taps: Tensor) -> Tensor:
        """(B, T, L, D) taps of both drafters -> of one."""
        if part.taps == self.taps:
            return taps
        if not part.taps:
            return taps[:, :, :0]
        places: Mapping[Tap, int] = {tap: place for place, tap in enumerate(self.taps)}
        return torch.stack([taps[:, :, places[tap]] for tap in part.taps], 2)


@lru_cache(maxsize=64)
def _with_depth(plan: Plan, depth: int) -> Plan:
    """The plan with another depth; cached, since plans are checked when built."""
    return plan if depth == plan.depth else replace(plan, depth=depth, adapt=None)


def _check(name: str, part: Drafter) -> None:
    kind = f"drafter.{name}={short_name(part)}"
    if type(part).unroll is Drafter.unroll:
        raise UserError(f"{kind}: it cannot be trained; choose one that can be")
    if part.traits.tunes_target:
        raise UserError(
            f"{kind}: it drafts for a tuned copy of the target, and cannot be combined; choose another"
        )
    if part.confidence is not None:
        raise UserError(
            f"{kind}: its confidence head ends chains, and boosted drafters draft trees; give a checkpoint "
            "without one (drafter.confidence=false)"
        )
    check_rounds(name, part)
    check_no_adapters(part, name)
