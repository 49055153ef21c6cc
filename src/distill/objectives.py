"""Loss = divergence x step weights, for every drafter.

Logits exist only in chunks: the target's rows of a few positions are made once, every depth that
answers them is scored against them and differentiated down to its hidden states and its head, and
all of it is dropped before the next few. Memory never holds more than a few (rows, V) blocks, in
buffers that are made once, and a chunk that fits the cache is also the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.lm import Head
from distill.divergences import Divergence, Law, Student, Teacher
from drafters.base import DraftStep

CHUNK_BYTES = {"cpu": 2**22, "cuda": 2**26}  # of one (rows, V) block; on a CPU it should fit the cache
# With fewer, a product spends its time on reading the head: 128 rows of a vocabulary of 128k make
# 64 MB, and that is why the vocabulary itself is never cut.
LEAST_ROWS = 128

Weights = Callable[[int], float]


def constant(depth: int) -> float:
    """Every depth counts the same."""
    del depth
    return 1.0


def decay(depth: int, rate: float) -> float:
    """rate^(depth - 1); Medusa and EAGLE-3 use 0.8 (arXiv:2401.10774, arXiv:2503.01840)."""
    return rate ** (depth - 1)


class Scored(NamedTuple):
    """Sums over one depth's rows, for logging; divide after reduction."""

    depth: int
    rows: int
    divergence: float
    agreed: float  # rows whose likeliest tokens agree
    alpha: float  # sum of min(p, q): the chance that a token drawn from q is accepted


