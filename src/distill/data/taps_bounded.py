"""Cache the hidden states of as many rows as fit a limit; the target computes the others on use."""

from __future__ import annotations

from collections.abc import Sequence

import datasets
from torch import Tensor

from decode.model.target import Target, TargetOutput
from distill.data.taps_disk import TapCache
from distill.data.taps_memory import TapMemory, cut, padded, read_rows


class BoundedTaps:
    """The first rows from memory or disk, the others from the target.

    The cached rows never change: an epoch uses every row once, so eviction would save no reads.

    Args:
        kept: cache of the first `count` rows.
        count: number of cached rows.
        share: their share of all bytes.
        target: target with its taps set.
        rows: all rows, with `tokens`.
        max_tokens: longer rows are truncated.
        packing: rows are read without padding.
    """

    def __init__(
        self,
        kept: TapMemory | TapCache,
        count: int,
        share: float,
        target: Target,
        rows: datasets.Dataset,
        max_tokens: int,
        packing: bool,
    ) -> None:
        self._kept, self._count, self.share = kept, count, share
        self._target, self._rows, self._max_tokens, self._packing = target, rows, max_tokens, packing
        self.tokens_read, self.bytes, self.memory_bytes = kept.tokens_read, kept.bytes, kept.memory_bytes

    def batch(self, rows: Sequence[int]) -> TargetOutput:
        """Right-padded (B, T, D) head inputs and (B, T, L, D) taps of rows, on the target's device.

        Rounding of an uncached row depends on the other uncached rows of the batch.
        """
        numbers, device = [int(row) for row in rows], self._target.device
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for number in {n for n in numbers if n < self._count}:
            last, taps = self._kept.row(number)
            found[number] = last.to(device), taps.to(device)
        left = sorted(set(numbers) - found.keys())
        if left:
            texts = cut(self._rows.select(left), self._max_tokens)
            found |= zip(left, read_rows(self._target, texts, self._packing), strict=True)
        return padded([found[n] for n in numbers])

    def remove(self) -> None:
        """Delete the files on disk."""
        self._kept.remove()


Taps = TapMemory | TapCache | BoundedTaps
