"""Keys and values with a fixed number of slots, whose lengths only the device knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from decode.model.cache import RowStore
from decode.transfer import DeviceInts, HostReadError, RowInts


class Slots(NamedTuple):
    """Tensors of a `FixedStore`; all are changed in place.

    Attributes:
        lengths: (B,) settled slots.
        dropped: (B,) positions that are no longer stored.
        parts: keys 0, values 0, keys 1, ...: (B, capacity, heads * dim).
    """

    lengths: Tensor
    dropped: Tensor
    parts: Sequence[Tensor]

    @classmethod
    def like(cls, store: RowStore, rows: int, capacity: int) -> Slots:
        """Empty slots for `rows` rows, with the layers, sizes, dtype and device of a store."""
        data = store.data
        count = data.new_zeros(rows, dtype=torch.long)
        parts = [data.new_zeros(rows, capacity, data.shape[-1]) for _ in range(2 * store.layers)]
        return cls(count, count.clone(), parts)

    def load(self, store: RowStore, row: int, source: int) -> None:
        """Copy a row's settled slots from a store; the other slots of the row become 0."""
        used, data = store.lengths[source], store.data[:, :, source].flatten(0, 1)
        for part, old in zip(self.parts, data.unbind(), strict=True):
            part[row, :used] = old[:used]
            # A masked slot has attention weight 0, but 0 * NaN is NaN.
            part[row, used:] = 0
        self.lengths[row] = used
        self.dropped[row] = store.read[source] - used


class FixedStore(RowStore):
    """A `RowStore` with `capacity` slots for each row, all of them attended to under a mask.

    Every shape is fixed and nothing is read on the host, so that a graph of the passes over it can be
    repeated. The caller sees to it that no row outgrows the capacity.

    Args:
        slots: its tensors.
        window: see `attention_mask`; of all layers.
        sinks: likewise.
    """

    def __init__(self, slots: Slots, window: int | None = None, sinks: int = 0) -> None:
        rows, capacity = slots.parts[0].shape[:2]
        super().__init__(len(slots.parts) // 2, rows, capacity)
        self.slots, self.window, self.sinks = slots, window, sinks
        self.width, self.lengths = capacity, DeviceInts(slots.lengths)
        self._base = torch.arange(rows, device=slots.lengths.device) * capacity
        self._offsets: Tensor | None = None

    @property
    @override
    def read(self) -> RowInts:
        return DeviceInts(self.slots.lengths + self.slots.dropped)

    @property
    @override
    def longest(self) -> int:
        return self.capacity

    @property
    @override
    def even(self) -> bool:
        return False

    @property
    @override
    def begun(self) -> bool:
        return True  # rows come from a prefill

    @property
    @override
    def bytes_per_token(self) -> int:
        return sum(part.shape[-1] * part.itemsize for part in self.slots.parts)

    @override
    def begin(self, new: int, scratch: int = 0) -> None:
        self._new, self._scratch = new, scratch
        steps = torch.arange(scratch, scratch + new, device=self._base.device)
        self._index = self._places(steps).flatten()

    def _places(self, steps: Tensor) -> Tensor:
        """(B, n) flat indices of slots so many steps after the settled ones.

        Rows that have ended may have no room: they write to their last slot, which nobody reads.
        """
        slot = (self.slots.lengths[:, None] + steps).clamp_max(self.capacity - 1)
        return slot + self._base[:, None]

    @override
    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self._written(2 * layer, keys), self._written(2 * layer + 1, values)

    def _written(self, index: int, new: Tensor) -> Tensor:
        """(B, heads, capacity, dim) slots of a part after writing (B, heads, n, dim)."""
        assert self._index is not None
        part, dim = self.slots.parts[index], new.shape[-1]
        part.flatten(0, 1).index_copy_(0, self._index, new.transpose(1, 2).flatten(2).flatten(0, 1))
        return part.unflatten(-1, (-1, dim)).transpose(1, 2)

    @override
    def parts(self, size: int, like: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        assert self._index is not None
        return self.slots.parts, self._index

    @override
    def keep(self, counts: Sequence[int], slots: Tensor | None = None) -> None:
        if slots is not None:  # those past `counts` are copied too, and overwritten later
            source = self._places(slots)
            place = self._places(torch.arange(slots.shape[1], device=slots.device))
            for part in self.slots.parts:
                flat = part.flatten(0, 1)
                flat.index_copy_(0, place.flatten(), flat.index_select(0, source.flatten()))
        self.slots.lengths.add_(RowInts.of(counts).on(self.slots.lengths.device))

    @override
    def visible(
        self, block: Tensor, positions: Tensor | None = None, window: int | None = None, sinks: int = 0
    ) -> Tensor:
        """See `RowStore`; positions are in slots."""
        unsettled, lengths = block.shape[-1], self.slots.lengths[:, None]
        after = torch.arange(self.capacity, device=block.device) - lengths  # (B, capacity)
        index = after.clamp(0, unsettled - 1)
        seen = block.expand(len(after), -1, -1).gather(2, index[:, None].expand(-1, block.shape[1], -1))
        after = after[:, None]  # (B, 1, capacity)
        mask = (after < 0) | (seen & (after < unsettled))  # (B, n, capacity)
        if window is None:
            return mask
        assert positions is not None
        # A settled slot is its own position; unsettled nodes of a tree share positions.
        settled = torch.arange(self.capacity, device=block.device).expand(len(index), -1)
        key = torch.where(after[:, 0] < 0, settled, positions.expand(len(index), -1).gather(1, index))
        near = positions[:, -block.shape[1] :, None] - key[:, None] < window
        return mask & (near | (key < sinks)[:, None] if sinks else near)

    def mask(self, block: Tensor | int, offsets: Tensor | int, device: torch.device) -> Tensor:
        """(B, 1, n, capacity) bool, for a drafter's layers; arguments as in its own store."""
        if isinstance(block, int):  # one new slot that sees all
            block = torch.ones(1, 1, block, dtype=torch.bool, device=device)
        new, newest = block.shape[1:]
        if self.window is None:
            return self.visible(block)[:, None]
        if isinstance(offsets, int):
            offsets = torch.full((new,), offsets, device=device)
        scratch = [] if self._offsets is None else [self._offsets[: newest - new]]
        self._offsets = torch.cat([*scratch, offsets])
        positions = self.slots.lengths[:, None] + self._offsets  # (B, m), in slots
        return self.visible(block, positions, self.window, self.sinks)[:, None]

    @override
    def cut(self, lengths: Sequence[int]) -> None:
        raise _rows_stay()

    @override
    def select(self, rows: Sequence[int]) -> None:
        raise _rows_stay()

    @override
    def append(self, other: RowStore) -> None:
        raise _rows_stay()

    @override
    def settled(self, layer: int, dim: int) -> tuple[Tensor, Tensor]:
        raise _rows_stay()


def _rows_stay() -> HostReadError:
    return HostReadError("rows of a fixed store are chosen by the host, not within a round")
