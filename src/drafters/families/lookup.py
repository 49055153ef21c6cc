"""Drafting from earlier occurrences of the newest tokens: no model, nothing but text."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Sequence
from itertools import count, islice

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

Node = tuple[int, int]  # token, index of the parent


class IndexedText:
    """One row's text, the root included, and what each of its n-grams was followed by.

    Args:
        orders: lengths n that are indexed, ascending. A token costs one entry for each.
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

    def matches(self, limit: int) -> list[int]:
        """Places that an earlier occurrence of the newest n tokens was followed by.

        The longest n first, of equals the most recent; at most `limit` in all.
        """
        end, matches = len(self.tokens), dict[int, None]()
        for n in reversed(self.orders):
            if n > end:
                continue
            places = self._after[tuple(self.tokens[end - n :])]
            for place in islice(reversed(places), 1, None):  # the newest is the text's end
                if len(matches) == limit:
                    return list(matches)
                matches[place] = None
        return list(matches)

    def agreement(self, place: int, most: int) -> int:
        """How many tokens before `place` equal those before the end of the text, up to `most`."""
        tokens, back = self.tokens, len(self.tokens) - place
        n = 0
        while n < most and n < place and tokens[place - 1 - n] == tokens[place + back - 1 - n]:
            n += 1
        return n

    def after(self, place: int, length: int) -> list[int]:
        """The `length` tokens from `place` on; past the end of the text they repeat, as in LZ77.

        A match at distance d says that the text has period d, if only for a while.
        """
        period = len(self.tokens) - place
        return [self.tokens[place + i % period] for i in range(length)]


def heaviest_tree(
    continuations: Sequence[Sequence[int]], weights: Sequence[float], plan: Plan, floor: float = 0.0
) -> list[Node]:
    """The heaviest tree of a plan's shape among the prefixes of weighted continuations, best first.

    A node weighs what the continuations through it weigh together; of equal siblings the one that
    comes first in `continuations` is the elder.

    Args:
        continuations: each of any length.
        weights: of each.
        plan: depth, width and nodes, or the static tree, whose ranks count from the heaviest child.
        floor: least share of the whole weight that a node may have.
    """
    nodes: list[Node] = []
    queue: list[tuple[float, int, int, int, list[int], Path]] = []
    order = count()
    least = floor * sum(weights)

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
        _, _, token, parent, members, path = heapq.heappop(queue)
        nodes.append((token, parent))
        push_children(members, len(nodes) - 1, path)
    return nodes


def pack_drafts(rows: Sequence[Sequence[Node]], device: torch.device) -> Draft:
    """One draft of fixed nodes; rows may have different numbers of them, or none."""
    width = max(map(len, rows))
    if not width:
        return Draft.empty(len(rows), device)
    chain = all(parent == i - 1 for nodes in rows for i, (_, parent) in enumerate(nodes))
    full = [[*nodes, *((PAD, -1) for _ in range(len(nodes), width))] for nodes in rows]
    tokens, parents = torch.tensor(full).to(device).unbind(-1)  # (B, N)
    if chain:
        return Draft.chain(tokens)
    return Draft(tokens, parents, depth=max(map(_depth, rows)))


def _depth(nodes: Sequence[Node]) -> int:
    levels = [0]
    for _, parent in nodes:
        levels.append(levels[parent + 1] + 1)
    return max(levels)


class TextDrafter(Drafter):
    """Its state is the rows' texts, roots included.

    Attributes:
        orders: lengths of the n-grams that are looked up in them, ascending.
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
        for history, row, n, end in zip(state, tokens.tolist(), counts, root.tolist(), strict=True):
            # row[0] was the root last time, and is known since then.
            history.extend([*row[bool(history.tokens) : n], end])

    @override
    def select(self, state: list[IndexedText], rows: Sequence[int]) -> None:
        state[:] = [state[row] for row in rows]


class LookupDrafter(TextDrafter):
    """Proposes what followed where the newest tokens were seen before.

    Its tokens are chosen, not drawn, and it has no law; a row without a match is offered nothing.

    Args:
        orders: lengths of the n-grams that are looked up, ascending.
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
                f"decode.min_confidence={plan.min_confidence}: this drafter has no law to be confident by; "
                "leave it 0"
            )

    @abstractmethod
    def nodes(self, history: IndexedText, plan: Plan) -> list[Node]:
        """The draft of one row."""

    @override
    def propose(
        self, state: list[IndexedText], target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        self.check(plan)
        return pack_drafts([self.nodes(history, plan) for history in state], target.device)
