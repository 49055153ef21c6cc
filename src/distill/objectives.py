"""Loss = divergence x step weights, for every drafter.

An objective turns rows of draft and target logits into one number a row; step weights say what a
depth counts. Logits exist only in chunks of rows: a chunk is made, scored, differentiated down to
the hidden states and dropped, so memory never holds more than one chunk of (rows, V).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.target import Head
from drafters.base import DraftStep

Divergence = Callable[[Tensor, Tensor], Tensor]
Weights = Callable[[int], float]


def kl(logits: Tensor, teacher: Tensor) -> Tensor:
    """(M, V) draft and target logits -> (M,) KL(p || q) in nats; gradient q - p."""
    p = teacher.log_softmax(-1)
    return (p.exp() * (p - logits.log_softmax(-1))).sum(-1)


def ce(logits: Tensor, teacher: Tensor) -> Tensor:
    """(M, V) -> (M,) cross-entropy to the target's likeliest token, in nats."""
    return torch.nn.functional.cross_entropy(logits, teacher.argmax(-1), reduction="none")


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
    overlap: float  # sum over rows of sum_v min(p, q): acceptance at temperature 1


@dataclass(frozen=True)
class Objective:
    """Sum over supervised (anchor, depth) of weight x divergence, plus auxiliary losses.

    Args:
        divergence: per-row, of draft and target logits.
        weights: what a depth counts.
        chunk: rows whose logits exist at one time.
    """

    divergence: Divergence
    weights: Weights
    chunk: int = 1024

    def __call__(
        self, steps: Iterable[DraftStep], last: Tensor, head: Head, aux_weights: Any
    ) -> tuple[Tensor, list[Scored]]:
        """The undivided sum and what to log.

        Args:
            steps: of `Drafter.unroll`.
            last: (B, T, D) the target head's input; the teacher row of anchor a at depth j is
                `head(last[a + j])`.
            head: the target's.
            aux_weights: name -> weight of auxiliary losses.
        """
        flat = last.flatten(0, 1)
        total = flat.new_zeros((), dtype=torch.float32)
        scored = []
        for step in steps:
            weight = self.weights(step.depth)
            teacher = flat[step.anchor + step.depth]
            value, row = _Chunked.apply(step.hidden, step, teacher, head, self.divergence, self.chunk)
            total = total + weight * value
            for name, rows in step.aux.items():
                total = total + weight * aux_weights[name] * rows.float().sum()
            scored.append(row)
        return total, scored


class _Chunked(torch.autograd.Function):
    """Sum of divergences; the gradient is made in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden, step, teacher, head, divergence, chunk):  # noqa: ANN001, ANN205
        gradient = torch.empty_like(hidden)
        total = agreed = overlap = 0.0
        sums = []
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            with torch.no_grad():
                reference = head(teacher[part]).float()
            with torch.enable_grad():
                leaf = hidden[part].detach().requires_grad_()
                logits = step.head(leaf.to(step.head.weight.dtype)).float()
                value = divergence(logits, reference).sum()
                (gradient[part],) = torch.autograd.grad(value, leaf)
            logits = logits.detach()
            same = (logits.argmax(-1) == reference.argmax(-1)).sum()
            common = torch.minimum(logits.softmax(-1), reference.softmax(-1)).sum()
            sums.append(torch.stack([value.detach(), same.float(), common]))
        ctx.save_for_backward(gradient)
        total, agreed, overlap = torch.stack(sums).sum(0).tolist()
        scored = Scored(step.depth, hidden.shape[0], total, agreed, overlap)
        return hidden.new_tensor(total, dtype=torch.float32), scored

    @staticmethod
    def backward(ctx, grad_total, grad_scored):  # noqa: ANN001, ANN205
        (gradient,) = ctx.saved_tensors
        return gradient * grad_total.to(gradient.dtype), None, None, None, None, None
