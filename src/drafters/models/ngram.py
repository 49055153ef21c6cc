"""Prompt lookup (Saxena, 2023; `ngram` in vLLM): copy the continuation of an earlier n-gram match."""

from __future__ import annotations

from typing import Any, Self

from typing_extensions import override

from decode.errors import UserError
from decode.model.target import Target
from decode.plan import Plan
from drafters.families.lookup import IndexedText, LookupDrafter, Node, heaviest_tree

MATCHES = 32  # maximum number of matches in a tree


class Ngram(LookupDrafter):
    """Finds the longest n-gram suffix of the text, prompt included, at an earlier place.

    Of equally long matches the most recent is copied (transformers and vLLM take the first), and a copy
    that reaches the end of the text repeats periodically (theirs ends). In a tree each match outweighs
    all later ones, so whole matches are added one by one until the plan's nodes are used up. After a match
    of n tokens a copy is taken to go on with probability n / (n + 2) for every token.

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
        n = max((history.agreement(place, self.orders[-1]) for place in places[:1]), default=0)
        return heaviest_tree(copies, [0.5**i for i in range(len(copies))], plan, fade=n / (n + 2))
