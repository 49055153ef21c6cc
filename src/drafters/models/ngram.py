"""Prompt lookup (Saxena, 2023; `ngram` in vLLM): copy the continuation of an earlier n-gram match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from typing_extensions import override

from decode.errors import UserError
from decode.model.target import Target
from decode.plan import Path, Plan
from drafters.families.lookup import IndexedText, LookupDrafter, Node, best_tree

MATCHES = 32  # maximum number of matches in a tree


class Ngram(LookupDrafter):
    """Finds the longest n-gram suffix of the text, prompt included, at an earlier place, and copies from it.

    Of equally long matches the most recent is copied (transformers and vLLM copy the first), and a copy
    that reaches the end of the text repeats periodically (theirs ends). In a tree each match outweighs
    all later ones, so matches are added one by one until the plan's nodes are used up. After a match of n
    tokens each further token is assumed to agree with probability n / (n + 2).

    Args:
        min_n: minimum number of matching tokens.
        max_n: maximum number of matching tokens.

    Raises:
        UserError: not 1 <= min_n <= max_n.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        if not 1 <= min_n <= max_n:
            raise UserError(f"drafter.min_n={min_n}, max_n={max_n}: must be 1 <= min_n <= max_n")
        super().__init__(range(min_n, max_n + 1))
        self.settings = {"min_n": min_n, "max_n": max_n}

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        return cls(**options)

    @override
    def nodes(self, history: IndexedText, plan: Plan) -> list[Node]:
        places = history.matches(1 if plan.width == 1 else MATCHES)
        copies = [history.after(place, plan.depth) for place in places]
        nodes, levels = best_tree(lambda path: _next_shares(copies, path), plan), [0]
        for node in nodes:
            levels.append(levels[node.parent + 1] + 1)
        chance = self._copy_chance(history, places)
        return [
            node._replace(chance=node.chance * chance**level)
            for node, level in zip(nodes, levels[1:], strict=True)
        ]

    @override
    def next_tokens(self, history: IndexedText, path: Path, count: int) -> list[tuple[int, float]]:
        history.extend(path)
        try:
            places = history.matches(MATCHES)
            copies, chance = [history.after(place, 1) for place in places], self._copy_chance(history, places)
        finally:
            history.retract(len(path))
        return [(token, share * chance) for token, share in _next_shares(copies, ())[:count]]

    def _copy_chance(self, history: IndexedText, places: Sequence[int]) -> float:
        """Probability that the next token of a copy agrees."""
        n = max((history.agreement(place, self.orders[-1]) for place in places[:1]), default=0)
        return n / (n + 2)


def _next_shares(copies: Sequence[Sequence[int]], path: Path) -> list[tuple[int, float]]:
    """Tokens after a path in the copies that begin with it, and their shares of the copies' weight.

    The weight halves from copy to copy.
    """
    weights: dict[int, float] = {}
    for i, copy in enumerate(copies):
        if len(copy) > len(path) and tuple(copy[: len(path)]) == path:
            weights[copy[len(path)]] = weights.get(copy[len(path)], 0.0) + 0.5**i
    total = sum(weights.values())
    return sorted(((token, weight / total) for token, weight in weights.items()), key=lambda pair: -pair[1])
