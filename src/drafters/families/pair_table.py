"""A table of token pairs, counted on the rollouts: the successors of each token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from decode.errors import UserError
from decode.model.target import Target
from drafters.base import Drafter, Progress, Text

CHUNK = 1 << 20  # pairs counted at once


class PairTable(Drafter):
    """Base of drafters that count the successors of a token.

    q(w | v) is proportional to count(v, w) over the most frequent successors of v, plus `prior` times the
    unigram distribution with add-one smoothing (Dirichlet backoff, MacKay and Peto, Natural Language
    Engineering 1(3), 1995).

    Buffers are integers, which a cast to the target's dtype does not change.

    Args:
        vocab_size: V of the target.
        successors: entries per token, S.
        prior: weight of the unigram distribution, in pairs.

    Raises:
        UserError: fewer than one successor, or a prior that is not positive.
    """

    tokens: Tensor  # (V, S) successors, most frequent first
    counts: Tensor  # (V, S) of each pair
    seen: Tensor  # (V,) unigram counts

    def __init__(self, vocab_size: int, successors: int, prior: float) -> None:
        super().__init__()
        self.settings = {"vocab_size": vocab_size, "successors": successors, "prior": prior}
        if successors < 1 or prior <= 0:
            raise UserError(f"drafter: successors={successors} must be at least 1, and prior={prior} above 0")
        self.prior = prior
        size = vocab_size, min(successors, vocab_size)
        self.register_buffer("tokens", torch.zeros(size, dtype=torch.int32))
        self.register_buffer("counts", torch.zeros(size, dtype=torch.int32))
        self.register_buffer("seen", torch.zeros(vocab_size, dtype=torch.int64))

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        return cls(target.vocab_size, **options)

    @override
    def fit(
        self, texts: Iterable[Text], target: Target | None = None, progress: Progress | None = None
    ) -> str:
        """Count pairs whose second token the target wrote."""
        del target, progress
        vocab = self.seen.shape[0]
        pairs, number = np.empty(0, np.int64), np.empty(0, np.int64)
        pending: list[np.ndarray] = []

        def merge_counts() -> None:
            nonlocal pairs, number
            new, count = np.unique(np.concatenate([*pending, pairs[:0]]), return_counts=True)
            pending.clear()
            both, place = np.unique(np.concatenate([pairs, new]), return_inverse=True)
            number = np.bincount(place, np.concatenate([number, count]), len(both)).astype(np.int64)
            pairs = both

        for text in texts:
            tokens = np.asarray(text.tokens, np.int64)
            written = np.asarray(text.loss_mask[1:], bool)
            pending.append((tokens[:-1] * vocab + tokens[1:])[written])
            if sum(map(len, pending)) > CHUNK:
                merge_counts()
        merge_counts()
        self._tabulate(*np.divmod(pairs, vocab), number)
        total = int(number.sum())
        return f"{total:,} pairs counted, {len(pairs):,} of them different; nothing is trained"

    def _tabulate(self, first: np.ndarray, second: np.ndarray, number: np.ndarray) -> None:
        """Fill the table from the counts of pairs (first, second)."""
        unigrams = np.bincount(second, number, self.seen.shape[0])
        order = np.lexsort((second, -number, first))  # by token, then the most frequent first
        first, second, number = first[order], second[order], number[order]
        rank = np.arange(len(first)) - np.searchsorted(first, first)
        in_table = rank < self.tokens.shape[1]
        for table, values in ((self.tokens, second), (self.counts, number)):
            full = np.zeros(table.shape, np.int32)
            full[first[in_table], rank[in_table]] = values[in_table]
            table.copy_(torch.from_numpy(full))
        self.seen.copy_(torch.from_numpy(unigrams.astype(np.int64)))

    def logits(self, token: Tensor, dtype: torch.dtype) -> Tensor:
        """(...) tokens -> (..., V) logits of the next tokens."""
        float_dtype = torch.promote_types(dtype, torch.float32)
        unigrams = self.seen.to(float_dtype) + 1
        mass = (self.prior * unigrams / unigrams.sum()).expand(*token.shape, -1)  # (..., V)
        return mass.scatter_add(-1, self.tokens[token].long(), self.counts[token].to(float_dtype)).log()
