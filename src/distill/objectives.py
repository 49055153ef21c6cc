"""Loss = divergence x step weights, for every drafter.

Logits exist only in chunks: the target's rows of a few positions are made once, every depth that
answers them is scored against them and differentiated down to its hidden states, and all of it is
dropped before the next few. Memory never holds more than one chunk of (rows, V), and a chunk that
fits the cache is also the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.lm import Head
from drafters.base import DraftStep

CHUNK_BYTES = {"cpu": 2**22, "cuda": 2**27}  # of one (rows, V) block; on a CPU it should fit the cache


class Teacher(NamedTuple):
    """The target's law at M rows."""

    p: Tensor  # (M, V)
    negentropy: Tensor  # (M,) sum of p log p, in nats
    best: Tensor  # (M,) likeliest token


# Takes (M, V) log q, which it may overwrite, and the teacher; returns the (M,) values in nats and
# their (M, V) gradients with respect to the draft's logits.
Divergence = Callable[[Tensor, Teacher], tuple[Tensor, Tensor]]
Weights = Callable[[int], float]


def kl(log_q: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """KL(p || q); gradient q - p."""
    value = teacher.negentropy - (teacher.p * log_q).sum(-1)
    return value, log_q.exp_().sub_(teacher.p)


def ce(log_q: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """Cross-entropy to the target's likeliest token; gradient q - onehot."""
    at = teacher.best[:, None]
    value = -log_q.gather(1, at)[:, 0]
    q = log_q.exp_()
    return value, q.scatter_(1, at, q.gather(1, at) - 1)


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
        hidden = [step.hidden for step in taken]
        total, sums = _Chunked.apply(self, taken, last.flatten(0, 1), head, *hidden)
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
        return self.chunk or max(32, budget // (4 * head.weight.shape[0]))


class _Chunked(torch.autograd.Function):
    """Weighted sum of divergences; the gradients are made in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, objective: Objective, steps: Sequence[DraftStep], last: Tensor, head: Head, *hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden[0].dtype, torch.float32)
        gradients = [torch.empty_like(h) for h in hidden]
        sums = torch.zeros(len(steps), 2, dtype=wide, device=last.device)
        # Teacher rows in order, each once; the rows of a step are a run of them.
        answered = [step.anchor + step.depth for step in steps]
        positions = torch.cat(answered).unique()
        places = [torch.searchsorted(positions, a) for a in answered]
        size = objective.rows(head)
        for start in range(0, len(positions), size):
            teacher = _teach(head, last[positions[start : start + size]], wide)
            bounds = torch.tensor([start, start + size], device=last.device)
            for i, (step, place) in enumerate(zip(steps, places, strict=True)):
                low, high = torch.searchsorted(place, bounds).tolist()
                if low == high:
                    continue
                part, where = slice(low, high), place[low:high] - start
                rows = teacher if len(where) == len(teacher.best) else Teacher(*(t[where] for t in teacher))
                with torch.enable_grad():
                    leaf = hidden[i][part].detach().requires_grad_()
                    logits = step.head(leaf.to(step.head.weight.dtype)).to(wide)
                log_q = F.log_softmax(logits.detach(), -1)
                agreed = (log_q.argmax(-1) == rows.best).sum()
                value, slope = objective.divergence(log_q, rows)
                (gradients[i][part],) = torch.autograd.grad(logits, leaf, slope)
                sums[i] += torch.stack([value.sum(), agreed.to(wide)])
        weights = [objective.weights(step.depth) for step in steps]
        for gradient, weight in zip(gradients, weights, strict=True):
            gradient.mul_(weight)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(sums)
        # A product and a sum: autocast would round a matrix product to bfloat16.
        return (sums[:, 0] * torch.tensor(weights, dtype=wide, device=last.device)).sum(), sums

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        del grad_sums
        gradients = ctx.saved_tensors
        return None, None, None, None, *(g * grad_total.to(g.dtype) for g in gradients)


def _teach(head: Head, last: Tensor, dtype: torch.dtype) -> Teacher:
    log_p = F.log_softmax(head(last).to(dtype), -1)
    p = log_p.exp()
    # A token of probability zero adds nothing: 0 log 0 = 0.
    return Teacher(p, torch.xlogy(p, p).sum(-1), log_p.argmax(-1))
