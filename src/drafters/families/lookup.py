"""Drafting by lookup of the newest tokens in earlier text, without a model.

As in prompt lookup decoding (Saxena 2023) and SuffixDecoding (arXiv:2411.04975): the continuation
of an earlier occurrence of the newest n tokens is proposed. `IndexedText` is the state of one row,
`best_tree` the search for the most probable nodes, `LookupDrafter` the base of ngram and suffix.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from decode.draft import PAD, Draft
from decode.errors import UserError
from decode.generation.types import Traits
from decode.model.target import Target
from decode.plan import Path, Plan
from decode.rng import Coin, KeyedCoin, to_device
from decode.sampling import Sampler
from decode.transfer import new_tokens
from drafters.base import Drafter
from drafters.registry import short_name


class Node(NamedTuple):
    """A fixed node."""

    token: int
    parent: int  # index among the row's nodes, -1 for the root
    chance: float = 1.0  # estimated probability that the text continues along the path to the node


class IndexedText:
    """One row's text, root included, with an index from n-grams to the places that follow them.

    Args:
        orders: indexed lengths n, ascending; each token adds one entry per length.
    """

    def __init__(self, orders: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.orders = orders
        self._after: dict[tuple[int, ...], list[int]] = {}  # n-gram -> indices of the tokens after it

    def extend(self, tokens: Sequence[int]) -> None:
        """Append settled tokens."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for n in self.orders:
                if n > end:
                    break
                self._after.setdefault(tuple(self.tokens[end - n :]), []).append(end)

    def retract(self, count: int) -> None:
        """Remove the newest tokens."""
        for end in range(len(self.tokens), len(self.tokens) - count, -1):
            for n in self.orders:
                if n > end:
                    break
                places = self._after[tuple(self.tokens[end - n :])]
                places.pop()
                if not places:
                    del self._after[tuple(self.tokens[end - n :])]
            self.tokens.pop()

    def matches(self, limit: int) -> list[int]:
        """Places that follow an earlier occurrence of the newest n tokens.

        Longest n first, then most recent; at most `limit`.
        """
        end, matches = len(self.tokens), dict[int, None]()
        for n in reversed(self.orders):
            if n > end:
                continue
            places = self._after[tuple(self.tokens[end - n :])]
            for place in islice(reversed(places), 1, None):  # skip the end of the text itself
                if len(matches) == limit:
                    return list(matches)
                matches[place] = None
        return list(matches)

    def next_tokens(self, ngram: tuple[int, ...], limit: int) -> dict[int, int]:
        """Token -> its count after an n-gram of indexed length, at the n-gram's newest `limit` places."""
        places = self._after.get(ngram)
        counts: dict[int, int] = {}
        if places is None:
            return counts
        for place in places[-limit:]:
            if place < len(self.tokens):  # not the end of the text
                token = self.tokens[place]
                counts[token] = counts.get(token, 0) + 1
        return counts

    def agreement(self, place: int, most: int) -> int:
        """Number of tokens before `place` that equal those before the end of the text, up to `most`."""
        tokens, back = self.tokens, len(self.tokens) - place
        n = 0
        while n < most and n < place and tokens[place - 1 - n] == tokens[place + back - 1 - n]:
            n += 1
        return n

    def after(self, place: int, length: int) -> list[int]:
        """The `length` tokens from `place` on; past the end of the text they repeat with period d (LZ77).

        d is the distance from `place` to the end of the text.
        """
        period = len(self.tokens) - place
        return [self.tokens[place + i % period] for i in range(length)]


