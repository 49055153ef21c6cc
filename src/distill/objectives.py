"""Loss = divergence x step weights, for every drafter.

Logits exist only in chunks: the target's rows of a few positions are made once, every depth that
answers them is scored against them and differentiated down to its hidden states and its head, and
all of it is dropped before the next few. Memory never holds more than a few (rows, V) blocks, and
a chunk that fits the cache is also the fastest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.errors import UserError
from decode.lm import Head
from distill.divergences import Divergence
from distill.laws import Sweep
from distill.weighting import RowWeights, Weights
from drafters.base import Drafter, DraftStep

CHUNK_BYTES = {"cpu": 2**22, "cuda": 2**26}  # of one (rows, V) block; on a CPU it should fit the cache
# Below this, a product mostly reads the head. 128 rows of a vocabulary of 128k are 64 MB, some five
# of which exist at a time: rows suffice, and no logit is made twice for a normaliser.
LEAST_ROWS = 128


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
        weights: what a row counts.
        chunk: teacher rows whose logits exist at one time; 0 chooses by `CHUNK_BYTES`.
    """

    divergence: Divergence
    weights: Weights
    chunk: int = 0

    def __call__(
        self,
        steps: Iterable[DraftStep],
        last: Tensor,
        head: Head,
        aux_weights: Mapping[str, float],
        progress: float = 1.0,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, list[Scored]]:
        """The undivided sum and what to log.

        Args:
            steps: of `Drafter.unroll`, depths and anchors ascending.
            last: (B, T, D) the target head's input; the teacher row of anchor a at depth j is
                `head(last[a + j])`.
            head: the target's; it never trains.
            aux_weights: name -> weight of auxiliary losses.
            progress: share of the training steps that are done, for weights that warm up.
            tokens: (B, T) the text, for a divergence that reads it (`nll`).
        """
        taken = list(steps)
        if not taken:
            return last.new_zeros((), dtype=torch.promote_types(last.dtype, torch.float32)), []
        learned = {id(w): w for step in taken for w in (step.head.weight, step.head.bias) if _learns(w)}
        inputs = [step.hidden for step in taken] + list(learned.values())
        following = None if tokens is None else tokens.roll(-1, 1).flatten()  # (B * T,)
        taught = _Taught(last.flatten(0, 1), head, following)
        total, sums, *weights = _Chunked.apply(self, taken, taught, progress, *inputs)
        for step, weight in zip(taken, weights, strict=True):
            for name, rows in step.aux.items():
                total = total + aux_weights[name] * (weight * rows.to(total.dtype)).sum()
        scored = [
            Scored(step.depth, len(step.anchor), *row) for step, row in zip(taken, sums.tolist(), strict=True)
        ]
        return total, scored

    def check(self, drafter: Drafter) -> None:
        """Refuse weights that mean nothing for a drafter.

        All rows of a shifted one are depth 1, so weights by depth are 1. An anchor then has one
        alpha, and no streak.

        Raises:
            UserError: a shifted drafter, and weights from the alphas of several depths.
        """
        if drafter.shifted and isinstance(self.weights, RowWeights):
            raise UserError(
                "weights: this drafter's depths are one and the same row shifted, so there is no streak to "
                "weigh; set weights=constant"
            )

    def rows(self, head: Head) -> int:
        """Teacher rows of a chunk."""
        budget = CHUNK_BYTES.get(head.weight.device.type, CHUNK_BYTES["cuda"])
        return self.chunk or max(LEAST_ROWS, budget // (4 * head.weight.shape[0]))

    def weigh(self, steps: Sequence[DraftStep], alphas: Sequence[Tensor], progress: float) -> list[Tensor]:
        """(M,) weights of every step's rows, from their alphas where the weights read them.

        Depth 0 is no draft: nothing is in the way of it, and nothing depends on it.
        """
        drafts = [i for i, step in enumerate(steps) if step.depth]
        whole = [torch.full_like(a, step.weight) for step, a in zip(steps, alphas, strict=True)]
        own = self._by_draft([steps[i] for i in drafts], [alphas[i] for i in drafts], progress)
        for i, weight in zip(drafts, own, strict=True):
            whole[i] *= weight
        return whole

    def _by_draft(
        self, steps: Sequence[DraftStep], alphas: Sequence[Tensor], progress: float
    ) -> list[Tensor]:
        """What the objective's weights give the rows of drafts."""
        if not isinstance(self.weights, RowWeights):
            return [torch.full_like(a, self.weights(s.depth)) for s, a in zip(steps, alphas, strict=True)]
        if not steps:
            return []
        anchors = torch.cat([step.anchor for step in steps]).unique()
        alpha = alphas[0].new_zeros(len(anchors), len(steps))  # (A, K)
        present = torch.zeros_like(alpha, dtype=torch.bool)
        places = [torch.searchsorted(anchors, step.anchor) for step in steps]
        for k, (place, own) in enumerate(zip(places, alphas, strict=True)):
            alpha[place, k], present[place, k] = own, True
        weights = self.weights(alpha, present, progress)
        return [weights[place, k] for k, place in enumerate(places)]


class _Taught(NamedTuple):
    """What the steps are taught: the target's rows and, where it is known, the text."""

    last: Tensor  # (B * T, D)
    head: Head
    following: Tensor | None  # (B * T,) the token after each position


def _learns(weight: Tensor | None) -> bool:
    return weight is not None and weight.requires_grad


class _Chunked(torch.autograd.Function):
    """Weighted sum of divergences; the gradients are made in the forward pass, chunk by chunk.

    A row's weight only scales its gradient, so hidden states are differentiated first and weighted
    after. A head's gradient adds rows up: where it trains and weights need the alphas of all
    depths, a sweep of its own, without a gradient, makes these first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        objective: Objective,
        steps: Sequence[DraftStep],
        taught: _Taught,
        progress: float,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        last, head, following = taught
        count, wide = len(steps), torch.promote_types(inputs[0].dtype, torch.float32)
        hidden, learned = inputs[:count], inputs[count:]
        needed = [torch.empty_like(h) if h.requires_grad else None for h in hidden]
        into = {
            id(w): torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in learned
        }
        # Per row: divergence, agreement, alpha.
        rows = [torch.zeros(3, len(h), dtype=wide, device=h.device) for h in hidden]
        alphas = [r[2] for r in rows]
        sweep = Sweep(steps, last, head, wide, objective.rows(head), following)
        late = isinstance(objective.weights, RowWeights)
        # What autocast would do to products, the sweep does.
        with torch.autocast(last.device.type, enabled=False):
            if late and learned:
                for piece in sweep:
                    alphas[piece.step][piece.rows] = piece.student.alpha
            weights = [] if late and not learned else objective.weigh(steps, alphas, progress)
            for i, part, states, student, teacher in sweep:
                own, agreed = steps[i].head, student.best == teacher.best
                behind = own.slope(student.logits)
                value, slope = objective.divergence(student, teacher)
                rows[i][:, part] = torch.stack([value, agreed.to(wide), student.alpha])
                if behind is not None:
                    slope *= behind
                slope = slope.to(states.dtype)
                if (gradient := needed[i]) is not None:
                    gradient[part] = slope @ sweep.weight(own)
                if learned:
                    _add_to_head(into, own, slope, states, weights[i][part, None])
            weights = weights or objective.weigh(steps, alphas, progress)
        for gradient, weight in zip(needed, weights, strict=True):
            if gradient is not None:
                gradient.mul_(weight[:, None])
        ctx.gradients = [*needed, *(into[id(w)].to(w.dtype) for w in learned)]
        sums = torch.stack([r.sum(1) for r in rows])  # (K, 3)
        ctx.mark_non_differentiable(sums, *weights)
        # Products and sums: autocast would round a matrix product to bfloat16.
        total = torch.stack([(w * r[0]).sum() for w, r in zip(weights, rows, strict=True)]).sum()
        return total, sums, *weights

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        del unused
        # In place, and once: a head's gradient may be as large as everything else.
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [None if g is None else g.mul_(grad_total.to(g.dtype)) for g in gradients]
        return None, None, None, None, *scaled


def _add_to_head(
    into: Mapping[int, Tensor], head: Head, slope: Tensor, hidden: Tensor, weight: Tensor
) -> None:
    """Add a chunk's share to what trains of a head: (M, V') slopes, (M, D) states, (M, 1) weights."""
    if (total := into.get(id(head.weight))) is not None:
        hidden = (hidden * weight).to(slope.dtype)  # the narrower side
        if total.dtype == slope.dtype:
            total.addmm_(slope.mT, hidden)
        else:
            total.add_(slope.mT @ hidden)
    if head.bias is not None and (total := into.get(id(head.bias))) is not None:
        total.add_((slope.to(total.dtype) * weight).sum(0))
