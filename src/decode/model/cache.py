"""Preallocated keys and values in which every row has its own length.

`RowStore` is the storage, used by drafters too; `KVCache` shows it to transformers as a `Cache`.
A forward pass writes n new slots behind each row's settled ones (`begin`, `write`), and
afterwards the settled ones are extended by what was accepted (`keep`): for a chain that only
moves the lengths, for a tree it is one gather over all layers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin
from typing_extensions import override

from decode.errors import UserError


class RowStore:
    """Keys and values of several layers in one tensor (layers, 2, B, capacity, heads * dim).

    Args:
        layers: number of attention layers.
        rows: B.
        capacity: slots to allocate; grows by doubling when a row needs more.

    Attributes:
        lengths: settled slots of each row, on the host: the loop knows them, so no
            synchronisation is needed to read them.
        width: slots that attention has to look at in the current forward pass.
    """

    def __init__(self, layers: int, rows: int, capacity: int) -> None:
        self.layers, self.capacity = layers, capacity
        self.lengths = [0] * rows
        self.width = 0
        self._data: Tensor | None = None
        self._new = self._scratch = 0
        # Of the current pass:
        self._index: Tensor | None = None  # (B * n,) flat slots, if ragged
        self._seen: Sequence[Tensor] = ()  # what each layer attends to
        self._fresh: Sequence[Tensor] = ()  # where it writes, if not ragged

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one settled token holds, over all layers."""
        return 0 if self._data is None else self._data[:, :, 0, 0].numel() * self._data.itemsize

    @property
    def before(self) -> int:
        """Slots before the new ones, settled and scratch, in the current forward pass."""
        return self.width - self._new

    def begin(self, new: int, scratch: int = 0) -> None:
        """Prepare to write `new` slots behind each row's settled ones and `scratch` unsettled ones."""
        self._new, self._scratch = new, scratch
        self.width = max(self.lengths) + scratch + new
        self._index, self._seen, self._fresh = None, (), ()
        if self.width > self.capacity:
            self.capacity = max(self.width, 2 * self.capacity)
            if self._data is not None:
                old = self._data
                self._data = old.new_zeros(*old.shape[:3], self.capacity, old.shape[4])
                self._data[:, :, :, : old.shape[3]] = old

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, heads, n, dim) of one layer; returns (B, heads, width, dim) views to attend to.

        Raises:
            UserError: layers of different shapes, which one tensor cannot hold.
        """
        rows, heads, new, dim = keys.shape
        if self._data is None:
            shape = (self.layers, 2, rows, self.capacity, heads * dim)
            # Zeros, not empty: a masked slot is multiplied by weight 0, and 0 * NaN is NaN.
            self._data = keys.new_zeros(shape)
        if keys.shape != values.shape or self._data.shape[-1] != heads * dim:
            raise UserError("target: its layers keep keys and values of different shapes; not supported")
        if not self._seen:  # made once for all layers: a view costs as much as the copy below
            self._seen = self._views(0, self.width, dim)
            if len(set(self.lengths)) == 1:
                self._fresh = self._views(self.before, self.width, dim)
        if self._fresh:
            self._fresh[2 * layer].copy_(keys)
            self._fresh[2 * layer + 1].copy_(values)
        else:
            index = self._flat_index(keys.device)
            flat = self._data[layer].view(2, rows * self.capacity, heads * dim)
            flat[0].index_copy_(0, index, keys.transpose(1, 2).reshape(rows * new, -1))
            flat[1].index_copy_(0, index, values.transpose(1, 2).reshape(rows * new, -1))
        return self._seen[2 * layer], self._seen[2 * layer + 1]

    def _views(self, first: int, last: int, dim: int) -> Sequence[Tensor]:
        """Keys and values of each layer in turn, (B, heads, last - first, dim)."""
        assert self._data is not None
        part = self._data[:, :, :, first:last].unflatten(-1, (-1, dim))
        return part.transpose(3, 4).flatten(0, 1).unbind()

    def _flat_index(self, device: torch.device) -> Tensor:
        if self._index is None:
            start = torch.tensor(self.lengths) + torch.arange(len(self.lengths)) * self.capacity
            steps = self._scratch + torch.arange(self._new)
            self._index = (start[:, None] + steps).flatten().to(device)
        return self._index

    def keep(self, counts: Sequence[int], slots: Tensor | None = None) -> None:
        """Settle `counts[b]` of the slots written last.

        Args:
            counts: per row.
            slots: (B, M) which of the written slots, in order; None if they are the first ones.
        """
        assert self._data is not None
        longest = max(counts)
        if slots is not None and longest > 1:  # the root is where it belongs
            device = self._data.device
            slots = slots[:, :longest].to(device)
            rows, kept = slots.shape
            start = torch.tensor(self.lengths) + torch.arange(rows) * self.capacity
            start = start[:, None].to(device)
            flat = self._data.view(self.layers * 2, rows * self.capacity, -1)
            # The gather is a copy, so overlapping source and destination are safe.
            moved = flat[:, (start + slots).flatten()]
            flat[:, (start + torch.arange(kept, device=device)).flatten()] = moved
        self.lengths = [n + c for n, c in zip(self.lengths, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.lengths = [self.lengths[r] for r in rows]
        if self._data is None:
            return
        if any(a >= b for a, b in pairwise(rows)):
            self._data = self._data[:, :, list(rows)]
            return
        # Rows have left, and those behind them move up: in place, for all that is settled is little of it.
        used = max(self.lengths, default=0)
        for new, old in enumerate(rows):
            if new != old:
                self._data[:, :, new, :used] = self._data[:, :, old, :used]
        self._data = self._data[:, :, : len(rows)]


class SplitStore(RowStore):
    """Keys and values of layers that lie on several devices: one store on each.

    Args:
        places: of every layer, the number of its store: 0, 1, ...
        rows: B.
        capacity: as in `RowStore`.
    """

    def __init__(self, places: Sequence[int], rows: int, capacity: int) -> None:
        super().__init__(len(places), rows, capacity)
        self._stores = [RowStore(places.count(p), rows, capacity) for p in range(max(places) + 1)]
        self._where = [(self._stores[p], places[:i].count(p)) for i, p in enumerate(places)]

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
        store, own = self._where[layer]
        return store.write(own, keys, values)

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


def attention_mask(
    lengths: Sequence[int],
    block: Tensor,
    width: int,
    positions: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """(B, n, width) bool: which stored slots each new slot attends to.

    Args:
        lengths: settled slots per row; all of them are seen.
        block: (B, n, m) bool, visibility of the m slots behind the settled ones.
        width: of the result.
        positions: (B, m) of the slots behind the settled ones; needed for a window.
        window: sliding window in tokens: a key is seen while it lies less than this far back.
    """
    rows, new, behind = block.shape
    device = block.device
    level = len(set(lengths)) == 1
    if level and window is None:
        return nn.functional.pad(block, (lengths[0], 0), value=True)
    slot = torch.arange(width, device=device)
    settled = torch.tensor(lengths).to(device)  # (B,)
    where = settled[:, None] + torch.arange(behind, device=device)  # (B, m)
    if level:
        mask = nn.functional.pad(block, (lengths[0], 0), value=True)
    else:
        mask = (slot < settled[:, None])[:, None].repeat(1, new, 1)  # (B, n, width)
        mask = mask.scatter(2, where[:, None].expand(-1, new, -1), block)
    if window is not None:
        assert positions is not None
        key_position = slot.repeat(rows, 1).scatter(1, where, positions)  # (B, width)
        mask = mask & (positions[:, -new:, None] - key_position[:, None] < window)
    return mask


class _Layer(CacheLayerMixin):
    """One layer's view of the store, as transformers' attention calls it."""

    is_sliding = False  # windows are in the mask: a settled slot may be needed again after a rejection

    def __init__(self, store: RowStore, index: int, write: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._store, self._layer, self._write = store, index, write
        self.is_initialized = True

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store and return everything to attend to."""
        return self._write(self._layer, key_states, value_states)

    def get_seq_length(self) -> int:
        """What the new tokens come after, of the longest row."""
        return self._store.before

    def get_max_length(self) -> int:
        """Slots allocated."""
        return self._store.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width and offset of a mask built by transformers."""
        del query_length
        return self._store.width, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store allocates at the first write."""

    def reset(self) -> None:
        """Forget everything."""
        self._store.lengths = [0] * len(self._store.lengths)


class KVCache(Cache):
    """A `RowStore` in transformers' clothes.

    Args:
        places: of every layer, the number of the device that it lies on; see `SplitStore`.
        rows: B.
        capacity: as in `RowStore`.
        compiled: the layers are.

    Only full attention (with or without a sliding window) can be compacted; recurrent and
    linear-attention states are refused by the probe before a cache is ever built.
    """

    def __init__(self, places: Sequence[int], rows: int, capacity: int, compiled: bool = False) -> None:
        layers = len(places)
        several = len(set(places)) > 1
        self.store = SplitStore(places, rows, capacity) if several else RowStore(layers, rows, capacity)
        # Lengths change every round, so the store stays out of compiled graphs.
        write: Any = torch.compiler.disable(self.store.write) if compiled else self.store.write
        super().__init__(layers=[_Layer(self.store, i, write) for i in range(layers)])
