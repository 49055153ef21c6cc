"""Pieces of an unroll with gradients written by hand: fewer passes over memory, less kept of them.

On a CPU what is not a matrix product costs a pass over memory each, and autograd would make two or
three times as many; on a GPU each would be a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

SCORES = {"cpu": 2**20, "cuda": 2**27}  # bytes of one block of attention weights; on a CPU it should fit L2
LEAST = 32  # queries of a block: with fewer, a product spends its time on reading the keys


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean.add_(eps).rsqrt_()  # (..., 1)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        size = x.shape[-1]
        unit = x * scale
        product = grad * unit
        along = (product @ weight).div_(size)[..., None]
        grad_x = torch.addcmul(grad * weight, unit, along, value=-1).mul_(scale)
        return grad_x, product.view(-1, size).sum(0), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zhang & Sennrich, arXiv:1910.07467."""
    weight = weight.to(x.dtype)  # under autocast the input is bf16 and the weight fp32
    # torch's own is one kernel on a GPU, and wide inside where its input is narrow.
    if x.device.type != "cpu" or x.dtype.itemsize < 4 or not torch.is_grad_enabled():
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        result = torch.empty_like(gate_up)
        grad_gate, grad_up = result.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return result


def swiglu(gate_up: Tensor) -> Tensor:
    """(..., 2 I) -> (..., I) silu of the first half times the second (Shazeer, arXiv:2002.05202)."""
    return _SwiGLU.apply(gate_up)


