"""Keys and values of the text that a drafter has read; with a window, only the newest are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from decode.model.cache import RowStore
from decode.transfer import RowInts
from drafters.layers.decoder_layer import DecoderLayer

CAPACITY = 256  # slots to begin with


class TextStore(RowStore):
    """A `RowStore` for a drafter's layers, which share one window W and S sinks.

    Slots hold the text's first S positions and its newest. Slots that no later query sees are dropped in
    bulk, once there are more than 2 (W + S), so the copies per settled token are constant. After the
    sinks, slots and positions differ by a constant per row, so distances between both are equal.

    Args:
        stack: the layers.
        rows: B.

    Attributes:
        dropped: number of dropped positions per row.
    """

    def __init__(self, stack: Sequence[DecoderLayer], rows: int) -> None:
        super().__init__(layers=len(stack), rows=rows, capacity=CAPACITY)
        self.window, self.sinks = stack[0].window, stack[0].sinks
        self.dropped = RowInts([0] * rows)
        self._offsets: Tensor | None = None  # (m,) positions of the unsettled slots after the settled ones

    @property
    @override
    def read(self) -> RowInts:
        """Number of settled positions per row, which is the next position."""
        return self.lengths.plus(self.dropped) if any(self.dropped) else self.lengths

    @property
    @override
    def longest(self) -> int:
        """Upper bound on the positions of the current forward pass."""
        return self.width + max(self.dropped, default=0)

    @property
    @override
    def bytes_per_token(self) -> int:
        whole, settled = super().bytes_per_token, sum(self.read)
        return -(-whole * sum(self.lengths) // settled) if settled else whole

    @override
    def keep(self, counts: Sequence[int], slots: Tensor | None = None) -> None:
        super().keep(counts, slots)
        if self.window is not None and max(self.lengths) > 2 * (self.window + self.sinks):
            self._drop(self.sinks + self.window - 1)

    def _drop(self, most: int) -> None:
        """Keep the first S and the newest slots of each row, `most` in all."""
        assert self._data is not None
        device, self.capacity = self._data.device, max(CAPACITY, 2 * (most + 1))
        self.dropped.on(device)  # so that sums with it are computed on the device
        dropped = RowInts([max(0, length - most) for length in self.lengths])
        kept = torch.arange(most, device=device)
        index = kept + dropped.on(device)[:, None] * (kept >= self.sinks)  # (B, most)
        # A copy, to free the memory of a long prompt.
        old, rows = self._data, torch.arange(len(self.lengths), device=device)[:, None]
        self._data = self._all = old.new_zeros(*old.shape[:3], self.capacity, old.shape[4])
        self._data[:, :, :, :most] = old[:, :, rows, index.clamp_max(old.shape[3] - 1)]
        self.lengths = RowInts([min(length, most) for length in self.lengths])
        self.dropped = self.dropped.plus(dropped)

    @override
    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.dropped = self.dropped.select(rows)

    @override
    def append(self, other: RowStore) -> None:
        assert isinstance(other, TextStore)
        super().append(other)
        self.dropped = self.dropped.joined(other.dropped)

    def mask(self, block: Tensor | int, offsets: Tensor | int, device: torch.device) -> Tensor | None:
        """(B or 1, 1, n, width) attention mask of new slots after m - n scratch slots of earlier passes.

        None, which is faster, if all slots are visible.

        Args:
            block: (B, n, m) or (1, n, m) bool, the visible ones of the m newest slots for each new slot;
                or m, if n is 1 and all are visible.
            offsets: (n,), or one number for all: positions between the settled slots and each new one.
            device: of the mask.
        """
        new, newest = (1, block) if isinstance(block, int) else block.shape[1:]
        window = None
        if self.window is not None:
            if isinstance(offsets, int):
                offsets = torch.full((new,), offsets, device=device)
            scratch = [] if self._offsets is None else [self._offsets[: newest - new]]
            self._offsets = torch.cat([*scratch, offsets])
            window = self.window if self.width > self.window else None
        if isinstance(block, int):
            if window is None and self.even:
                return None
            block = torch.ones(1, 1, block, dtype=torch.bool, device=device)
        if window is None:
            return self.visible(block)[:, None]
        assert self._offsets is not None
        positions = self.lengths.on(device)[:, None] + self._offsets  # (B, m), in slots
        return self.visible(block, positions, window, self.sinks)[:, None]