@dataclass(frozen=True)
class Objective:
    """Sum over supervised (anchor, depth) of weight x divergence, plus auxiliary losses.

    Args:
        divergence: per row, with its gradient.
        weights: what a depth counts.
        chunk: rows whose logits exist at one time; 0 chooses by `CHUNK_BYTES`.
    """

    divergence: Divergence
    weights: Weights
    chunk: int = 0

    def __call__(
        self, steps: Iterable[DraftStep], last: Tensor, head: Head, aux_weights: Mapping[str, float]
    ) -> tuple[Tensor, list[Scored]]:
        """The undivided sum and what to log.

        Args:
            steps: of `Drafter.unroll`, anchors ascending.
            last: (B, T, D) the target head's input; the teacher row of anchor a at depth j is
                `head(last[a + j])`.
            head: the target's.
            aux_weights: name -> weight of auxiliary losses.
        """
        taken = list(steps)
        if not taken:
            return last.new_zeros((), dtype=torch.promote_types(last.dtype, torch.float32)), []
        learned = {id(w): w for step in taken for w in _learned(step.head)}
        inputs = [step.hidden for step in taken] + list(learned.values())
        total, sums = _Chunked.apply(self, taken, last.flatten(0, 1), head, *inputs)
        for step in taken:
            for name, rows in step.aux.items():
                total = total + self.weights(step.depth) * aux_weights[name] * rows.to(total.dtype).sum()
        scored = [
            Scored(step.depth, len(step.anchor), *row) for step, row in zip(taken, sums.tolist(), strict=True)
        ]
        return total, scored

    def rows(self, head: Head) -> int:
        """Rows of a chunk."""
        budget = CHUNK_BYTES.get(head.weight.device.type, CHUNK_BYTES["cuda"])
        return self.chunk or max(LEAST_ROWS, budget // (4 * head.weight.shape[0]))


def _learned(head: Head) -> list[Tensor]:
    return [w for w in (head.weight, head.bias) if w is not None and w.requires_grad]


class _Chunked(torch.autograd.Function):
    """Weighted sum of divergences; the gradients are made in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, objective: Objective, steps: Sequence[DraftStep], last: Tensor, head: Head, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(steps[0].hidden.dtype, torch.float32)
        gradients = [torch.empty_like(h) for h in inputs[: len(steps)]]
        learned = {
            id(w): torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
            for w in inputs[len(steps) :]
        }
        sums = torch.zeros(len(steps), 3, dtype=wide, device=last.device)
        weights = [objective.weights(step.depth) for step in steps]
        sweep = _Sweep(steps, last, head, objective.rows(head), wide)
        # What autocast would do is done by hand, once for a whole head.
        with torch.autocast(last.device.type, enabled=False):
            for i, part, hidden, student, teacher in sweep:
                own = steps[i].head
                agreed = sweep.best(student.logits) == teacher.best
                behind = own.slope(student.logits)
                value, slope = objective.divergence(student, teacher)
                slope = slope if isinstance(behind, float) and behind == 1.0 else slope.mul_(behind)
                sums[i] += torch.stack([value.sum(), agreed.sum().to(wide), student.alpha.sum()])
                slope = slope.to(hidden.dtype)
                torch.mul(slope @ sweep.weight(own), weights[i], out=gradients[i][part])
                if id(own.weight) in learned:
                    _add_product(learned[id(own.weight)], slope, hidden * weights[i])
                if id(own.bias) in learned:
                    learned[id(own.bias)].add_(slope.sum(0), alpha=weights[i])
        gradients += [learned[id(w)].to(w.dtype) for w in inputs[len(steps) :]]
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(sums)
        # A product and a sum: autocast would round a matrix product to bfloat16.
        return (sums[:, 0] * torch.tensor(weights, dtype=wide, device=last.device)).sum(), sums

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        del grad_sums
        gradients = ctx.saved_tensors
        return None, None, None, None, *(g * grad_total.to(g.dtype) for g in gradients)


def _add_product(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    """`total` (V', D) += slope (M, V')^T hidden (M, D)."""
    if total.dtype == slope.dtype:
        total.addmm_(slope.mT, hidden)
    else:
        total.add_(slope.mT @ hidden)


class _Sweep:
    """Both laws at the rows of every step, chunk by chunk.

    Args:
        steps: whose rows are scored.
        last: (B * T, D) the target head's input.
        head: the target's.
        size: teacher rows of a chunk.
        dtype: of the laws.
    """

    def __init__(
        self, steps: Sequence[DraftStep], last: Tensor, head: Head, size: int, dtype: torch.dtype
    ) -> None:
        self._steps, self._last, self._head, self._size, self._dtype = steps, last, head, size, dtype
        self._weights: dict[int, Tensor] = {}
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}
        kind = last.device.type
        self._product = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def __iter__(self) -> Iterator[tuple[int, slice, Tensor, Student, Teacher]]:
        """(step, its rows, their hidden states, the draft's law, the target's)."""
        # Teacher rows in order, each once; the rows of a step are a run of them.
        answered = [step.anchor + step.depth for step in self._steps]
        positions = torch.cat(answered).unique()
        places = [torch.searchsorted(positions, a) for a in answered]
        starts = torch.arange(0, len(positions), self._size, device=positions.device)
        bounds = torch.cat([starts, starts.new_tensor([len(positions)])])
        cuts = torch.stack([torch.searchsorted(place, bounds) for place in places]).tolist()
        for n, start in enumerate(starts.tolist()):
            logits, p, norm, best = self._teach(positions[start : start + self._size])
            laws: dict[int, Law] = {}
            for i, (step, place) in enumerate(zip(self._steps, places, strict=True)):
                part = slice(cuts[i][n], cuts[i][n + 1])
                if part.start == part.stop:
                    continue
                d2t = step.head.d2t
                if id(d2t) not in laws:
                    laws[id(d2t)] = Law(logits, p, norm, best, d2t)
                where = slice(None) if part.stop - part.start == len(p) else place[part] - start
                teacher = Teacher(laws[id(d2t)], where)
                hidden = step.hidden[part].to(self.weight(step.head).dtype)
                yield i, part, hidden, self._learn(step.head, hidden, teacher), teacher

    def _teach(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weight = self.weight(self._head)
        logits = self._logits("p", self._head, self._last[positions].to(weight.dtype))
        p = torch.softmax(logits, -1, out=self._buffer("law p", logits))
        return logits, p, _norm(logits, p), self.best(logits)

    def _learn(self, head: Head, hidden: Tensor, teacher: Teacher) -> Student:
        logits = self._logits("q", head, hidden)
        q = torch.softmax(logits, -1, out=self._buffer("law q", logits))
        alpha = torch.minimum(teacher.p, q, out=self._buffer("least", logits)).sum(-1)
        return Student(logits, q, _norm(logits, q), alpha)

    def weight(self, head: Head) -> Tensor:
        """A head's weight, as products read it."""
        key = id(head.weight)
        if key not in self._weights:
            self._weights[key] = head.weight.detach().to(self._product or head.weight.dtype)
        return self._weights[key]

    def _logits(self, name: str, head: Head, hidden: Tensor) -> Tensor:
        weight = self.weight(head)
        out = self._buffer(name, hidden, len(weight))
        if head.bias is None:
            torch.mm(hidden, weight.mT, out=out)
        else:
            torch.addmm(head.bias.detach().to(hidden.dtype), hidden, weight.mT, out=out)
        return head.shape(out).to(self._dtype)

    def _buffer(self, name: str, like: Tensor, width: int = 0) -> Tensor:
        """Memory for as many rows: new blocks cost as much as a pass over them."""
        width = width or like.shape[1]
        key = (name, width, like.dtype)
        if key not in self._buffers:
            self._buffers[key] = like.new_empty(self._size, width)
        return self._buffers[key][: len(like)]

    @staticmethod
    def best(rows: Tensor) -> Tensor:
        """(M, V) -> (M,) the first of the largest. By blocks: argmax alone costs more than a softmax."""
        vocab, width = rows.shape[1], 64
        whole = vocab - vocab % width
        tops = [rows[:, :whole].unflatten(1, (-1, width)).amax(-1)] if whole else []
        if whole < vocab:
            tops.append(rows[:, whole:].amax(-1, keepdim=True))
        block = torch.cat(tops, 1).argmax(-1, keepdim=True)  # (M, 1)
        inside = (block * width + torch.arange(width, device=rows.device)).clamp_max(vocab - 1)
        return inside.gather(1, rows.gather(1, inside).argmax(-1, keepdim=True))[:, 0]


def _norm(logits: Tensor, law: Tensor) -> Tensor:
    """(M,) logsumexp, from the softmax: it is 1 / sum exp(z - max) at the maximum."""
    return logits.amax(-1) - law.amax(-1).log()
