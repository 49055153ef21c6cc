"""SuffixDecoding (Oliaro et al., arXiv:2411.04975): frequent continuations in the text and past rollouts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from decode.draft import PAD
from decode.errors import UserError
from decode.model.target import Target
from decode.plan import Plan
from drafters.base import Text, constructor_arguments
from drafters.families.lookup import IndexedText, LookupDrafter, Node, heaviest_tree


class Corpus:
    """Past texts with a suffix array.

    Args:
        tokens: (n,) all texts, each followed by `PAD`, which equals no token.
        length: number of tokens that suffixes are sorted by; at least the length of any pattern.
    """

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self._size = len(tokens)
        # Big-endian words compare as bytes as they do as numbers; PAD is the largest.
        self._words = tokens.astype(">i4").tobytes()
        self._order = _suffix_order(tokens, length).data

    def matches(self, pattern: bytes, limit: int) -> list[int]:
        """At most `limit` places after the pattern, spread evenly over all occurrences.

        Two binary searches: logarithmic in the size of the corpus.

        Args:
            pattern: big-endian words, at most `length` of them.
            limit: at least 1.
        """
        order, words, n = self._order, self._words, len(pattern)

        def prefix(rank: int) -> bytes:
            return words[4 * order[rank] : 4 * order[rank] + n]

        low = bisect_left(range(self._size), pattern, key=prefix)
        high = bisect_right(range(self._size), pattern, low, key=prefix)
        count = min(limit, high - low)
        return [order[low + (high - low) * i // count] + n // 4 for i in range(count)]

    def after(self, place: int, length: int) -> list[int]:
        """Up to `length` tokens from `place` on, to the end of their text."""
        line = np.frombuffer(self._words, ">i4", min(length, self._size - place), 4 * place).tolist()
        return line[: line.index(PAD)] if PAD in line else line

    def agreement(self, place: int, pattern: bytes) -> int:
        """Number of tokens before `place` that equal the last ones of the pattern."""
        preceding = self._words[max(0, 4 * place - len(pattern)) : 4 * place]
        n = 0
        while (
            n < len(preceding)
            and preceding[-n - 4 : len(preceding) - n] == pattern[-n - 4 : len(pattern) - n]
        ):
            n += 4
        return n // 4


def _suffix_order(tokens: np.ndarray, length: int) -> np.ndarray:
    """(n,) suffix array, sorted by the first `length` tokens, PAD last; prefix doubling.

    The end of the corpus sorts before any token.
    """
    rank = np.unique(tokens.astype(np.uint32), return_inverse=True)[1].astype(np.int64) + 1
    sorted_length = 1
    while sorted_length < length:
        later = np.concatenate([rank[sorted_length:], np.zeros(min(sorted_length, len(rank)), np.int64)])
        rank = np.unique(rank * (len(rank) + 1) + later, return_inverse=True)[1] + 1
        sorted_length *= 2
    return np.argsort(rank, kind="stable")


class Suffix(LookupDrafter):
    """Proposes the heaviest continuations of the newest tokens, in the row's text, prompt included, and in
    the rollouts the drafter was fitted on.

    An occurrence that matches n tokens has weight growth^n in either source; a node's estimated
    probability is its share of the total weight. (The paper builds one tree per n and source and takes
    the one with the largest sum of probabilities; here they are combined.) Occurrences are searched for
    n = 1, 2, 4, ... up to `longest`, longest first, until there are `matches` in each source, so that
    the work per round does not grow with the text.

    Args:
        longest: maximum number of matching tokens.
        matches: maximum number of occurrences per source.
        growth: factor on the weight per matching token.
        factor: maximum draft length, in multiples of the longest match.
        min_probability: minimum estimated probability of a node.
        max_tokens: size limit of the corpus, in tokens of 4 bytes; the newest rollouts are kept.
        vocab_size: V of the target.
        size: of the corpus, including one separator per rollout.

    Raises:
        UserError: an option out of range.
    """

    corpus: Tensor  # (n,)

    def __init__(
        self,
        longest: int,
        matches: int,
        growth: float,
        factor: float,
        min_probability: float,
        max_tokens: int,
        vocab_size: int,
        size: int = 0,
    ) -> None:
        settings = constructor_arguments(locals())
        low = {"longest": 1, "matches": 1, "growth": 1, "factor": 0, "min_probability": 0, "max_tokens": 0}
        for name, least in low.items():
            if settings[name] < least:
                raise UserError(f"drafter.{name}={settings[name]}: must be at least {least}")
        super().__init__([2**i for i in range(longest.bit_length())])
        self.settings = settings
        self.longest, self.matches, self.growth = longest, matches, growth
        self.factor, self.min_probability = factor, min_probability
        self.register_buffer("corpus", torch.full((size,), PAD, dtype=torch.int32))
        self._index: Corpus | None = None  # of `corpus`, built on first use

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        return cls(**options, vocab_size=target.vocab_size)

    @override
    def fit(self, texts: Iterable[Text], target: Target | None = None) -> str:
        """Store the newest rollouts: answers, with up to `longest` tokens of the prompt."""
        del target
        texts_kept: deque[np.ndarray] = deque()
        size = total = rows = 0
        for text in texts:
            if 1 not in text.loss_mask:
                continue
            begin = max(0, list(text.loss_mask).index(1) - self.longest)
            texts_kept.append(np.array([*text.tokens[begin:], PAD], np.int32))
            rows, size, total = rows + 1, size + len(texts_kept[-1]), total + len(texts_kept[-1])
            while size > self.settings["max_tokens"]:
                size -= len(texts_kept.popleft())
        self.corpus = torch.from_numpy(np.concatenate([np.empty(0, np.int32), *texts_kept]))
        self.settings["size"] = size
        self._index = None
        return (
            f"the newest {len(texts_kept):,} of {rows:,} rollouts kept, {size:,} of {total:,} tokens "
            f"(at most {self.settings['max_tokens']:,}), {size * 4 / 2**20:.1f} MiB; nothing is trained"
        )

    @override
    def new_state(self, rows: int) -> list[IndexedText]:
        if self._index is None:
            tokens = self.corpus.cpu().numpy()
            if tokens.size and not (tokens.min() >= PAD and tokens.max() < self.settings["vocab_size"]):
                raise UserError("drafter=suffix: its corpus has invalid token ids; fit it again")
            # Twice the longest pattern, so that `matches` spreads evenly over continuations too.
            self._index = Corpus(tokens, 2 * self.orders[-1])
        return super().new_state(rows)

    @override
    def nodes(self, history: IndexedText, plan: Plan) -> list[Node]:
        assert self._index is not None
        newest = np.array(history.tokens[-self.longest :], ">i4").tobytes()
        continuations, agreements = [], []
        for place in history.matches(self.matches):
            continuations.append(history.after(place, plan.depth))
            agreements.append(history.agreement(place, self.longest))
        for place in self._recalled(newest):
            continuations.append(self._index.after(place, plan.depth))
            agreements.append(self._index.agreement(place, newest))
        reach = int(self.factor * max(agreements, default=0))
        weights = [self.growth**n for n in agreements]
        return heaviest_tree([line[:reach] for line in continuations], weights, plan, self.min_probability)

    def _recalled(self, newest: bytes) -> list[int]:
        """Places in the corpus that follow the newest tokens, longest matches first."""
        assert self._index is not None
        places: dict[int, None] = {}
        for n in reversed(self.orders):
            if 4 * n <= len(newest) and len(places) < self.matches:
                places |= dict.fromkeys(self._index.matches(newest[-4 * n :], self.matches))
        return list(places)[: self.matches]
