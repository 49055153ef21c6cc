"""Hidden states of as many rows as fit a limit; the target reads the others whenever they are used."""

from __future__ import annotations

from collections.abc import Sequence

import datasets
from torch import Tensor

from decode.model.target import Target, TargetOutput
from distill.data.taps_disk import TapCache
from distill.data.taps_memory import TapMemory, cut, padded, read_rows


class BoundedTaps:
    """The first rows from memory or disk, the others from the target.

    The same rows stay kept: an epoch uses every row once, so evicting some for others would save no reads.

    Args:
        kept: of the first `count` rows.
        count: number of rows that are kept.
        share: of all bytes that these have.
        target: with its taps set.
        rows: all, with `tokens`.
        max_tokens: longer rows are cut.
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

        Rounding of a row that is not kept depends on the rows of the batch that are not, either.
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
        """Delete what is on disk."""
        self._kept.remove()


Taps = TapMemory | TapCache | BoundedTaps
