"""In-memory cache of the target's hidden states, computed once instead of once per epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from decode.errors import UserError
from decode.model.target import LAST, Target, TargetOutput
from distill.data.rows import list_batches
from distill.utils.progress import bar, say

TOKENS = 4096  # tokens per forward pass of the target


class TapMemory:
    """Head inputs and taps of all rows, in memory, in the target's dtype.

    Rows are read in store order, so that rounding does not depend on the training batch or on the step of a
    resumed run.

    Args:
        target: target with its taps set.
        rows: rows with `tokens`.
        max_tokens: longer rows are truncated.
        packing: rows are read without padding.
    """

    def __init__(
        self, target: Target, rows: datasets.Dataset, max_tokens: int, packing: bool = False
    ) -> None:
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        self.tokens_read = 0  # tokens that the target read to fill the cache
        with bar(len(rows), "taps", "rows") as progress:
            for number, pair in enumerate(read_rows(target, cut(rows, max_tokens), packing)):
                self._rows[number] = pair
                self.tokens_read += len(pair[0])
                progress.update()

    @property
    def bytes(self) -> int:
        """Size of the cache on the target's device; shared storage counts once."""
        storages = (t.untyped_storage() for pair in self._rows.values() for t in pair)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory."""
        return self.bytes

    def row(self, number: int) -> tuple[Tensor, Tensor]:
        """(T, D) head inputs and (T, L, D) taps of a row."""
        return self._rows[number]

    def batch(self, rows: Sequence[int]) -> TargetOutput:
        """Right-padded (B, T, D) head inputs and (B, T, L, D) taps of rows."""
        return padded([self.row(int(r)) for r in rows])

    def remove(self) -> None:
        """No-op: memory is freed with this object."""


class GrowingTaps(TapMemory):
    """A `TapMemory` that reads rows on first use, for runs that may not use all of them.

    Rounding of a row depends on the batch of its first use.

    Args:
        target, rows, max_tokens, packing: see `TapMemory`; taps of the target may change between calls.
    """

    def __init__(
        self, target: Target, rows: datasets.Dataset, max_tokens: int, packing: bool = False
    ) -> None:
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        self.tokens_read = 0
        self._read = target, rows, max_tokens, packing

    @override
    def batch(self, rows: Sequence[int]) -> TargetOutput:
        target, source, max_tokens, packing = self._read
        new = sorted({int(r) for r in rows} - self._rows.keys())
        if new:
            self._rows |= zip(
                new, read_rows(target, cut(source.select(new), max_tokens), packing), strict=True
            )
        return super().batch(rows)


def read_rows(
    target: Target, texts: Sequence[list[int]], packing: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (n, D) head inputs and (n, L, D) taps of texts, in order.

    Args:
        target: target with its taps set.
        texts: token ids.
        packing: texts are read without padding.
    """
    only_last = set(target.taps) == {LAST}
    for batch in _batches(texts, max(TOKENS, target.read_ahead)):
        tokens = pad_sequence([torch.tensor(t) for t in batch], batch_first=True)  # (B, T)
        read = target.read(tokens.to(target.device), [len(t) for t in batch] if packing else None)
        for i, row in enumerate(batch):
            last = read.last[i, : len(row)].clone()
            yield last, last[:, None] if only_last else read.taps[i, : len(row)].clone()


def padded(pairs: Sequence[tuple[Tensor, Tensor]]) -> TargetOutput:
    """Right-padded (B, T, D) head inputs and (B, T, L, D) taps of rows."""
    last, taps = (pad_sequence(list(tensors), batch_first=True) for tensors in zip(*pairs, strict=True))
    return TargetOutput(last, taps)


def cut(rows: datasets.Dataset, max_tokens: int) -> list[list[int]]:
    """Texts of rows, truncated to `max_tokens` tokens."""
    return [tokens[:max_tokens] for tokens in rows["tokens"]]


def _batches(texts: Sequence[list[int]], most: int) -> Iterator[list[list[int]]]:
    """Consecutive texts in batches of at most `most` padded tokens (a longer one is a batch of its own)."""
    batch: list[list[int]] = []
    width = 0
    for row in texts:
        width = max(width, len(row))
        if batch and width * (len(batch) + 1) > most:
            yield batch
            batch, width = [], len(row)
        batch.append(row)
    if batch:
        yield batch


def tap_memory_bytes(target: Target, rows: datasets.Dataset, max_tokens: int) -> np.ndarray:
    """(N,) bytes of each row in a `TapMemory`."""
    extra = 0 if set(target.taps) == {LAST} else len(target.taps)
    lengths = [np.minimum(np.diff(offsets), max_tokens) for offsets, _ in list_batches(rows, "tokens")]
    return np.concatenate(lengths) * target.hidden_size * target.dtype.itemsize * (1 + extra)


def rows_that_fit(row_bytes: np.ndarray, limit: float) -> int:
    """Number of rows, from the first on, that fit `limit` gigabytes."""
    return int(np.searchsorted(np.cumsum(row_bytes), limit * 2**30, side="right"))


def announce(row_bytes: np.ndarray, count: int, limit: float) -> None:
    """Print how many rows are kept and what the others cost, in one line."""
    total, kept = float(row_bytes.sum()), float(row_bytes[:count].sum())
    read, all_gib = 1 - kept / total, total / 2**30
    say(
        f"taps: hidden states of {count} of {len(row_bytes)} rows are kept (taps_gb={limit:g}); the target "
        f"reads {read:.0%} of the tokens again in every epoch (taps_gb={all_gib:.2g} keeps all)"
    )


def keeps_in_memory(taps: str, epochs: float) -> bool:
    """Whether to cache taps in memory.

    Args:
        taps: `online` runs the target in every training step, `memory` once before the first step;
            `auto` is `memory` if rows are used more than once; `cache` and `engine` store on disk.
        epochs: times that each row is trained on.

    Raises:
        UserError: unknown `taps`.
    """
    if taps not in ("auto", "online", "memory", "cache", "engine"):
        raise UserError(f"taps={taps}: choose auto, online, memory, cache or engine")
    return taps == "memory" or (taps == "auto" and epochs > 1)
