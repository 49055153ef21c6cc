"""Cascade Speculative Drafting (CS Drafting, Chen et al., arXiv:2312.11462): a lookup and a draft model.

Its vertical cascade is also the inner loop of staged speculative decoding (arXiv:2308.04623) and TriForce
(arXiv:2404.11912).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from decode.draft import PAD, Draft
from decode.errors import UserError
from decode.model.target import Target
from decode.plan import Path, Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.transfer import upload
from drafters import optional
from drafters.base import Drafter
from drafters.drafting.deferred import Deferred
from drafters.drafting.tree import expand
from drafters.families.hf_model import check_no_adapters
from drafters.families.lookup import IndexedText, LookupDrafter, Node, as_lookup
from drafters.families.two_drafters import TwoDrafters, built
from drafters.models.lm import DraftLM
from drafters.registry import short_name
from drafters.zoo.read_ahead import ReadAhead, ReadNodes, guessed, read_drafted, read_settled


@dataclass(slots=True)
class CascadeState:
    """The states of both drafters.

    Attributes:
        first: of the first, without the waiting tokens.
        second: of the second.
        waiting: settled tokens that the first reads with the next guesses.
        ahead: nodes below the root that the first has read; None: none.
        begun: whether the first has read a prompt.
    """

    first: Any
    second: list[IndexedText]
    waiting: Deferred = field(default_factory=Deferred)
    ahead: ReadNodes | None = None
    begun: bool = False


class Cascade(TwoDrafters[LookupDrafter]):
    """The first, a draft model, drafts a chain or a tree, and the second, a lookup, guesses its nodes.

    Vertical cascade: the first reads the newest tokens and guesses of the nodes below them in one pass, then
    chooses or draws its own nodes as without guesses. It needs no pass for a node that was guessed. Tokens
    and distributions q are those of the first drafter, up to rounding; only the number of passes differs.
    The pass over settled tokens is delayed and also reads a round's first guesses. With `trees`, guesses of a
    tree's nodes are read as well (staged speculation), and a level needs no pass if all its expanded nodes
    were guessed. Without it, only the first drafts trees and parallel chains.

    Horizontal cascade: with `first_depth` the first drafts that many tokens of a chain, and the second the
    later, rarely accepted ones. q of these is one-hot.

    Training and export are the first drafter's.

    Args:
        first: a drafter, or its short name and constructor settings, {drafter: ..., settings: ...}; a draft
            model with the target's vocabulary.
        second: the same for a lookup, ngram or suffix.
        second_length: maximum guesses of a row in one pass; None: the plan's number of nodes.
        first_depth: of a chain, in tokens; None: the whole chain.
        trees: whether guesses are read in trees and in parallel chains.

    Raises:
        UserError: drafters that cannot be combined, or an option out of range.
    """

    def __init__(
        self,
        first: Mapping[str, Any] | Drafter,
        second: Mapping[str, Any] | Drafter,
        second_length: int | None = None,
        first_depth: int | None = None,
        trees: bool = False,
    ) -> None:
        counts = {"second_length": second_length, "first_depth": first_depth}
        super().__init__(built(first), as_lookup(built(second)), {**counts, "trees": trees})
        for name, value in counts.items():
            if value is not None and value < 1:
                raise UserError(f"drafter.{name}={value}: must be at least 1, or null")
        self.second_length, self.first_depth, self.trees = second_length, first_depth, trees
        _check_first(self.first)

    # -- plans -----------------------------------------------------------------------------------

    @override
    def check(self, plan: Plan) -> None:
        self.check_part("first", plan)

    @override
    def remark(self, plan: Plan) -> str:
        lines = [optional.remark(self.first, plan)]
        if plan.has_siblings and not self.trees:
            lines.append(
                f"drafter.second={short_name(self.second)}: adds nothing to {plan.name}, which is no single "
                "chain (decode=chain, or drafter.trees=true)"
            )
        if plan.has_siblings and self.first_depth is not None:
            lines.append(
                f"drafter.first_depth={self.first_depth}: changes nothing in {plan.name}, which is no single "
                "chain (decode=chain)"
            )
        return "; ".join(filter(None, lines))

    # -- decoding --------------------------------------------------------------------------------

    @override
    def new_state(self, rows: int) -> CascadeState:
        return CascadeState(self.first.new_state(rows), self.second.new_state(rows))

    @override
    def advance(
        self,
        state: CascadeState,
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        self.second.advance(state.second, target, tokens, taps, counts, root)
        state.ahead = None
        if state.begun:
            state.waiting.add(tokens, taps, counts, root)
        else:  # a prompt does not wait
            state.begun = True
            self.first.advance(state.first, target, tokens, taps, counts, root)

    @override
    def select(self, state: CascadeState, rows: Sequence[int]) -> None:
        state.ahead = None  # selecting keeps only settled slots
        super().select(state, rows)

    @override
    def append(self, state: CascadeState, target: Target, other: CascadeState) -> None:
        for part in (state, other):
            self._catch_up(part, target, [()] * len(part.second))
            part.ahead = None
        self.first.append(state.first, target, other.first)
        self.second.append(state.second, target, other.second)

    @override
    def propose(
        self, state: CascadeState, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        if plan.has_siblings and not self.trees:
            self._catch_up(state, target, [()] * len(state.second))
            state.ahead = None  # its slots are overwritten
            return self.first.propose(state.first, target, sampler, coin, plan)
        depth = self._depth_of_first(plan)
        own = _first_plan(plan, depth)
        guess = partial(self._guess, state.second, own)
        length = own.nodes if self.second_length is None else self.second_length
        rows = range(len(state.second))
        self._catch_up(state, target, [guessed(guess, row, [()], length) for row in rows])
        if state.ahead is None:
            state.ahead = ReadNodes(len(rows))
        read = partial(read_drafted, self.first, state.first, target)
        step = ReadAhead(read, guess, length, state.ahead, state.first.last)
        confidence = self.first.confidence_of(lambda: step.last)
        draft = expand(state.first.logits, step, sampler, coin, own, confidence=confidence)
        if draft.depth < depth or depth == plan.depth:  # all rows have ended, or the second adds nothing
            return draft
        return self._extend_chain(draft, state.second, plan.depth - depth)

    def _depth_of_first(self, plan: Plan) -> int:
        """Number of tokens of a path that the first drafts."""
        if plan.has_siblings or self.first_depth is None:
            return plan.depth
        return min(plan.depth, self.first_depth)

    def _catch_up(self, state: CascadeState, target: Target, guesses: Sequence[Sequence[Path]]) -> None:
        """Have the first drafter read the waiting tokens, and guesses below each row's root."""
        if (waiting := state.waiting.take()) is None:
            return
        state.ahead = ReadNodes(len(guesses))
        tokens, _, counts, root = waiting
        behind, reach = state.ahead.add(guesses, root.device)  # (B, G)
        reading = read_settled(self.first, state.first, target, tokens, counts, root, behind, reach)
        state.ahead.extend(reading)

    def _guess(
        self, texts: Sequence[IndexedText], plan: Plan, row: int, path: Path, count: int
    ) -> list[Path]:
        """At most `count` guesses below a row's path, by the second drafter.

        None are of the plan's last level, since its nodes are not read.
        """
        depth = plan.depth - 1 - len(path)
        if depth < 1 or count < 1:
            return []
        found: list[Path] = []
        lookup = _lookup_plan(depth, plan.width * plan.drafts, count)
        for token, parent, _ in self._look_up(texts[row], path, lookup):
            found.append((*(path if parent < 0 else found[parent]), token))
        return found[:count]

    def _look_up(self, history: IndexedText, path: Sequence[int], plan: Plan) -> list[Node]:
        """The second's draft after a path."""
        history.extend(path)
        try:
            return self.second.nodes(history, plan)
        finally:
            history.retract(len(path))

    def _extend_chain(self, draft: Draft, texts: Sequence[IndexedText], count: int) -> Draft:
        """Append up to `count` tokens of the second (horizontal cascade).

        Rows that have ended get none.
        """
        found = np.full((len(texts), count), PAD, np.int64)
        for row, path in enumerate(draft.tokens.tolist()):
            if PAD not in path:
                more = [node.token for node in self._look_up(texts[row], path, _lookup_plan(count, 1, count))]
                found[row, : len(more)] = more
        found = found[:, (found != PAD).any(0)]
        later = upload(found, draft.tokens.device)  # (B, n)
        tokens = torch.cat([draft.tokens, later], 1)
        if draft.q is None:
            return Draft.chain(tokens)
        q = F.one_hot(later.clamp_min(0), draft.q.shape[-1]).to(draft.q)  # absent tokens' q is not read
        return Draft.chain(tokens, torch.cat([draft.q, q], 1))


@lru_cache(maxsize=64)
def _first_plan(plan: Plan, depth: int) -> Plan:
    """The first drafter's plan, with this depth; cached, since plans are checked when built."""
    return plan if depth == plan.depth else replace(plan, depth=depth, nodes=0, tree=(), adapt=None)


@lru_cache(maxsize=256)
def _lookup_plan(depth: int, width: int, nodes: int) -> Plan:
    """A lookup's plan, with at least as many nodes as levels."""
    return Plan(depth, width, max(nodes, depth))


def _check_first(first: Drafter) -> None:
    name = short_name(first)
    if not isinstance(first, DraftLM):
        raise UserError(f"drafter.first={name}: the second guesses for a draft model; choose lm or lm_given")
    if first.settings.get("tokenizer_bytes"):
        raise UserError(
            "drafter.first.vocabulary=map: the second guesses tokens of the target's vocabulary; set "
            "drafter.first.vocabulary=same, or train only the draft model (drafter=lm)"
        )
    check_no_adapters(first)
