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
    """The states of both.

    Attributes:
        first: of the first; what waits is not in it yet.
        second: of the second.
        waiting: settled tokens that the first reads with the next guesses.
        ahead: nodes that it has read below the root; None: no pass has read any.
        begun: whether it has read anything.
    """

    first: Any
    second: list[IndexedText]
    waiting: Deferred = field(default_factory=Deferred)
    ahead: ReadNodes | None = None
    begun: bool = False


class Cascade(TwoDrafters[LookupDrafter]):
    """The first, a draft model, drafts a chain or a tree, and the second, a lookup, guesses its nodes.

    Vertical cascade: the first reads the newest tokens and several guesses of the nodes below them in one
    pass, and chooses or draws its own at each place, as it would have without them. While these are among the
    guesses, no pass is needed. So tokens and distributions q are the first's own, up to rounding; only the
    number of passes differs. The first guesses of a round are read in the pass over the settled tokens, put
    off until then. With `trees` it reads guesses of a tree's nodes, too (staged speculation): a pass is
    spared where all nodes of a level that are expanded were guessed. Otherwise trees, and chains side by
    side, are the first's.

    Horizontal cascade: with `first_depth` the first drafts that many tokens of a chain and the second those
    after them, which are accepted seldom. q of such a token is the second's distribution, all on that token.

    It is trained, and exported, as its first is.

    Args:
        first: built, or its short name and the settings of its constructor, {drafter: ..., settings: ...}; a
            draft model with the target's vocabulary.
        second: the same of a lookup in text, ngram or suffix.
        second_length: most guesses of a row that are read in one pass; None: as many as the plan has nodes.
        first_depth: of a chain, in tokens; None: the whole chain.
        trees: whether guesses are read in trees and in chains side by side.

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
        said = [optional.remark(self.first, plan)]
        if plan.has_siblings and not self.trees:
            said.append(
                f"drafter.second={short_name(self.second)}: adds nothing to {plan.name}, which is no single "
                "chain (decode=chain, or drafter.trees=true)"
            )
        if plan.has_siblings and self.first_depth is not None:
            said.append(
                f"drafter.first_depth={self.first_depth}: changes nothing in {plan.name}, which is no single "
                "chain (decode=chain)"
            )
        return "; ".join(filter(None, said))

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
        else:  # a prompt is no part of a round
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
            state.ahead = None  # its slots are used
            return self.first.propose(state.first, target, sampler, coin, plan)
        depth = self._depth_of_first(plan)
        own = _of_first(plan, depth)
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
        if draft.depth < depth or depth == plan.depth:  # all rows have ended, or there is nothing to add
            return draft
        return self._go_on(draft, state.second, plan.depth - depth)

    def _depth_of_first(self, plan: Plan) -> int:
        """Tokens of a path that the first drafts."""
        if plan.has_siblings or self.first_depth is None:
            return plan.depth
        return min(plan.depth, self.first_depth)

    def _catch_up(self, state: CascadeState, target: Target, guesses: Sequence[Sequence[Path]]) -> None:
        """Have the first read what waits, and guesses of each row below the root."""
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
        """At most `count` paths that the second expects below a row's path; none of the plan's last level.

        The nodes of that are not read.
        """
        depth = plan.depth - 1 - len(path)
        if depth < 1 or count < 1:
            return []
        found: list[Path] = []
        lookup = _lookup(depth, plan.width * plan.drafts, count)
        for token, parent, _ in self._looked_up(texts[row], path, lookup):
            found.append((*(path if parent < 0 else found[parent]), token))
        return found[:count]

    def _looked_up(self, history: IndexedText, path: Sequence[int], plan: Plan) -> list[Node]:
        """What the second drafts behind a path."""
        history.extend(path)
        try:
            return self.second.nodes(history, plan)
        finally:
            history.retract(len(path))

    def _go_on(self, draft: Draft, texts: Sequence[IndexedText], count: int) -> Draft:
        """The horizontal cascade: up to `count` tokens of the second behind the first's.

        Rows that have ended get none.
        """
        found = np.full((len(texts), count), PAD, np.int64)
        for row, path in enumerate(draft.tokens.tolist()):
            if PAD not in path:
                more = [node.token for node in self._looked_up(texts[row], path, _lookup(count, 1, count))]
                found[row, : len(more)] = more
        found = found[:, (found != PAD).any(0)]
        later = upload(found, draft.tokens.device)  # (B, n)
        tokens = torch.cat([draft.tokens, later], 1)
        if draft.q is None:
            return Draft.chain(tokens)
        q = F.one_hot(later.clamp_min(0), draft.q.shape[-1]).to(draft.q)  # of an absent token it is not read
        return Draft.chain(tokens, torch.cat([draft.q, q], 1))


@lru_cache(maxsize=64)
def _of_first(plan: Plan, depth: int) -> Plan:
    """The part of a plan that the first drafts; made once, since plans are checked."""
    return plan if depth == plan.depth else replace(plan, depth=depth, nodes=0, tree=(), adapt=None)


@lru_cache(maxsize=256)
def _lookup(depth: int, width: int, nodes: int) -> Plan:
    """What a lookup drafts; a plan has as many nodes as levels or more."""
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
