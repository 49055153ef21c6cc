"""Attention of an unroll by torch's flex attention: one kernel over the first step's keys, for CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from drafters.layers.unroll_attention import Visibility

SIDE = 128  # queries and keys of a block: flex attention's default


@cache
def compiled_flex() -> Callable[..., Any]:
    """Flex attention, compiled once for all lengths."""
    return torch.compile(flex_attention, fullgraph=True, dynamic=True)


def attend_flex(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    visibility: Visibility,
    attention: Callable[..., Any] | None = None,
) -> Tensor:
    """`attend_unrolled`, on the device alone: attention to the first step, joined with one key a later step.

    Softmax over both parts follows from the logarithms of their sums of exponentials.

    Args:
        q: (M, heads, dim).
        keys: see `attend_unrolled`.
        values: see `attend_unrolled`.
        visibility: keys that each query sees.
        attention: `flex_attention`, or the same compiled; default `compiled_flex`.

    Returns:
        (M, heads, dim).
    """
    first = [x.transpose(0, 1)[None] for x in (q, keys[0], values[0])]  # (1, heads, n, dim)
    grouped = q.shape[1] != keys[0].shape[1]
    mask = block_mask(visibility, len(keys[0]))
    ask = attention or compiled_flex()
    out, also = ask(*first, block_mask=mask, enable_gqa=grouped, return_aux=AuxRequest(lse=True))
    seen, sums = out[0].transpose(0, 1), also.lse[0].T  # (M, heads, dim), (M, heads)
    if not visibility.own:
        return seen
    group = q.shape[1] // keys[0].shape[1]

    def of_queries(rows: Sequence[Tensor]) -> list[Tensor]:
        """(M, heads, dim) of each later step."""
        chosen = zip(rows[1:], visibility.own, strict=True)
        return [row.index_select(0, own).repeat_interleave(group, 1) for row, own in chosen]

    later_keys, later_values = of_queries(keys), of_queries(values)
    scores = torch.stack([(q * k).sum(-1) for k in later_keys], -1).to(sums) * q.shape[-1] ** -0.5
    if visibility.later is not None:
        scores = scores.masked_fill(~visibility.later[:, None], -torch.inf)  # (M, heads, steps)
    total = torch.cat([sums[..., None], scores], -1).logsumexp(-1, keepdim=True)
    weights = (scores - total).exp().to(q.dtype)
    result = seen * (sums[..., None] - total).exp().to(q.dtype)
    for weight, v in zip(weights.unbind(-1), later_values, strict=True):
        result = result + weight[..., None] * v
    return result


def block_mask(visibility: Visibility, keys: int) -> BlockMask:
    """What queries see of the first step's keys, computed on the device without a read.

    Args:
        visibility: of the queries.
        keys: number of keys of the first step.
    """
    place, text = visibility.copied["place"], visibility.copied["text"]
    first, sinks = visibility.copied.get("oldest", text), visibility.queries.sinks

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        # Not in place, which the compiler refuses here.
        seen = (key <= place[query]) & (key >= first[query])
        if not sinks:
            return seen
        start = text[query]
        return seen | ((key >= start) & (key < start + sinks) & (key <= place[query]))

    low, high, all_low, all_high = (
        reduce(x) for reduce, x in ((_least, first), (_most, place), (_most, first), (_least, place))
    )
    begin, end = low // SIDE, (high // SIDE + 1)  # blocks of keys with anything to see
    full_begin, full_end = (all_low + SIDE - 1) // SIDE, (all_high + 1) // SIDE  # with everything
    some = full_end > full_begin
    full_begin, full_end = torch.where(some, full_begin, end), torch.where(some, full_end, end)
    ranges = [(begin, full_begin), (full_end, end)]
    if sinks:
        head, tail = _least(text) // SIDE, (_most(text) + sinks - 1) // SIDE + 1
        ranges.append((head, torch.minimum(tail, begin)))
    width = -(-keys // SIDE)
    partial, full = _indices(ranges, width), _indices([(full_begin, full_end)], width)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=SIDE, mask_mod=sees, seq_lengths=(len(place), keys)
    )


def _blocks(rows: Tensor) -> Tensor:
    """(M,) -> (blocks, SIDE); the last value fills up the last block."""
    missing = -len(rows) % SIDE
    return torch.cat([rows, rows[-1:].expand(missing)]).unflatten(0, (-1, SIDE))


def _least(rows: Tensor) -> Tensor:
    """(M,) -> (blocks,) minima."""
    return _blocks(rows).amin(1)


def _most(rows: Tensor) -> Tensor:
    """(M,) -> (blocks,) maxima."""
    return _blocks(rows).amax(1)


def _indices(ranges: Sequence[tuple[Tensor, Tensor]], width: int) -> tuple[Tensor, Tensor]:
    """Numbers of key blocks (1, 1, n) and their indices (1, 1, n, width), from (n,) begins and ends."""
    place = torch.arange(width, device=ranges[0][0].device)
    indices, before = torch.zeros_like(place), torch.zeros_like(ranges[0][0])[:, None]
    for begin, end in ranges:
        count = (end - begin).clamp_min(0)[:, None]
        at = place - before
        indices = torch.where((at >= 0) & (at < count), begin[:, None] + at, indices)
        before = before + count
    return before[None, None, :, 0].int(), indices[None, None].int()
