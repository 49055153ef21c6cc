"""Statistics of stored rows that do not need the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import torch

from distill.rollouts.shard import flat
from drafters.vocabulary import by_frequency

PERCENTILES = (0, 50, 90, 99, 100)
SHARES = (16, 8, 4, 2)  # draft vocabularies: V / 16 ... V / 2


class RowCounts:
    """Counts over a store, accumulated shard by shard.

    Args:
        vocab: size of the target's vocabulary.
        max_tokens: length at which training truncates rows.

    Attributes:
        answer: number of supervised tokens of each row.
        prompt: number of other tokens of each row.
        halves: (2, V) counts of supervised tokens in the even and odd rows.
        reasons, ids: number of rows by `finish_reason` and by `ids`.
        cut: number of rows longer than max_tokens.
        lost: number of supervised tokens beyond max_tokens.
        duplicates: number of rows with the same tokens as an earlier row.
    """

    def __init__(self, vocab: int, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.answer = np.zeros(0, dtype=np.int64)
        self.prompt = np.zeros(0, dtype=np.int64)
        self.halves = np.zeros((2, vocab), dtype=np.int64)
        self.reasons: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.cut = self.lost = self.duplicates = 0
        self._seen: set[bytes] = set()

    def add(self, table: pa.Table) -> None:
        """Count the rows of a shard that `read_rows` has passed."""
        first, rows = len(self.answer), table.num_rows
        tokens, length = flat(table["tokens"])
        mask = flat(table["loss_mask"])[0] != 0
        vocab = self.halves.shape[1]
        # Flat arrays over all N tokens of the shard: row of each token, and its position in the row.
        row = np.repeat(np.arange(rows), length)  # (N,)
        start = np.cumsum(length) - length  # (rows,)
        position = np.arange(len(tokens)) - start[row]  # (N,)
        answer = np.bincount(row[mask], minlength=rows)
        for half in (0, 1):
            in_half = mask & ((first + row) % 2 == half)
            self.halves[half] += np.bincount(tokens[in_half], minlength=vocab)
        self.answer = np.concatenate([self.answer, answer])
        self.prompt = np.concatenate([self.prompt, length - answer])
        self.cut += int((length > self.max_tokens).sum())
        self.lost += int((mask & (position >= self.max_tokens)).sum())
        self.reasons.update(table["finish_reason"].to_pylist())
        self.ids.update(table["ids"].to_pylist())
        for begin, size in zip(start, length, strict=True):
            key = blake2b(tokens[begin : begin + size].tobytes(), digest_size=12).digest()
            self.duplicates += key in self._seen
            self._seen.add(key)

    def coverage(self, size: int, first: Sequence[int]) -> float | None:
        """Share of odd rows' supervised tokens that are among the most frequent tokens of even rows.

        Args:
            size: size of the draft vocabulary, chosen as in EAGLE-3.
            first: tokens that are always included.

        Returns:
            None if the odd rows have no supervised token.
        """
        even, odd = self.halves
        vocabulary = by_frequency(torch.from_numpy(even), first)[:size].numpy()
        return float(odd[vocabulary].sum() / odd.sum()) if odd.any() else None

    def lines(self, first: Sequence[int]) -> list[str]:
        """Format the statistics as lines of text; `first` as in `coverage`."""
        rows, supervised = len(self.answer), int(self.answer.sum())
        total, vocab = supervised + int(self.prompt.sum()), self.halves.shape[1]
        sizes = [vocab // share for share in SHARES if vocab >= share]
        coverages = [(size, self.coverage(size, first)) for size in sizes]
        unsupervised = int((self.answer == 0).sum())
        return [
            f"rows                   {rows:,}, {self.duplicates:,} of them duplicates of another"
            + (f", {unsupervised:,} WITHOUT A SUPERVISED TOKEN" if unsupervised else ""),
            f"tokens                 {total:,}, {_share(supervised, total)} ({supervised:,}) supervised",
            f"percentiles            {'  '.join(f'{p:>5}' for p in PERCENTILES)}",
            f"  prompt tokens        {_percentiles(self.prompt)}",
            f"  answer tokens        {_percentiles(self.answer)}",
            f"finish_reason          {_counts_text(self.reasons)}",
            f"ids                    {_counts_text(self.ids)}",
            f"cut at max_tokens={self.max_tokens:<5}{self.cut:,} rows ({_share(self.cut, rows)}), which lose "
            f"{self.lost:,} supervised tokens ({_share(self.lost, supervised)})",
            "draft vocabulary       most frequent tokens of half the rows: share of the others' answers",
            "  " + "  ".join(f"{size:,}: {'-' if s is None else f'{s:.2%}'}" for size, s in coverages),
        ]


def _percentiles(lengths: np.ndarray) -> str:
    # Observed lengths, not interpolated ones.
    values = np.percentile(lengths, PERCENTILES, method="inverted_cdf") if lengths.size else []
    return "  ".join(f"{int(v):>5}" for v in values)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _counts_text(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common())
