"""Drafts with the whole target and sparse attention (SparseSpec, MagicDec, StreamingLLM)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from decode.errors import UserError
from decode.model.cache import KeptStore, RowStore
from decode.model.fused_forward import Fused
from decode.model.target import Target
from decode.transfer import RowInts
from drafters.families.self_drafting import Read, SelfDrafter, SelfState

ROOM = 32  # initial scratch slots


@dataclass(slots=True)
class SparseState(SelfState):
    """Settled text and selected places; None before the first `advance`.

    Attributes:
        lengths: number of settled places of each row.
        tail: (B, m) newest settled tokens, right-aligned.
        chosen: (B, layers, K, heads) most attended places, from the newest selection.
        bytes: size of a token in the target's cache.
    """

    lengths: RowInts | None = None
    tail: Tensor | None = None
    chosen: Tensor | None = None
    bytes: int = 0


class Sparse(SelfDrafter):
    """The whole target, attending only to the first, the newest, and the most attended places of the text.

    The most attended places are selected for every layer and KV head whenever the text grows past a multiple
    of `refresh` places: those with the most attention from the last `queries` places, over all query heads of
    the KV head. Newer places are all kept, so there are `recent` - `refresh` to `recent` newest places. The
    selection depends only on the text, not on where rounds begin. (SparseSpec, arXiv:2512.01278, uses the
    attention of each verification. MagicDec, arXiv:2408.11049, uses the first and newest places: `places=0`.)

    Args:
        sinks: number of first places.
        recent: maximum number of newest places.
        places: K, number of most attended places of each KV head.
        refresh: places between two selections.
        queries: number of newest places that decide a selection by their attention.

    Raises:
        UserError: an option out of range.
    """

    def __init__(self, sinks: int, recent: int, places: int, refresh: int, queries: int) -> None:
        super().__init__()
        if sinks < 0 or places < 0 or not 1 <= queries <= refresh <= recent:
            raise UserError(
                f"drafter: sinks={sinks} and places={places} must be at least 0, and queries={queries}, "
                f"refresh={refresh} and recent={recent} at least 1 and in ascending order"
            )
        self.settings = {"sinks": sinks, "recent": recent, "places": places}
        self.settings |= {"refresh": refresh, "queries": queries}
        self.sinks, self.recent, self.places = sinks, recent, places
        self.refresh, self.queries = refresh, queries
        # Visible places without those newer than the selection
        self.least = sinks + places + recent - refresh

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        drafter = cls(**options)
        drafter.check_target(target)
        return drafter

    @override
    def check_target(self, target: Target) -> None:
        super().check_target(target)
        if getattr(target.config, "sliding_window", None):
            raise UserError(
                "drafter=sparse: the target has a sliding window, so no keys to skip; choose another drafter"
            )

    # -- decoding ----------------------------------------------------------------------------

    @override
    def new_state(self, rows: int) -> SparseState:
        return SparseState(lengths=RowInts([0] * rows))

    @override
    def advance(
        self,
        state: SparseState,
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        assert state.lengths is not None
        before, added = state.lengths, RowInts.of(counts)
        before.on(root.device)  # so that sums with it are computed on the device
        state.root, state.lengths = root, before.plus(added)
        state.bytes = target.cache.store.bytes_per_token
        if state.chosen is None:
            layers, heads = _key_shape(target)
            state.chosen = tokens.new_zeros(len(tokens), layers, self.places, heads)
        self._append(state, tokens, added)
        if self.places and any(self._selects(a, b) for a, b in zip(before, state.lengths, strict=True)):
            self._select(state, target, before)

    def _append(self, state: SparseState, tokens: Tensor, added: RowInts) -> None:
        """Append to the rows' newest tokens."""
        width = self.refresh + self.queries
        tail = tokens.new_zeros(len(tokens), width) if state.tail is None else state.tail
        at = added.on(tokens.device)[:, None] + torch.arange(width, device=tokens.device)
        state.tail = torch.cat([tail, tokens], 1).gather(1, at)

    def _selects(self, before: int, after: int) -> bool:
        """Whether places are selected as a text grows from `before` settled places to `after`."""
        selected = after - after % self.refresh
        return selected > max(before, self.least)

    def _select(self, state: SparseState, target: Target, before: RowInts) -> None:
        """Select places again in rows that have grown past a multiple of `refresh`."""
        assert state.lengths is not None
        assert state.tail is not None
        assert state.chosen is not None
        device = state.tail.device
        length, count = state.lengths.on(device), torch.arange(self.queries, device=device)
        end = length - length % self.refresh  # (B,) places before the selection
        # Rows with fewer places are not selected, so their tokens do not matter.
        at = (state.tail.shape[1] - (length - end) - self.queries)[:, None] + count
        asking = (end[:, None] - self.queries + count).clamp_min(0)  # (B, q)
        assert target.fused is not None
        mass = attention_mass(target.fused, target.cache.store, state.tail.gather(1, at), asking)
        place = torch.arange(mass.shape[-1], device=device)
        last = (end - (self.recent - self.refresh))[:, None]  # (B, 1) first of the newest places
        free = (place >= self.sinks) & (place < last)  # (B, T)
        chosen = mass.masked_fill(~free[:, None, None], -1).topk(self.places).indices.transpose(2, 3)
        grown = (end > before.on(device))[:, None, None, None]
        state.chosen = torch.where(grown, chosen, state.chosen)

    def _visible_places(self, state: SparseState, target: Target) -> tuple[Tensor, RowInts]:
        """(layers, B, P, heads) visible places, and their number in each row."""
        assert state.lengths is not None
        assert state.chosen is not None
        device, (layers, heads) = state.chosen.device, _key_shape(target)
        length = state.lengths.on(device)
        newer = length % self.refresh
        whole = length - newer <= self.least  # (B,)
        kept = RowInts(self._visible_counts(state.lengths), torch.where(whole, length, self.least + newer))
        slot = torch.arange(max(kept), device=device)
        # The newest places follow the sinks and the chosen ones.
        part = torch.where(slot < self.sinks, slot, length[:, None] - kept.on(device)[:, None] + slot)
        places = torch.where(whole[:, None], slot, part).clamp_max(max(state.lengths) - 1)  # (B, P)
        places = places[None, ..., None].expand(layers, -1, -1, heads)
        before, middle, newest = places.tensor_split([self.sinks, self.sinks + self.places], 2)
        chosen = state.chosen.transpose(0, 1)[:, :, : middle.shape[2]]
        return torch.cat([before, torch.where(whole[:, None, None], middle, chosen), newest], 2), kept

    def _visible_counts(self, lengths: Sequence[int]) -> list[int]:
        """Number of visible places of texts of these lengths."""
        return [n if n - n % self.refresh <= self.least else self.least + n % self.refresh for n in lengths]

    @override
    def reader(self, state: SparseState, target: Target) -> Read:
        store = KeptStore(target.cache.store, *self._visible_places(state, target), ROOM)

        def read(tokens: Tensor, reach: Tensor | None, scratch: int) -> Tensor:
            return target.forward(tokens, reach, scratch, store=store)

        return read

    def kv_bytes_per_token(self, state: SparseState) -> int:
        """Bytes of the copied keys and values of a round, per settled token."""
        assert state.lengths is not None
        return -(-state.bytes * sum(self._visible_counts(state.lengths)) // max(1, sum(state.lengths)))


def _key_shape(target: Target) -> tuple[int, int]:
    """Number of layers, and of KV heads in each."""
    assert target.fused is not None
    layer = target.fused.layers[0]
    return len(target.layers), layer.qk_heads - layer.heads


def attention_mass(fused: Fused, store: RowStore, tokens: Tensor, places: Tensor) -> Tensor:
    """Attention of settled tokens, summed over these tokens and the query heads of each KV head.

    The tokens are read again over the cache, without writing to it.

    Args:
        fused: the target's layers.
        store: keys and values of the text.
        tokens: (B, n) settled tokens.
        places: (B, n) of the tokens.

    Returns:
        (B, layers, kv_heads, T) sums of probabilities over the T places of the longest row.
    """
    x, masses = fused.embed(tokens), []
    wide = torch.promote_types(x.dtype, torch.float32)
    angles = fused.angles(max(store.lengths), x)[places]
    hidden: Tensor | None = None  # (B, 1, 1, n, T) places hidden from a token
    for index, layer in enumerate(fused.layers):
        q, *_ = layer.project(x, angles)
        keys, values = store.settled(index, layer.dim)
        q = q.unflatten(1, (keys.shape[1], -1))  # (B, kv_heads, groups, n, dim)
        scores = (q @ keys[:, :, None].mT).to(wide) * layer.scale  # (B, kv_heads, groups, n, T)
        if hidden is None:
            place = torch.arange(scores.shape[-1], device=places.device)
            hidden = (place > places[..., None])[:, None, None]
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        masses.append(probs.sum((2, 3)))
        x = layer.add_mlp(layer.add_attention(x, (probs.to(x.dtype) @ values[:, :, None]).flatten(1, 2)))
    return torch.stack(masses, 1)
