"""Two drafters in one draft: a trained one and a lookup.

As in FastDeploy with an n-gram and MTP (pull request 3610), and in TensorRT-LLM with a suffix automaton
and EAGLE-3 (`sa_config`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from decode.draft import PAD, Draft
from decode.errors import UserError
from decode.model.target import Target
from decode.plan import Path, Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from drafters.base import Drafter
from drafters.drafting.deferred import Deferred
from drafters.families.hf_model import check_no_adapters
from drafters.families.lookup import (
    FixedNodesDrafter,
    IndexedText,
    LookupDrafter,
    Node,
    as_lookup,
    best_tree,
    pack_drafts,
)
from drafters.families.two_drafters import TwoDrafters, built, check_rounds
from drafters.registry import short_name

DEFERRED = 64  # tokens of a row that the first drafter may read later
BRANCHES = 8  # tokens that each of the two proposes below a node


@dataclass(slots=True)
class UnionState:
    """The states of both drafters; tokens in `waiting` are not yet in the first's."""

    first: Any
    second: Any
    waiting: Deferred = field(default_factory=Deferred)
    begun: bool = False  # whether the first has read a prompt


class Union(TwoDrafters[LookupDrafter]):
    """The second drafter, a lookup, drafts in every round; the first drafts in rows that need it.

    A row uses only the second's draft if the second expects at least `second_alone` accepted tokens: the sum
    of the estimated probabilities of its nodes. If all rows do, the first does not run, and reads the
    settled tokens later in one pass. In other rows the first drafts a tree of `first_depth` levels, and the
    draft is the chain or tree of the most probable nodes under a mixture,

        p(t | path) = w q(t | path) + (1 - w) (r(t | path) + left q(t | path)),    w = `first_weight`,

    with the first's distribution q, the second's estimate r, and `left` the probability that r does not
    assign. Below paths without q, p is r. All nodes are fixed, so `match` is lossless. Other plans use only
    the first drafter. Training and export are the first drafter's.

    Args:
        first: a drafter, or its short name and constructor settings, {drafter: ..., settings: ...}.
        second: the same for a lookup, ngram or suffix.
        second_alone: in tokens; None: the first drafts in every round.
        first_depth: in levels; None: as deep as the plan.
        first_weight: from 0 to 1.

    Raises:
        UserError: drafters that cannot be combined, or an option out of range.
    """

    needs = "needs fixed nodes in a chain or a dynamic tree (decode.proposal=fixed)"

    def __init__(
        self,
        first: Mapping[str, Any] | Drafter,
        second: Mapping[str, Any] | Drafter,
        second_alone: float | None = 1.5,
        first_depth: int | None = 1,
        first_weight: float = 0.8,
    ) -> None:
        options = {"second_alone": second_alone, "first_depth": first_depth, "first_weight": first_weight}
        super().__init__(built(first), as_lookup(built(second)), options)
        self.second_alone, self.first_depth, self.first_weight = second_alone, first_depth, first_weight
        _check(self.first, second_alone, first_depth, first_weight)

    @override
    def check(self, plan: Plan) -> None:
        self.check_part("first", self._first_plan(plan) if self.combines(plan) else plan)

    @override
    def combines(self, plan: Plan) -> bool:
        return plan.depth > 0 and plan.proposal == "fixed" and not plan.tree and not plan.min_confidence

    def _first_plan(self, plan: Plan) -> Plan:
        """The first drafter's plan."""
        depth = plan.depth if self.first_depth is None else min(self.first_depth, plan.depth)
        return _tree_plan(plan, min(depth, self.first.max_depth or depth))

    @override
    def new_state(self, rows: int) -> UnionState:
        return UnionState(self.first.new_state(rows), self.second.new_state(rows))

    @override
    def advance(
        self,
        state: UnionState,
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        self.second.advance(state.second, target, tokens, taps[:, :, :0], counts, root)
        if self.second_alone is None or not state.begun:  # a prompt does not wait: its taps are large
            state.begun = True
            self.first.advance(state.first, target, tokens, taps, counts, root)
            return
        state.waiting.add(tokens, taps, counts, root)
        if state.waiting.width > DEFERRED:
            self._catch_up(state, target)

    def _catch_up(self, state: UnionState, target: Target) -> None:
        """Have the first drafter read the waiting tokens."""
        if (waiting := state.waiting.take()) is not None:
            self.first.advance(state.first, target, *waiting)

    @override
    def append(self, state: UnionState, target: Target, other: UnionState) -> None:
        for part in (state, other):
            self._catch_up(part, target)
        self.first.append(state.first, target, other.first)
        self.second.append(state.second, target, other.second)

    @override
    def propose(
        self, state: UnionState, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        if not self.combines(plan):
            self._catch_up(state, target)
            return self.first.propose(state.first, target, sampler, coin, plan)
        rows = [self.second.nodes(history, plan) for history in state.second]
        mixed = [row for row, nodes in enumerate(rows) if not self._second_suffices(nodes)]
        if mixed:
            self._catch_up(state, target)
            draft = self.first.propose(state.first, target, sampler, coin, self._first_plan(plan))
            trees = _probabilities(draft)
            for row in mixed:
                rows[row] = self._mixture(trees[row], state.second[row], plan)
        return pack_drafts(rows, target.device, coin)

    def _second_suffices(self, nodes: Sequence[Node]) -> bool:
        """Whether a row uses only the second's draft."""
        return self.second_alone is not None and sum(node.chance for node in nodes) >= self.second_alone

    def _mixture(self, tree: _Tree, history: IndexedText, plan: Plan) -> list[Node]:
        """The most probable nodes of a row under the mixture of both."""

        def next_tokens(path: Path) -> list[tuple[int, float]]:
            looked_up = self.second.next_tokens(history, path, BRANCHES)
            own = tree.get(path)
            if own is None:
                return looked_up
            other = 1 - self.first_weight
            mixed = {token: other * share for token, share in looked_up}
            weight = 1 - other * sum(share for _, share in looked_up)
            for token, q in own:
                mixed[token] = mixed.get(token, 0.0) + weight * q
            return sorted(mixed.items(), key=itemgetter(1), reverse=True)

        return best_tree(next_tokens, plan)


_Tree = Mapping[Path, Sequence[tuple[int, float]]]  # path -> tokens below it with their q


def _probabilities(draft: Draft) -> list[dict[Path, list[tuple[int, float]]]]:
    """Each row's tree of fixed nodes, as tokens with their q below every path."""
    if not draft.depth:
        return [{} for _ in draft.tokens]
    assert draft.score is not None  # every dynamic tree has it
    nodes = torch.stack([draft.tokens.double(), draft.parents.double(), draft.score.double()], -1)
    trees = []
    for row in nodes.tolist():
        tree: dict[Path, list[tuple[int, float]]] = {}
        paths: list[tuple[Path, float]] = []
        for token, parent, score in row:
            above, reached = paths[int(parent)] if parent >= 0 else ((), 0.0)
            paths.append(((*above, int(token)), score))
            if token != PAD and score > -math.inf:
                tree.setdefault(above, []).append((int(token), math.exp(score - reached)))
        trees.append(tree)
    return trees


@lru_cache(maxsize=64)
def _tree_plan(plan: Plan, depth: int) -> Plan:
    """The first drafter's plan for a plan; cached, since plans are checked when built."""
    width = BRANCHES if depth == 1 else max(plan.width, 2)
    whole = width + (depth - 1) * width * width  # all scored nodes
    return replace(plan, depth=depth, width=width, nodes=whole, adapt=None)


def _check(first: Drafter, alone: float | None, depth: int | None, weight: float) -> None:
    if alone is not None and alone < 0:
        raise UserError(f"drafter.second_alone={alone}: must be at least 0, or null")
    if depth is not None and depth < 1:
        raise UserError(f"drafter.first_depth={depth}: must be at least 1, or null")
    if not 0 <= weight <= 1:
        raise UserError(f"drafter.first_weight={weight}: must be from 0 to 1")
    name = short_name(first)
    if isinstance(first, FixedNodesDrafter):
        raise UserError(f"drafter.first={name}: a lookup has no distribution; choose a trained drafter")
    check_rounds("first", first)
    check_no_adapters(first)