def _turn(x: Tensor, cosine: Tensor, sine: Tensor, sign: int) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return torch.addcmul(x * cosine, turned, sine, value=sign)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turn(x, cosine, sine, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _turn(grad, *ctx.saved_tensors, sign=-1), None, None  # a turn's transpose is the turn back


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate (..., heads, dim) by its position's (..., 2, 1, dim) cosine and sine."""
    return _Rotate.apply(x, angles[..., 0, :, :], angles[..., 1, :, :])


class Block(NamedTuple):
    """Queries of one text that are worked on together, and the keys of the first step they see."""

    first: int
    last: int
    begin: int
    end: int
    full: int  # keys from here on are hidden from some of these queries


class Look(NamedTuple):
    """What the queries of one step of an unroll see.

    Attributes:
        places: for the first step and each one since, (M,) rows of its keys. Of the first, the last
            key that a query sees; of later ones, the only one: its own anchor's.
        blocks: from `blocks`.
    """

    places: Sequence[Tensor]
    blocks: Sequence[Block]


def blocks(place: Tensor, text: Tensor, heads: int, like: Tensor) -> list[Block]:
    """Cut queries into blocks.

    Args:
        place: (M,) ascending, on the host: the last key that each query sees.
        text: (M,) on the host: the first key of each query's text.
        heads: of the queries.
        like: something in the dtype and place of the keys.
    """
    budget = SCORES.get(like.device.type, SCORES["cuda"]) // (heads * like.itemsize)
    found = []
    starts, counts = text.unique_consecutive(return_counts=True)
    seen = place.tolist()
    at = 0
    for begin, count in zip(starts.tolist(), counts.tolist(), strict=True):
        stop = at + count
        size = max(LEAST, budget // (seen[stop - 1] + 1 - begin))
        for first in range(at, stop, size):
            last = min(first + size, stop)
            found.append(Block(first, last, begin, seen[last - 1] + 1, seen[first] + 1))
        at = stop
    return found


class _Attention(torch.autograd.Function):
    """Softmax attention over the first step's keys and one key of every later step.

    A block's weights over all it sees are made in one buffer, and made again for the gradient.
    """

    @staticmethod
    def forward(ctx: Any, look: Look, q: Tensor, *keys_values: Tensor) -> Tensor:
        ctx.look = look
        ctx.save_for_backward(q, *keys_values)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        with torch.autocast(q.device.type, enabled=False):
            for part in _parts(look, q, keys_values):
                weight, n = part.weights(), part.seen  # (G, m, n + steps)
                mixed = torch.bmm(weight[..., :n], part.values)
                for i, v in enumerate(part.own_values):
                    mixed.addcmul_(weight[..., n + i, None], v)
                part.put(out, mixed)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, *keys_values = ctx.saved_tensors
        grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in keys_values]
        half = len(grads) // 2
        for part in _parts(ctx.look, q, keys_values):
            weight, n, scale = part.weights(), part.seen, part.scale
            back = part.take(grad)  # (G, m, dim)
            slope = part.buffer(1)
            slope[..., :n].baddbmm_(back, part.values.mT, beta=0)
            for i, v in enumerate(part.own_values):
                torch.sum(back * v, -1, out=slope[..., n + i])
            torch._softmax_backward_data(slope, weight, -1, weight.dtype, grad_input=slope)
            to_q = torch.bmm(slope[..., :n], part.keys).mul_(scale)
            part.first(grads[0]).baddbmm_(slope[..., :n].mT, part.queries, alpha=scale)
            part.first(grads[half]).baddbmm_(weight[..., :n].mT, back)
            for i, k in enumerate(part.own_keys):
                to_q.addcmul_(slope[..., n + i, None], k, value=scale)
                part.put_own(grads[1 + i], i, slope[..., n + i, None] * part.queries * scale)
                part.put_own(grads[half + 1 + i], i, weight[..., n + i, None] * back)
            part.put(grad_q, to_q)
        return None, grad_q, *grads


def _parts(look: Look, q: Tensor, keys_values: Sequence[Tensor]) -> Iterator[_Part]:
    """Block after block; what one had in the buffers is lost to the next."""
    steps = len(keys_values) // 2
    most = max((b.last - b.first) * (b.end - b.begin + steps - 1) for b in look.blocks)
    buffers = q.new_empty(2, q.shape[1] * most)  # new memory costs as much as a pass over it
    for block in look.blocks:
        yield _Part(look, block, buffers, q, keys_values[:steps], keys_values[steps:])


class _Part:
    """One block of queries as (G, m, dim): G key heads, m = queries x query heads of each."""

    def __init__(
        self,
        look: Look,
        block: Block,
        buffers: Tensor,
        q: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> None:
        self.look, self.block, self.buffers, self.group = look, block, buffers, keys[0].shape[1]
        self.scale = q.shape[-1] ** -0.5
        self.seen = block.end - block.begin
        self.queries = self.take(q)
        self.keys, self.values = self.first(keys[0]), self.first(values[0])
        self.own_keys = [self._own(k, i) for i, k in enumerate(keys[1:])]
        self.own_values = [self._own(v, i) for i, v in enumerate(values[1:])]

    def take(self, x: Tensor) -> Tensor:
        """(M, heads, dim) -> (G, m, dim) of this block."""
        part = x[self.block.first : self.block.last].unflatten(1, (self.group, -1))  # (c, G, g, dim)
        return part.transpose(0, 1).flatten(1, 2)

    def put(self, out: Tensor, part: Tensor) -> None:
        """The inverse of `take`."""
        view = out[self.block.first : self.block.last].unflatten(1, (self.group, -1))
        view.copy_(part.unflatten(1, (len(view), -1)).transpose(0, 1))

    def first(self, x: Tensor) -> Tensor:
        """(N, G, dim) -> (G, n, dim) of the first step's keys or values, a view."""
        return x[self.block.begin : self.block.end].transpose(0, 1)

    def _rows(self, i: int) -> Tensor:
        return self.look.places[1 + i][self.block.first : self.block.last]

    def _own(self, x: Tensor, i: int) -> Tensor:
        """(M', G, dim) of a later step -> (G, m, dim)."""
        rows = x.index_select(0, self._rows(i)).transpose(0, 1)  # (G, c, dim)
        heads = self.queries.shape[1] // rows.shape[1]
        return rows if heads == 1 else rows.repeat_interleave(heads, 1)

    def put_own(self, out: Tensor, i: int, part: Tensor) -> None:
        """The inverse of `_own`: a key that several query heads read gets the sum."""
        rows = self._rows(i)
        out.index_copy_(0, rows, part.unflatten(1, (len(rows), -1)).sum(2).transpose(0, 1))

    def buffer(self, which: int) -> Tensor:
        """(G, m, n + steps), with anything in it."""
        group, rows, width = *self.queries.shape[:2], self.seen + len(self.own_keys)
        return self.buffers[which, : group * rows * width].view(group, rows, width)

    def weights(self) -> Tensor:
        """(G, m, n + steps) that sum to 1."""
        n, score = self.seen, self.buffer(0)
        score[..., :n].baddbmm_(self.queries, self.keys.mT, beta=0, alpha=self.scale)
        for i, k in enumerate(self.own_keys):
            torch.sum(self.queries * k, -1, out=score[..., n + i]).mul_(self.scale)
        self._hide(score)
        return torch.softmax(score, -1, out=score)

    def _hide(self, score: Tensor) -> None:
        """Keys after a query's own; most of a block's keys come before them all."""
        block = self.block
        if block.full == block.end:
            return
        place = self.look.places[0][block.first : block.last]
        hidden = torch.arange(block.full, block.end, device=place.device) > place[:, None]  # (c, some)
        view = score[..., block.full - block.begin : self.seen].unflatten(1, (len(place), -1))
        view.masked_fill_(hidden[:, None], -torch.inf)


def attend_unrolled(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], look: Look) -> Tensor:
    """Attention of a step of an unroll (EAGLE-3's training-time test, arXiv:2503.01840).

    A query belongs to an anchor. It sees the keys of the first step up to its anchor, and of every
    later step its own anchor's key alone. Only supervised anchors ask; all texts lie behind one
    another, so nothing is padded, and no (T, T) or (T, T + k) tensor exists.

    Args:
        q: (M, heads, dim).
        keys: of the first step (N, kv_heads, dim), then of the later ones (M', kv_heads, dim).
        values: alike.
        look: who sees what.

    Returns:
        (M, heads, dim).
    """
    return _Attention.apply(look, q, *keys, *values)
