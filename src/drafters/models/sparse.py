"""Drafts with the whole target over a part of the keys (SparseSpec, MagicDec, StreamingLLM)."""

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

ROOM = 32  # scratch slots to begin with


@dataclass(slots=True)
class SparseState(SelfState):
    """What is known of the settled text; None before the first `advance`.

    Attributes:
        lengths: settled places of each row.
        tail: (B, m) tokens of the newest of them, right-aligned.
        chosen: (B, layers, K, heads) most attended places, of the newest selection.
        bytes: of a token in the target's cache.
    """

    lengths: RowInts | None = None
    tail: Tensor | None = None
    chosen: Tensor | None = None
    bytes: int = 0


class Sparse(SelfDrafter):
    """The whole target, which sees the first places of the text, the newest, and those most attended to.

    The latter are chosen for every layer and head of keys whenever the text grows past a multiple of
    `refresh` places, by the last `queries` of them: the places that they attend to most, over all heads that
    share the keys. All newer places are kept, so that there are from `recent` - `refresh` to `recent` of
    them. What is seen depends only on the text, not on where rounds begin. (SparseSpec, arXiv:2512.01278,
    takes the mass of each verification. MagicDec, arXiv:2408.11049, drafts from the first and newest places,
    `places=0`.)

    Args:
        sinks: first places.
        recent: most of the newest places.
        places: most attended places of each head of keys, K.
        refresh: places between two selections.
        queries: places that a selection is made by.

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
        # Kept without the places that are newer than a selection
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
                "drafter=sparse: the target has a sliding window, so there are no far keys to leave out"
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
        before.on(root.device)  # so that sums with it are made on the device
        state.root, state.lengths = root, before.plus(added)
        state.bytes = target.cache.store.bytes_per_token
        if state.chosen is None:
            layers, heads = _keys(target)
            state.chosen = tokens.new_zeros(len(tokens), layers, self.places, heads)
        self._append(state, tokens, added)
        if self.places and any(self._selects(a, b) for a, b in zip(before, state.lengths, strict=True)):
            self._select(state, target, before)

    def _append(self, state: SparseState, tokens: Tensor, added: RowInts) -> None:
        """Shift the rows' newest tokens in."""
        width = self.refresh + self.queries
        tail = tokens.new_zeros(len(tokens), width) if state.tail is None else state.tail
        at = added.on(tokens.device)[:, None] + torch.arange(width, device=tokens.device)
        state.tail = torch.cat([tail, tokens], 1).gather(1, at)

    def _selects(self, before: int, after: int) -> bool:
        """Whether places are chosen as a text grows from `before` settled places to `after`."""
        selected = after - after % self.refresh
        return selected > max(before, self.least)

    def _select(self, state: SparseState, target: Target, before: RowInts) -> None:
        """Choose places again in rows that have grown past a multiple of `refresh`."""
        assert state.lengths is not None
        assert state.tail is not None
        assert state.chosen is not None
        device = state.tail.device
        length, count = state.lengths.on(device), torch.arange(self.queries, device=device)
        end = length - length % self.refresh  # (B,) places that a selection knows
        # A row with fewer is not selected from: any tokens will do.
        at = (state.tail.shape[1] - (length - end) - self.queries)[:, None] + count
        asking = (end[:, None] - self.queries + count).clamp_min(0)  # (B, q)
        assert target.fused is not None
        mass = attention_mass(target.fused, target.cache.store, state.tail.gather(1, at), asking)
        place = torch.arange(mass.shape[-1], device=device)
        last = (end - (self.recent - self.refresh))[:, None]  # (B, 1) the first that is kept anyway
        free = (place >= self.sinks) & (place < last)  # (B, T)
        chosen = mass.masked_fill(~free[:, None, None], -1).topk(self.places).indices.transpose(2, 3)
        grown = (end > before.on(device))[:, None, None, None]
        state.chosen = torch.where(grown, chosen, state.chosen)

    def _kept(self, state: SparseState, target: Target) -> tuple[Tensor, RowInts]:
        """(layers, B, P, heads) places that are seen, and how many of them in each row."""
        assert state.lengths is not None
        assert state.chosen is not None
        device, (layers, heads) = state.chosen.device, _keys(target)
        length = state.lengths.on(device)
        newer = length % self.refresh
        whole = length - newer <= self.least  # (B,)
        kept = RowInts(self._counts(state.lengths), torch.where(whole, length, self.least + newer))
        slot = torch.arange(max(kept), device=device)
        # The newest places follow the sinks and the chosen ones.
        part = torch.where(slot < self.sinks, slot, length[:, None] - kept.on(device)[:, None] + slot)
        places = torch.where(whole[:, None], slot, part).clamp_max(max(state.lengths) - 1)  # (B, P)
        places = places[None, ..., None].expand(layers, -1, -1, heads)
        before, middle, newest = places.tensor_split([self.sinks, self.sinks + self.places], 2)
        chosen = state.chosen.transpose(0, 1)[:, :, : middle.shape[2]]
        return torch.cat([before, torch.where(whole[:, None, None], middle, chosen), newest], 2), kept

    def _counts(self, lengths: Sequence[int]) -> list[int]:
        """How many of so many places are seen."""
        return [n if n - n % self.refresh <= self.least else self.least + n % self.refresh for n in lengths]

    @override
    def reader(self, state: SparseState, target: Target) -> Read:
        store = KeptStore(target.cache.store, *self._kept(state, target), ROOM)

        def read(tokens: Tensor, reach: Tensor | None, scratch: int) -> Tensor:
            return target.forward(tokens, reach, scratch, store=store)

        return read

    def kv_bytes_per_token(self, state: SparseState) -> int:
        """Of the copies that a round drafts from, per settled token."""
        assert state.lengths is not None
        return -(-state.bytes * sum(self._counts(state.lengths)) // max(1, sum(state.lengths)))


def _keys(target: Target) -> tuple[int, int]:
    """Layers, and heads of keys in each."""
    assert target.fused is not None
    layer = target.fused.layers[0]
    return len(target.layers), layer.qk_heads - layer.heads


def attention_mass(fused: Fused, store: RowStore, tokens: Tensor, places: Tensor) -> Tensor:
    """Attention of settled tokens, summed over them and over the query heads that share keys.

    They are read once more, over the cache as it is; nothing is written.

    Args:
        fused: the target's layers.
        store: keys and values of the text.
        tokens: (B, n) settled tokens.
        places: (B, n) of them.

    Returns:
        (B, layers, kv_heads, T) sums of probabilities over the T places of the longest row.
    """
    x, masses = fused.embed(tokens), []
    wide = torch.promote_types(x.dtype, torch.float32)
    angles = fused.angles(max(store.lengths), x)[places]
    hidden: Tensor | None = None  # (B, 1, 1, n, T) places that a token does not see
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