def best_tree(
    next_tokens: Callable[[Path], Sequence[tuple[int, float]]], plan: Plan, floor: float = 0.0
) -> list[Node]:
    """The most probable nodes that fit a plan, best first, so that parents precede children.

    Args:
        next_tokens: tokens of a path below the root -> tokens that may follow with their probabilities, the
            most probable first, no token twice. At most `plan.width` of them are children.
        plan: depth, width and nodes, or a static tree; rank 0 is the most probable child.
        floor: minimum probability of a node's path.
    """
    nodes: list[Node] = []
    queue: list[tuple[float, int, Path, Path, int]] = []
    order = count()

    def push_children(path: Path, ranks: Path, parent: int, chance: float) -> None:
        if len(path) == plan.depth:
            return
        for rank, (token, share) in enumerate(next_tokens(path)[: plan.width]):
            if plan.tree and (*ranks, rank) not in plan.tree:
                break
            if chance * share < floor or not share:
                break
            heapq.heappush(queue, (-chance * share, next(order), (*path, token), (*ranks, rank), parent))

    push_children((), (), -1, 1.0)
    while queue:
        chance, _, path, ranks, parent = heapq.heappop(queue)
        nodes.append(Node(path[-1], parent, -chance))
        if len(nodes) == plan.nodes:
            break
        push_children(path, ranks, len(nodes) - 1, -chance)
    return nodes


def pack_drafts(rows: Sequence[Sequence[Node]], device: torch.device, coin: Coin | None = None) -> Draft:
    """Pack rows of fixed nodes into one draft; rows may differ in number of nodes.

    `coin` is the round's, see `to_device`.
    """
    width = max(map(len, rows))
    if not width:
        return Draft.empty(len(rows), device)
    chain = all(parent == i - 1 for nodes in rows for i, (_, parent, _) in enumerate(nodes))
    full = [[*(n[:2] for n in nodes), *((PAD, -1) for _ in range(len(nodes), width))] for nodes in rows]
    tokens, parents = to_device(full, device, coin).unbind(-1)  # (B, N)
    if chain:
        return Draft.chain(tokens)
    return Draft(tokens, parents, depth=max(map(_depth, rows)))


def _depth(nodes: Sequence[Node]) -> int:
    levels = [0]
    for _, parent, _ in nodes:
        levels.append(levels[parent + 1] + 1)
    return max(levels)


class TextDrafter(Drafter):
    """A drafter with the text of each row, root included, as state: `tokens`, and `extend` for new ones.

    Attributes:
        orders: indexed lengths of n-grams, ascending.
    """

    orders: Sequence[int] = ()

    @override
    def new_state(self, rows: int) -> list[Any]:
        return [IndexedText(self.orders) for _ in range(rows)]

    @override
    def advance(
        self,
        state: list[Any],
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        texts = new_tokens(tokens, counts, root, first=not state[0].tokens)
        for history, text in zip(state, texts, strict=True):
            history.extend(text)


class FixedNodesDrafter(TextDrafter):
    """Chooses the nodes of each row on the host; there is no distribution to sample from."""

    traits = Traits(proposals=("fixed",))

    @abstractmethod
    def nodes(self, history: Any, plan: Plan) -> list[Node]:
        """The draft of one row, from its state."""

    @override
    def check(self, plan: Plan) -> None:
        super().check(plan)
        if plan.min_confidence:
            raise UserError(
                f"decode.min_confidence={plan.min_confidence}: this drafter has no probabilities to compare; "
                "leave it 0"
            )

    @override
    def propose(
        self, state: Sequence[Any], target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        self.check(plan)
        return pack_drafts([self.nodes(history, plan) for history in state], target.device, coin)


class LookupDrafter(FixedNodesDrafter):
    """Proposes continuations of earlier occurrences of the newest tokens; a row without any gets no draft.

    Args:
        orders: lengths of n-grams to look up, ascending.
    """

    def __init__(self, orders: Sequence[int]) -> None:
        super().__init__()
        self.orders = orders

    @abstractmethod
    def next_tokens(self, history: IndexedText, path: Path, count: int) -> list[tuple[int, float]]:
        """The `count` most probable tokens after the text and a drafted path, with their probabilities."""

    @override
    def nodes(self, history: IndexedText, plan: Plan) -> list[Node]:
        return best_tree(lambda path: self.next_tokens(history, path, plan.width), plan)


def as_lookup(second: Drafter) -> LookupDrafter:
    """Check that the second of two drafters is a lookup, and return it.

    Raises:
        UserError: it is no lookup.
    """
    if not isinstance(second, LookupDrafter):
        raise UserError(
            f"drafter.second={short_name(second)}: choose one that looks tokens up in text: suffix or ngram"
        )
    return second
