"""Preallocated KV cache with a separate length for each row.

`RowStore` is the storage and is also used by drafters. `KVCache` adapts it to transformers' `Cache`.
A forward pass writes n new slots after each row's settled ones (`begin`, `write`). `keep` then settles
the accepted slots: for a chain it increases the lengths; for a tree it also compacts the accepted
path with one gather over all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin
from typing_extensions import override

from decode.errors import UserError
from decode.transfer import RowInts


class RowStore:
    """Keys and values of several layers in one tensor (layers, 2, B, capacity, heads * dim).

    Args:
        layers: number of attention layers.
        rows: B.
        capacity: slots to allocate per row; doubles when a row needs more.

    Attributes:
        lengths: number of settled slots per row, known to the host and to the device.
        width: number of slots that attention reads in the current forward pass.
        window: see `attention_mask`; of a drafter's layers.
        sinks: likewise.
    """

    window: int | None = None
    sinks = 0

    def __init__(self, layers: int, rows: int, capacity: int) -> None:
        self.layers, self.capacity = layers, capacity
        self.lengths = RowInts([0] * rows)
        self.width = 0
        self._data: Tensor | None = None
        self._all: Tensor | None = None  # allocated rows; `_data` is a view of the first ones
        self._parts_of: Tensor | None = None  # tensor that `_parts` are views of
        self._parts: Sequence[Tensor] = ()
        self._new = self._scratch = 0
        # State of the current forward pass:
        self._index: Tensor | None = None  # (B * n,) flat slots to write, if rows differ in length
        self._all_views: Sequence[Tensor] = ()  # keys, values of each layer: slots to attend to
        self._new_views: Sequence[Tensor] = ()  # keys, values of each layer: slots to write, if equal length

    @property
    def data(self) -> Tensor:
        """(layers, 2, B, capacity, heads * dim) keys and values; allocated at the first write."""
        assert self._data is not None
        return self._data

    @property
    def bytes_per_token(self) -> int:
        """Bytes per settled token, over all layers."""
        return 0 if self._data is None else self._data[:, :, 0, 0].numel() * self._data.itemsize

    @property
    def read(self) -> RowInts:
        """(B,) settled tokens of each row: the position of its next token."""
        return self.lengths

    @property
    def longest(self) -> int:
        """Upper bound on the positions of the current forward pass."""
        return self.width

    @property
    def before(self) -> int:
        """Number of slots before the new ones (settled and scratch) in the current forward pass."""
        return self.width - self._new

    @property
    def even(self) -> bool:
        """Whether the host knows that all rows have equally many settled slots."""
        return len(set(self.lengths)) == 1

    @property
    def begun(self) -> bool:
        """Whether the rows have settled slots."""
        return bool(self.lengths[0])

    @property
    def unsettled(self) -> int:
        """Number of scratch and new slots in the current forward pass."""
        return self._scratch + self._new

    def visible(
        self, block: Tensor, positions: Tensor | None = None, window: int | None = None, sinks: int = 0
    ) -> Tensor:
        """(B, n, width) bool: slots that each new one attends to; see `attention_mask`."""
        return attention_mask(self.lengths, block, self.width, positions, window, sinks)

    def begin(self, new: int, scratch: int = 0) -> None:
        """Prepare to write `new` slots after each row's settled slots and its `scratch` unsettled ones."""
        self._new, self._scratch = new, scratch
        self.width = max(self.lengths) + scratch + new
        self._index, self._all_views, self._new_views = None, (), ()
        if self.width > self.capacity:
            self.capacity = max(self.width, 2 * self.capacity)
            if self._data is not None:
                self._make_room(len(self.lengths), self._data)

    def _make_room(self, rows: int, like: Tensor) -> None:
        """Allocate `capacity` slots for `rows` rows, with the layout, dtype and device of `like`."""
        old = self._data
        self._data = self._all = like.new_zeros(*like.shape[:2], rows, self.capacity, like.shape[4])
        if old is not None:
            self._data[:, :, : old.shape[2], : old.shape[3]] = old

    def parts(self, size: int, like: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """The whole store, for code that writes and reads it directly.

        Args:
            size: heads * dim.
            like: tensor with the store's dtype and device.

        Returns:
            Views of keys 0, values 0, keys 1, ..., each (B, capacity, size); and (B * n,) indices of the
            new slots in their (B * capacity, size) views.
        """
        if self._data is None:
            self._data = self._all = like.new_zeros(self.layers, 2, len(self.lengths), self.capacity, size)
        if self._parts_of is not self._data:
            # A compiler treats tensors that share storage as aliases and would copy all of them.
            parts = self._data.flatten(0, 1).unbind()
            self._parts_of, self._parts = self._data, [torch.from_dlpack(part) for part in parts]
        return self._parts, self._flat_index(like.device)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new (B, heads, n, dim) keys and values of one layer.

        Returns:
            (B, heads, width, dim) views of the keys and values to attend to.

        Raises:
            UserError: layers have keys and values of different shapes.
        """
        rows, heads, new, dim = keys.shape
        if self._data is None:
            shape = (self.layers, 2, rows, self.capacity, heads * dim)
            # Zeros, not empty: masked slots get attention weight 0, but 0 * NaN is NaN.
            self._data = self._all = keys.new_zeros(shape)
        if keys.shape != values.shape or self._data.shape[-1] != heads * dim:
            raise UserError("target: layers keep keys and values of different shapes; not supported")
        if not self._all_views:  # views of all layers at once: creating one costs as much as the copy below
            self._all_views = self._views(0, self.width, dim)
            if self.even:
                self._new_views = self._views(self.before, self.width, dim)
        if self._new_views:
            self._new_views[2 * layer].copy_(keys)
            self._new_views[2 * layer + 1].copy_(values)
        else:
            index = self._flat_index(keys.device)
            # Rows end at different slots: address (row, slot) as row * capacity + slot.
            flat = self._data[layer].view(2, rows * self.capacity, heads * dim)
            flat[0].index_copy_(0, index, keys.transpose(1, 2).reshape(rows * new, -1))
            flat[1].index_copy_(0, index, values.transpose(1, 2).reshape(rows * new, -1))
        return self._all_views[2 * layer], self._all_views[2 * layer + 1]

    def settled(self, layer: int, dim: int) -> tuple[Tensor, Tensor]:
        """(B, heads, longest row, dim) views of a layer's settled keys and values; read-only."""
        views = self._views(0, max(self.lengths), dim)
        return views[2 * layer], views[2 * layer + 1]

    def _views(self, first: int, last: int, dim: int) -> Sequence[Tensor]:
        """Views of keys 0, values 0, keys 1, ...; each (B, heads, last - first, dim)."""
        assert self._data is not None
        part = self._data[:, :, :, first:last].unflatten(-1, (-1, dim))
        return part.transpose(3, 4).flatten(0, 1).unbind()

    def _flat_index(self, device: torch.device) -> Tensor:
        """(B * n,) indices of the new slots in a (B * capacity) view."""
        if self._index is None:
            steps = torch.arange(self._scratch, self._scratch + self._new, device=device)
            self._index = (self._starts(device)[:, None] + steps).flatten()
        return self._index

    def _starts(self, device: torch.device) -> Tensor:
        """(B,) index of each row's first unsettled slot in a (B * capacity) view."""
        return self.lengths.on(device) + torch.arange(len(self.lengths), device=device) * self.capacity

    def keep(self, counts: Sequence[int], slots: Tensor | None = None) -> None:
        """Settle `counts[b]` of the slots written last.

        Args:
            counts: number of slots per row.
            slots: (B, M) slots to keep, in order, starting with slot 0; None: the first ones.
        """
        assert self._data is not None
        longest = max(counts)
        if slots is not None and longest > 1:  # slot 0 (the root) is in place already
            device = self._data.device
            slots = slots[:, :longest].to(device)
            rows, num_slots = slots.shape
            start = self._starts(device)[:, None]  # (B, 1)
            flat = self._data.view(self.layers * 2, rows * self.capacity, -1)
            # Indexing copies, so source and destination may overlap.
            moved = flat[:, (start + slots).flatten()]
            flat[:, (start + torch.arange(num_slots, device=device)).flatten()] = moved
        self.lengths = self.lengths.plus(counts)

    def cut(self, lengths: Sequence[int]) -> None:
        """Drop the settled slots of each row from index `lengths[b]` on."""
        assert all(new <= old for new, old in zip(lengths, self.lengths, strict=True))
        self.lengths = RowInts.of(lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.lengths = self.lengths.select(rows)
        if self._data is None:
            return
        if any(a >= b for a, b in pairwise(rows)):
            self._data = self._all = self._data[:, :, RowInts.of(rows).on(self._data.device)]
            return
        # Order is kept: move later rows up in place, settled slots only.
        used = max(self.lengths, default=0)
        for new, old in enumerate(rows):
            if new != old:
                self._data[:, :, new, :used] = self._data[:, :, old, :used]
        self._data = self._data[:, :, : len(rows)]

    def append(self, other: RowStore) -> None:
        """Append another store's settled slots as new rows, reusing the memory of removed rows if it fits."""
        rows, used = len(self.lengths), max(other.lengths, default=0)
        self.lengths = RowInts.of(self.lengths).joined(RowInts.of(other.lengths))
        if other._data is None:
            assert self._data is None, "cannot append an empty store to one with data"
            return
        if self._all is None or used > self.capacity or self._all.shape[2] < len(self.lengths):
            self.capacity = max(self.capacity, used)
            self._make_room(len(self.lengths), other._data)
        assert self._all is not None
        self._data = self._all[:, :, : len(self.lengths)]
        self._data[:, :, rows:, :used] = other._data[:, :, :, :used]


class KeptStore(RowStore):
    """Copies of some settled slots of another store, for passes that see only these.

    Args:
        source: store to copy from; unchanged.
        places: (layers, B, P, heads) slots to copy for each key head; the first `counts[b]` of a row count.
        counts: (B,) slots to copy.
        room: unsettled slots to allocate.

    Attributes:
        dropped: (B,) settled slots that were not copied.
    """

    def __init__(self, source: RowStore, places: Tensor, counts: RowInts, room: int) -> None:
        layers, rows, width, heads = places.shape
        super().__init__(layers, rows, width + room)
        assert source._data is not None
        self.lengths = counts
        self.dropped = source.lengths.plus(counts.negative())
        data = source._data.unflatten(-1, (heads, -1))  # (layers, 2, B, capacity, heads, dim)
        self._data = self._all = source._data.new_zeros(
            layers, 2, rows, self.capacity, heads * data.shape[-1]
        )
        index = places[:, None, ..., None].expand(-1, 2, -1, -1, -1, data.shape[-1])
        self._data[:, :, :, :width] = data.gather(3, index).flatten(-2)

    @property
    @override
    def read(self) -> RowInts:
        return self.lengths.plus(self.dropped)

    @property
    @override
    def longest(self) -> int:
        return self.width + max(self.dropped)


class MultiDeviceStore(RowStore):
    """Keys and values of layers on several devices: one `RowStore` per device.

    Args:
        places: store index (0, 1, ...) of each layer.
        rows: B.
        capacity: as in `RowStore`.
    """

    def __init__(self, places: Sequence[int], rows: int, capacity: int) -> None:
        super().__init__(len(places), rows, capacity)
        self._stores = [RowStore(places.count(p), rows, capacity) for p in range(max(places) + 1)]
        self._location = [(self._stores[p], places[:i].count(p)) for i, p in enumerate(places)]

    @property
    @override
    def bytes_per_token(self) -> int:
        return sum(store.bytes_per_token for store in self._stores)

    @override
    def begin(self, new: int, scratch: int = 0) -> None:
        super().begin(new, scratch)
        for store in self._stores:
            store.lengths = self.lengths
            store.begin(new, scratch)

    @override
    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        store, index = self._location[layer]
        return store.write(index, keys, values)

    @override
    def keep(self, counts: Sequence[int], slots: Tensor | None = None) -> None:
        for store in self._stores:
            store.keep(counts, slots)
        self.lengths = self._stores[0].lengths

    @override
    def select(self, rows: Sequence[int]) -> None:
        for store in self._stores:
            store.select(rows)
        self.lengths = self._stores[0].lengths

    @override
    def append(self, other: RowStore) -> None:
        assert isinstance(other, MultiDeviceStore)
        for store, more in zip(self._stores, other._stores, strict=True):
            store.append(more)
        self.lengths = self._stores[0].lengths


def attention_mask(
    lengths: Sequence[int],
    block: Tensor,
    width: int,
    positions: Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
) -> Tensor:
    """(B, n, width) bool: stored slots that each new slot attends to; (1, n, width) if all rows are equal.

    Args:
        lengths: settled slots per row; visible to all new slots.
        block: (B, n, m) or (1, n, m) bool, which of the m unsettled slots each new slot sees.
        width: number of slots in the mask.
        positions: (B, m) positions of the unsettled slots; needed for a window.
        window: sliding window: keys at least this many positions back are hidden.
        sinks: number of first positions that the window never hides.
    """
    rows, (new, unsettled), device = len(lengths), block.shape[1:], block.device
    equal_lengths = len(set(lengths)) == 1
    if equal_lengths and window is None:
        return nn.functional.pad(block, (lengths[0], 0), value=True)
    slot = torch.arange(width, device=device)
    settled = RowInts.of(lengths).on(device)  # (B,)
    block = block.expand(rows, -1, -1)
    index = settled[:, None] + torch.arange(unsettled, device=device)  # (B, m)
    if equal_lengths:
        mask = nn.functional.pad(block, (lengths[0], 0), value=True)
    else:
        mask = (slot < settled[:, None])[:, None].repeat(1, new, 1)  # (B, n, width)
        mask = mask.scatter(2, index[:, None].expand(-1, new, -1), block)
    if window is not None:
        assert positions is not None
        # A settled slot is its own position; unsettled nodes of a tree share positions.
        key_position = slot.repeat(rows, 1).scatter(1, index, positions)  # (B, width)
        near = positions[:, -new:, None] - key_position[:, None] < window
        mask = mask & (near | (key_position < sinks)[:, None] if sinks else near)
    return mask


class _Layer(CacheLayerMixin):
    """Adapter of one layer of the store to transformers' cache layer interface."""

    is_sliding = False  # the mask applies windows; slots outside it may be needed after a rejection

    def __init__(self, store: RowStore, index: int) -> None:
        super().__init__()
        self._store, self._layer = store, index
        self.is_initialized = True

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; return all to attend to."""
        return self._store.write(self._layer, key_states, value_states)

    def get_seq_length(self) -> int:
        """Slots before the new tokens, in the longest row."""
        return self._store.before

    def get_max_length(self) -> int:
        """Number of allocated slots."""
        return self._store.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width and offset of a mask built by transformers."""
        del query_length
        return self._store.width, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing; the store allocates at the first write."""

    def reset(self) -> None:
        """Empty the cache."""
        self._store.lengths = RowInts([0] * len(self._store.lengths))


class KVCache(Cache):
    """A `RowStore` as a `Cache` of transformers.

    Only full and sliding-window attention can be compacted; the probe rejects models with recurrent or
    linear-attention states.
    """

    def __init__(self, store: RowStore) -> None:
        self.store = store
        super().__init__(layers=[_Layer(store, i) for i in range(store.layers)])

    @classmethod
    def empty(cls, places: Sequence[int], rows: int, capacity: int) -> KVCache:
        """A cache without tokens.

        Args:
            places: device index of each layer; see `MultiDeviceStore`.
            rows: B.
            capacity: as in `RowStore`.
        """
        if len(set(places)) > 1:
            return cls(MultiDeviceStore(places, rows, capacity))
        return cls(RowStore(len(places), rows, capacity))
