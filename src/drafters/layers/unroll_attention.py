"""Attention of an unroll in blocks of queries, with memory linear in the text's length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

SCORE_BYTES = {
    "cpu": 2**20,
    "cuda": 2**27,
}  # bytes of one block of attention weights; on a CPU it should fit L2
MIN_QUERIES = 32  # per block: with fewer, reading the keys dominates


class Block(NamedTuple):
    """A block of queries of one text, and the keys of the first step that it sees."""

    first: int  # queries [first, last)
    last: int
    begin: int  # keys [begin, end)
    end: int
    full: int  # keys before this one are visible to all queries of the block
    text: int  # first key of the text
    sinks: int = 0  # also keys [text, text + sinks), all before `begin`

    @property
    def seen(self) -> int:
        """Number of visible keys."""
        return self.sinks + self.end - self.begin

    def keys(self, device: torch.device) -> Tensor:
        """(seen,) indices of the visible keys."""
        window = torch.arange(self.begin, self.end, device=device)
        first = torch.arange(self.text, self.text + self.sinks, device=device)
        return torch.cat([first, window]) if self.sinks else window


class Queries(NamedTuple):
    """What M queries see of the first step's keys, on the host.

    Attributes:
        place: (M,) ascending, the last visible key.
        text: (M,) the first key of the query's text.
        oldest: (M,) first visible key, except for sinks; None: the text's first.
        sinks: number of first keys of a text that are visible in addition to the keys from `oldest` on.
    """

    place: Tensor
    text: Tensor
    oldest: Tensor | None = None
    sinks: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, to be copied to the device."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}


class Visibility(NamedTuple):
    """Keys that the queries of one unroll step see.

    Attributes:
        queries: on the host.
        copied: `Queries.tensors` on the device.
        own: (M,) for each later step the only visible key, that of the query's own anchor.
        later: (M, steps - 1) bool, whether a query sees its key of a later step; None: all do.
    """

    queries: Queries
    copied: Mapping[str, Tensor]
    own: Sequence[Tensor]
    later: Tensor | None = None


class Attend(Protocol):
    """An implementation of `attend_unrolled`."""

    def __call__(
        self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], visibility: Visibility, /
    ) -> Tensor:
        """See `attend_unrolled`."""
        ...


def oldest_keys(
    place: Tensor, text: Tensor, window: int | None, sinks: int, ahead: Tensor | int
) -> Tensor | None:
    """(M,) `Queries.oldest` on the host; None if no query's window hides a key.

    Args:
        place: (M,) the last key that each query may see.
        text: (M,) the first key of each query's text.
        window: W, a query sees the key at its position and the W - 1 before; None: no window.
        sinks: see `Queries`.
        ahead: number of positions between a query and its last key, (M,) or one for all.
    """
    if window is None:
        return None
    oldest = torch.maximum(place + ahead - window + 1, text)
    return None if bool((oldest <= text + sinks).all()) else oldest


def query_blocks(queries: Queries, heads: int, like: Tensor) -> list[Block]:
    """Split queries into blocks whose attention weights fit into `SCORE_BYTES`.

    Args:
        queries: to split.
        heads: number of query heads.
        like: a tensor with the dtype and device of the keys.
    """
    place, text, oldest, sinks = queries
    budget = SCORE_BYTES.get(like.device.type, SCORE_BYTES["cuda"]) // (heads * like.itemsize)
    blocks = []
    starts, counts = text.unique_consecutive(return_counts=True)
    last_keys = place.tolist()
    start = 0
    for begin, count in zip(starts.tolist(), counts.tolist(), strict=True):
        stop = start + count
        if oldest is None:
            size = max(MIN_QUERIES, budget // (last_keys[stop - 1] + 1 - begin))
        else:  # largest q with q (q + reach) scores in the budget
            reach = int((place - oldest)[start:stop].max()) + 1 + sinks
            size = max(MIN_QUERIES, (math.isqrt(reach * reach + 4 * budget) - reach) // 2)
        for first in range(start, stop, size):
            last = min(first + size, stop)
            end, full = last_keys[last - 1] + 1, last_keys[first] + 1
            if oldest is None:
                blocks.append(Block(first, last, begin, end, full, begin))
                continue
            old = min(int(oldest[first:last].min()), end - 1)
            if old <= begin + sinks:
                blocks.append(Block(first, last, begin, end, begin, begin))
            else:
                blocks.append(Block(first, last, old, end, old, begin, sinks))
        start = stop
    return blocks


class _Attention(torch.autograd.Function):
    """Softmax attention over the first step's keys and one key of each later step.

    Attention weights of a block use one buffer, and are recomputed in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, visibility: Visibility, blocks: Sequence[Block], q: Tensor, *keys_values: Tensor
    ) -> Tensor:
        ctx.visibility, ctx.blocks = visibility, blocks
        ctx.save_for_backward(q, *keys_values)
        with torch.autocast(q.device.type, enabled=False):
            heads = _Heads(visibility, blocks, q, keys_values)
            out, later_weights = torch.empty_like(heads.queries), torch.empty_like(heads.later_scores)
            for part in heads:
                weight = part.weights(0)
                torch.bmm(weight[..., : part.seen], part.values, out=out[:, part.rows])
                later_weights[:, part.rows] = weight[..., part.seen :]
            for i, v in enumerate(heads.later_values):
                heads.split_group(out).addcmul_(heads.split_group(later_weights)[..., i, None], v)
        return heads.by_query(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, *keys_values = ctx.saved_tensors
        heads = _Heads(ctx.visibility, ctx.blocks, q, keys_values)
        grad_out = heads.by_head(grad)
        grad_q, grad_k, grad_v = (
            torch.empty_like(grad_out),
            torch.zeros_like(heads.keys),
            torch.zeros_like(heads.values),
        )
        later_weights, grad_later = (
            torch.empty_like(heads.later_scores),
            heads.later_products(grad_out, heads.later_values),
        )
        for part in heads:
            n, rows = part.seen, part.rows
            weight, grad_scores = part.weights(0), part.buffer(1)
            torch.bmm(grad_out[:, rows], part.values.mT, out=grad_scores[..., :n])
            grad_scores[..., n:] = grad_later[:, rows]
            # private API: torch has no public softmax backward into a given buffer.
            torch._softmax_backward_data(grad_scores, weight, -1, weight.dtype, grad_input=grad_scores)
            torch.bmm(grad_scores[..., :n], part.keys, out=grad_q[:, rows])
            part.add_product(grad_k, grad_scores[..., :n].mT, heads.queries[:, rows])
            part.add_product(grad_v, weight[..., :n].mT, grad_out[:, rows])
            later_weights[:, rows], grad_later[:, rows] = weight[..., n:], grad_scores[..., n:]
        grads_k, grads_v = [grad_k.transpose(0, 1)], [grad_v.transpose(0, 1)]
        for i, k in enumerate(heads.later_keys):
            heads.split_group(grad_q).addcmul_(heads.split_group(grad_later)[..., i, None], k)
            grads_k.append(heads.scatter_later(grad_later[..., i, None] * heads.queries, i))
            grads_v.append(heads.scatter_later(later_weights[..., i, None] * grad_out, i))
        return None, None, heads.by_query(grad_q.mul_(heads.scale)), *grads_k, *grads_v


class _Heads:
    """Inputs laid out per key head: G key heads, Q = M queries x query heads of one key head.

    Iteration yields the blocks; each overwrites the buffers of the previous one.

    Attributes:
        queries: (G, Q, dim), scaled.
        keys: (G, N, dim) of the first step; `values` likewise.
        later_keys: for each later step, each query's key, (G, M, 1, dim); `later_values` likewise.
        later_scores: (G, Q, steps) scores of the later keys.
    """

    def __init__(
        self, visibility: Visibility, blocks: Sequence[Block], q: Tensor, keys_values: Sequence[Tensor]
    ) -> None:
        steps = len(keys_values) // 2
        keys, values = keys_values[:steps], keys_values[steps:]
        self.visibility, self.scale, self.kv_heads = visibility, q.shape[-1] ** -0.5, keys[0].shape[1]
        self.group_size = q.shape[1] // self.kv_heads  # query heads per key head
        self._sizes = [len(k) for k in keys[1:]]
        self.queries = self.by_head(q) * self.scale
        self.keys, self.values = (t[0].transpose(0, 1).contiguous() for t in (keys, values))
        self.later_keys = [self._gather_later(k, i) for i, k in enumerate(keys[1:])]
        self.later_values = [self._gather_later(v, i) for i, v in enumerate(values[1:])]
        self.later_scores = self.later_products(self.queries, self.later_keys)
        if visibility.later is not None:
            self.split_group(self.later_scores).masked_fill_(~visibility.later[:, None], -torch.inf)
        self.blocks = blocks
        most = max((b.last - b.first) * (b.seen + steps - 1) for b in self.blocks)
        # Allocated once: a new allocation costs as much as a pass over the memory.
        self.buffers = q.new_empty(2, self.kv_heads * self.group_size * most)

    def __iter__(self) -> Iterator[_Part]:
        for block in self.blocks:
            yield _Part(self, block, self._mask(block))

    def by_head(self, x: Tensor) -> Tensor:
        """(M, heads, dim) -> (G, Q, dim)."""
        return x.unflatten(1, (self.kv_heads, -1)).transpose(0, 1).flatten(1, 2)

    def by_query(self, x: Tensor) -> Tensor:
        """The inverse of `by_head`."""
        return self.split_group(x).transpose(0, 1).flatten(1, 2)

    def _gather_later(self, x: Tensor, i: int) -> Tensor:
        """(M', G, dim) of a later step -> (G, M, 1, dim)."""
        return x.index_select(0, self.visibility.own[i]).transpose(0, 1)[:, :, None]

    def split_group(self, x: Tensor) -> Tensor:
        """(G, Q, ...) -> (G, M, query heads per key head, ...), a view."""
        return x.unflatten(1, (-1, self.group_size))

    def scatter_later(self, grad: Tensor, i: int) -> Tensor:
        """Backward of `_gather_later`: sums the gradients of queries that read the same key."""
        rows = self.split_group(grad).sum(2).transpose(0, 1)  # (M, G, dim)
        whole = rows.new_zeros(self._sizes[i], *rows.shape[1:])
        return whole.index_add_(0, self.visibility.own[i], rows)

    def later_products(self, x: Tensor, later: Sequence[Tensor]) -> Tensor:
        """(G, Q, dim) -> (G, Q, steps) dot products with each query's key or value of every later step."""
        products = [(self.split_group(x) * other).sum(-1).flatten(1) for other in later]
        return torch.stack(products, -1) if products else x.new_empty(*x.shape[:2], 0)

    def _mask(self, block: Block) -> Tensor | None:
        """(queries, 1, n) additive mask of the last n keys; all others are visible; None: no mask."""
        if block.full == block.end:
            return None
        queries, copied = slice(block.first, block.last), self.visibility.copied
        place, oldest = copied["place"][queries, None], copied.get("oldest")
        keys = block.keys(place.device)[block.full - block.begin :]
        hidden = keys > place
        if oldest is not None:
            first = block.text + self.visibility.queries.sinks
            hidden |= (keys < oldest[queries, None]) & (keys >= first)
        return torch.zeros(hidden.shape, dtype=self.keys.dtype, device=place.device).masked_fill_(
            hidden, -torch.inf
        )[:, None]


class _Part:
    """One block in all heads: m = queries x query heads of a key head, n keys of the first step.

    Attributes:
        rows: slice of `_Heads.queries`.
        columns: slice or (n,) indices of `_Heads.keys`.
    """

    def __init__(self, heads: _Heads, block: Block, mask: Tensor | None) -> None:
        self._heads, self._mask = heads, mask
        self.rows = slice(block.first * heads.group_size, block.last * heads.group_size)
        device = heads.keys.device
        self.columns = block.keys(device) if block.sinks else slice(block.begin, block.end)
        self._full, self.seen = block.full - block.begin, block.seen
        self.keys, self.values = heads.keys[:, self.columns], heads.values[:, self.columns]

    def buffer(self, which: int) -> Tensor:
        """(G, m, n + steps) view of a buffer, uninitialised."""
        shape = (
            self._heads.kv_heads,
            self.rows.stop - self.rows.start,
            self.seen + len(self._heads.later_keys),
        )
        return self._heads.buffers[which, : math.prod(shape)].view(shape)

    def add_product(self, grad: Tensor, left: Tensor, right: Tensor) -> None:
        """Add the product of (G, n, m) and (G, m, dim) to the rows of these keys in (G, N, dim)."""
        if isinstance(self.columns, slice):
            grad[:, self.columns].baddbmm_(left, right)
        else:
            grad.index_add_(1, self.columns, torch.bmm(left, right))

    def weights(self, which: int) -> Tensor:
        """(G, m, n + steps) attention weights, in a buffer."""
        score, n = self.buffer(which), self.seen
        torch.bmm(self._heads.queries[:, self.rows], self.keys.mT, out=score[..., :n])
        score[..., n:] = self._heads.later_scores[:, self.rows]
        if self._mask is not None:
            score[..., self._full : n].unflatten(1, (len(self._mask), -1)).add_(self._mask)
        return torch.softmax(score, -1, out=score)


def attend_unrolled(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], visibility: Visibility
) -> Tensor:
    """Attention of a step of an unroll (EAGLE-3's training-time test, arXiv:2503.01840).

    A query belongs to an anchor. It sees the keys of the first step up to its anchor (with a window: in
    it, and the sinks), and its anchor's key of every later step. Only supervised anchors have queries, and
    texts are concatenated, so there is no padding, and no (T, T) or (T, T + k) tensor exists.

    Args:
        q: (M, heads, dim).
        keys: of the first step (N, kv_heads, dim), then of the later ones (M', kv_heads, dim).
        values: likewise.
        visibility: keys that each query sees.

    Returns:
        (M, heads, dim).
    """
    blocks = query_blocks(visibility.queries, q.shape[1], keys[0])
    return _Attention.apply(visibility, blocks, q, *keys, *values)
