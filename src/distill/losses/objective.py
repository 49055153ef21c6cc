"""Loss = divergence x step weights, for every drafter.

Logits exist only in chunks: the target's rows of a few positions are made once, every depth that
answers them is scored against them and differentiated down to its hidden states and its head, and
all of it is dropped before the next few. Memory never holds more than a few (rows, V) blocks, and
a chunk that fits the cache is also the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.errors import UserError
from decode.model.head import Head
from distill.losses.chunked_logits import Student, Sweep, Teacher, columns
from distill.losses.divergences import Divergence
from distill.losses.weights import RowWeights, Weights
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
    kept: float  # the chance that this depth and all before it are, by what the weights call one
    unsure: float  # of the confidence head: cross-entropy of its alphas with the true ones


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
        confidence: Callable[[Tensor], Tensor] | None = None,
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
            confidence: hidden states -> logits of what their alphas will be, to be taught that.
        """
        taken = list(steps)
        if not taken:
            return last.new_zeros((), dtype=torch.promote_types(last.dtype, torch.float32)), []
        learned = {id(w): w for step in taken for w in _parts(step.head) if w.requires_grad}
        inputs = [step.hidden for step in taken] + list(learned.values())
        following = None if tokens is None else tokens.roll(-1, 1).flatten()  # (B * T,)
        taught = _Taught(last.flatten(0, 1), head, following)
        total, *found = _Chunked.apply(self, taken, taught, progress, *inputs)
        weights, rows = found[: len(taken)], found[len(taken) :]
        for step, weight in zip(taken, weights, strict=True):
            for name, values in step.aux.items():
                total = total + aux_weights[name] * (weight * values.to(total.dtype)).sum()
        unsure = [own.new_zeros(()) for own in rows]
        if confidence is not None:
            for i in _drafts(taken):
                entropy = _cross_entropy(confidence(taken[i].hidden), rows[i][2])  # (M,)
                total = total + (weights[i] * entropy).sum()
                unsure[i] = entropy.detach().sum()
        return total, _scored(taken, rows, unsure)

    def check(self, drafter: Drafter) -> None:
        """Refuse weights that mean nothing for a drafter.

        All rows of a shifted one are depth 1, so weights by depth are 1. An anchor then has one
        alpha, and no streak.

        Raises:
            UserError: a shifted drafter, and weights from the alphas of several depths.
        """
        if drafter.depth_invariant and isinstance(self.weights, RowWeights):
            raise UserError(
                "weights: this drafter's depths are one and the same row shifted, so there is no streak to "
                "weigh; set weights=constant"
            )

    def rows(self, head: Head) -> int:
        """Teacher rows of a chunk."""
        budget = CHUNK_BYTES.get(head.weight.device.type, CHUNK_BYTES["cuda"])
        return self.chunk or max(LEAST_ROWS, budget // (4 * head.weight.shape[0]))

    def weigh(self, steps: Sequence[DraftStep], chances: Sequence[Tensor], progress: float) -> list[Tensor]:
        """(M,) weights of every step's rows, from their chances where the weights read them.

        Depth 0 is no draft: nothing is in the way of it, and nothing depends on it.
        """
        drafts = _drafts(steps)
        own = self._by_draft([steps[i] for i in drafts], [chances[i] for i in drafts], progress)
        of_depth = {steps[i].depth: weight for i, weight in zip(drafts, own, strict=True)}
        return [
            torch.ones_like(a) * step.weight * of_depth.get(step.depth, 1.0)
            for step, a in zip(steps, chances, strict=True)
        ]

    def _by_draft(
        self, steps: Sequence[DraftStep], chances: Sequence[Tensor], progress: float
    ) -> list[Tensor]:
        """What the objective's weights give the rows of drafts."""
        if not isinstance(self.weights, RowWeights):
            return [torch.full_like(a, self.weights(s.depth)) for s, a in zip(steps, chances, strict=True)]
        if not steps:
            return []
        places, chance, present = _table(steps, chances)
        weights = self.weights(chance, present, progress)
        return [weights[place, k] for k, place in enumerate(places)]

    @property
    def by_token(self) -> bool:
        """Whether weights read the chance of the text's own token, and not alpha."""
        return isinstance(self.weights, RowWeights) and self.weights.acceptance == "token"


class _Taught(NamedTuple):
    """What the steps are taught: the target's rows and, where it is known, the text."""

    last: Tensor  # (B * T, D)
    head: Head
    following: Tensor | None  # (B * T,) the token after each position


def _parts(head: Head) -> list[Tensor]:
    """Whatever of a head may train."""
    return [w for w in (head.weight, head.bias, head.side and head.side.weight) if w is not None]


def _drafts(steps: Sequence[DraftStep]) -> list[int]:
    """Which of the steps are drafted from."""
    return [i for i, step in enumerate(steps) if step.depth and not step.training_only]


def _table(steps: Sequence[DraftStep], chances: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
    """By anchor: where in the table each step's rows are, (A, K) chances, (A, K) whether there is one."""
    anchors = torch.cat([step.anchor for step in steps]).unique()
    chance = chances[0].new_zeros(len(anchors), len(steps))  # (A, K)
    present = torch.zeros_like(chance, dtype=torch.bool)
    places = [torch.searchsorted(anchors, step.anchor) for step in steps]
    for k, (place, own) in enumerate(zip(places, chances, strict=True)):
        chance[place, k], present[place, k] = own, True
    return places, chance, present


def _cross_entropy(logits: Tensor, chance: Tensor) -> Tensor:
    """(M,) binary, with chances as labels; a chance may be more than 1 by a rounding."""
    labels = chance.clamp(0, 1)
    return F.binary_cross_entropy_with_logits(logits.to(labels.dtype), labels, reduction="none")


def _scored(steps: Sequence[DraftStep], rows: Sequence[Tensor], unsure: Sequence[Tensor]) -> list[Scored]:
    """What to log of the steps that are drafted from, and of depth 0."""
    drafts = _drafts(steps)
    kept = dict.fromkeys(range(len(steps)), torch.zeros(()))
    if drafts:
        _, chance, _ = _table([steps[i] for i in drafts], [rows[i][3] for i in drafts])
        kept |= dict(zip(drafts, chance.cumprod(1).sum(0), strict=True))
    shown = [i for i, step in enumerate(steps) if not step.training_only]
    sums = torch.stack(
        [torch.cat([rows[i][:3].sum(1), torch.stack([kept[i].to(rows[i]), unsure[i]])]) for i in shown]
    ).tolist()
    return [Scored(steps[i].depth, len(steps[i].anchor), *row) for i, row in zip(shown, sums, strict=True)]


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
        # Per row: divergence, agreement, alpha, and the chance that weights read.
        rows = [torch.zeros(4, len(h), dtype=wide, device=h.device) for h in hidden]
        chances = [r[3] for r in rows]
        sweep = Sweep(steps, last, head, wide, objective.rows(head), following)
        late = isinstance(objective.weights, RowWeights)
        # What autocast would do to products, the sweep does.
        with torch.autocast(last.device.type, enabled=False):
            if late and learned:
                for piece in sweep:
                    chances[piece.step][piece.rows] = _chance(objective, piece.student, piece.teacher)
            weights = [] if late and not learned else objective.weigh(steps, chances, progress)
            for i, part, states, student, teacher in sweep:
                own, agreed = steps[i].head, student.best == teacher.best
                behind, chance = own.slope(student.logits), _chance(objective, student, teacher)
                value, slope = objective.divergence(student, teacher)
                rows[i][:, part] = torch.stack([value, agreed.to(wide), student.alpha, chance])
                if behind is not None:
                    slope *= behind
                slope = slope.to(states.dtype)
                if (gradient := needed[i]) is not None:
                    sweep.back(own, slope, gradient[part])
                if learned:
                    _add_to_head(into, own, slope, states, weights[i][part, None])
            weights = weights or objective.weigh(steps, chances, progress)
        for gradient, weight in zip(needed, weights, strict=True):
            if gradient is not None:
                gradient.mul_(weight[:, None])
        ctx.gradients = [*needed, *(into[id(w)].to(w.dtype) for w in learned)]
        ctx.mark_non_differentiable(*weights, *rows)
        # Products and sums: autocast would round a matrix product to bfloat16.
        total = torch.stack([(w * r[0]).sum() for w, r in zip(weights, rows, strict=True)]).sum()
        return total, *weights, *rows

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        del unused
        # In place, and once: a head's gradient may be as large as everything else.
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [None if g is None else g.mul_(grad_total.to(g.dtype)) for g in gradients]
        return None, None, None, None, *scaled


def _chance(objective: Objective, student: Student, teacher: Teacher) -> Tensor:
    """(M,) what the objective's weights take for the chance that a row is accepted."""
    if not objective.by_token:
        return student.alpha
    at = teacher.written[:, None]
    return student.q.gather(1, at.clamp_min(0))[:, 0] * (at[:, 0] >= 0)


def _add_to_head(
    into: Mapping[int, Tensor], head: Head, slope: Tensor, hidden: Tensor, weight: Tensor
) -> None:
    """Add a chunk's share to what trains of a head: (M, V') slopes, (M, D + r) states, (M, 1) weights."""
    states, low = head.parts(hidden)
    _add_product(into.get(id(head.weight)), slope, states, weight)
    if head.side is not None and (total := into.get(id(head.side.weight))) is not None:
        _add_product(total, columns(slope, head.side.ids), low, weight)
    if head.bias is not None and (total := into.get(id(head.bias))) is not None:
        total.add_((slope.to(total.dtype) * weight).sum(0))


def _add_product(total: Tensor | None, slope: Tensor, states: Tensor, weight: Tensor) -> None:
    if total is None:
        return
    states = (states * weight).to(slope.dtype)  # the narrower side
    if total.dtype == slope.dtype:
        total.addmm_(slope.mT, states)
    else:
        total.add_(slope.mT @ states)
