"""Drafting by lookup of the newest tokens in earlier text, without a model.

As in prompt lookup decoding (Saxena 2023) and SuffixDecoding (arXiv:2411.04975): what followed an earlier
occurrence of the newest n tokens is proposed again, as a chain or as the heaviest tree of several
continuations. `IndexedText` is the state of one row; `LookupDrafter` the base of ngram and suffix.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Sequence
from itertools import count, islice
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from decode.draft import PAD, Draft
from decode.errors import UserError
from decode.model.target import Target
from decode.plan import Path, Plan
from decode.rng import Coin, KeyedCoin, to_device
from decode.sampling import Sampler
from decode.transfer import Settled
from drafters.base import Drafter


class Node(NamedTuple):
    """A fixed node."""

    token: int
    parent: int  # index among the row's nodes, -1 for the root
    chance: float = 1.0  # estimated probability that the text goes on along the path to the node


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
        """Take the newest tokens off again."""
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


def heaviest_tree(
    continuations: Sequence[Sequence[int]],
    weights: Sequence[float],
    plan: Plan,
    floor: float = 0.0,
    fade: float = 1.0,
) -> list[Node]:
    """The heaviest tree that fits a plan, from the prefix tree of weighted continuations, best node first.

    The weight of a node is the sum over continuations through it; ties go to the earlier continuation.

    Args:
        continuations: token sequences of any lengths.
        weights: one per continuation.
        plan: depth, width and nodes, or a static tree, whose rank 0 is the heaviest child.
        floor: minimum share of the total weight of a node.
        fade: a node's estimated probability is its share times this for every level.
    """
    nodes: list[Node] = []
    queue: list[tuple[float, int, int, int, list[int], Path]] = []
    order = count()
    total = sum(weights)
    least = floor * total

    def push_children(members: Sequence[int], parent: int, path: Path) -> None:
        below: dict[int, list[int]] = {}
        for i in members:
            if len(path) < min(len(continuations[i]), plan.depth):
                below.setdefault(continuations[i][len(path)], []).append(i)
        heaviest = sorted(
            (-sum(weights[i] for i in indices), indices[0], token) for token, indices in below.items()
        )
        for rank, (mass, _, token) in enumerate(heaviest[: plan.width]):
            child_path = (*path, rank)
            if -mass >= least and (not plan.tree or child_path in plan.tree):
                heapq.heappush(queue, (mass, next(order), token, parent, below[token], child_path))

    push_children(range(len(continuations)), -1, ())
    while queue and len(nodes) < plan.nodes:
        mass, _, token, parent, members, path = heapq.heappop(queue)
        nodes.append(Node(token, parent, -mass / total * fade ** len(path)))
        push_children(members, len(nodes) - 1, path)
    return nodes


def fork(chain: Sequence[Node], other: Sequence[Node], nodes: int) -> list[Node]:
    """A chain, and another from where they part, which has up to half of the `nodes`; no fork if none do."""
    common = 0
    while common < min(len(chain), len(other)) and chain[common].token == other[common].token:
        common += 1
    if common == len(chain):
        return list(other)
    branch = other[common:][: nodes // 2]
    kept = list(chain[: max(nodes - len(branch), common)])
    branch = branch[: nodes - len(kept)]
    parents = [common - 1, *range(len(kept), len(kept) + len(branch))]
    return kept + [node._replace(parent=above) for node, above in zip(branch, parents, strict=False)]


def pack_drafts(rows: Sequence[Sequence[Node]], device: torch.device, coin: Coin | None = None) -> Draft:
    """Pack rows of fixed nodes into one draft; rows may differ in number of nodes.

    `coin` is that of the round, see `to_device`.
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
    """A drafter whose state is the text of each row, root included.

    Attributes:
        orders: indexed lengths of n-grams, ascending.
    """

    orders: Sequence[int] = ()

    @override
    def new_state(self, rows: int) -> list[IndexedText]:
        return [IndexedText(self.orders) for _ in range(rows)]

    @override
    def advance(
        self,
        state: list[IndexedText],
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        if isinstance(counts, Settled):
            texts = counts.texts
        else:  # after the first call row[0] is the previous root, which is in the text already
            first = bool(state[0].tokens)
            rows = zip(tokens.tolist(), counts, root.tolist(), strict=True)
            texts = [[*row[first:n], end] for row, n, end in rows]
        for history, text in zip(state, texts, strict=True):
            history.extend(text)

    @override
    def select(self, state: list[IndexedText], rows: Sequence[int]) -> None:
        state[:] = [state[row] for row in rows]


class LookupDrafter(TextDrafter):
    """Proposes continuations of earlier occurrences of the newest tokens.

    Nodes are fixed, since there is no distribution to sample from; a row without a match gets no draft.

    Args:
        orders: lengths of n-grams to look up, ascending.
    """

    proposals = ("fixed",)

    def __init__(self, orders: Sequence[int]) -> None:
        super().__init__()
        self.orders = orders

    @override
    def check(self, plan: Plan) -> None:
        super().check(plan)
        if plan.min_confidence:
            raise UserError(
                f"decode.min_confidence={plan.min_confidence}: this drafter has no probabilities to compare; "
                "leave it 0"
            )

    @abstractmethod
    def nodes(self, history: IndexedText, plan: Plan) -> list[Node]:
        """The draft of one row."""

    def chain_after(self, history: IndexedText, drafted: Sequence[int], plan: Plan) -> list[Node]:
        """A chain of the drafted tokens and of what is found behind them, `plan.depth` tokens together."""
        chain = [Node(token, i - 1) for i, token in enumerate(drafted)]
        if rest := plan.depth - len(chain):
            history.extend(drafted)
            try:
                found = self.nodes(history, Plan(rest))
            finally:
                history.retract(len(chain))
            chain += [Node(token, len(chain) + parent, chance) for token, parent, chance in found]
        return chain

    @override
    def propose(
        self, state: list[IndexedText], target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        self.check(plan)
        return pack_drafts([self.nodes(history, plan) for history in state], target.device, coin)
