"""Loss = divergence x weights, for every drafter; `reference` is an equivalent plain implementation.

Logits exist only in chunks: the target logits of some positions are computed once. Every depth that predicts
their tokens is scored against them and differentiated down to its hidden states and head. Memory holds only a
few (rows, V) blocks, and a chunk that fits the cache is also the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.errors import UserError
from decode.model.head import Head
from distill.losses.chunked_logits import Buffers, RowScorer, Sweep, columns
from distill.losses.divergences import Divergence
from distill.losses.logits_rows import logits_rows
from distill.losses.row_plan import RowPlan
from distill.losses.row_scores import CompiledRows, EagerRows, Kernels
from distill.losses.weights import RowWeights, Weights
from drafters.base import Drafter, DraftStep


class Scored(NamedTuple):
    """Sums over one depth's rows, for logging; divide by `rows` after reducing over ranks.

    Sums are scalar tensors, so that a step does not wait for them.
    """

    depth: int
    rows: int
    divergence: Tensor
    agreed: Tensor  # rows where draft and target have the same top-1 token
    alpha: Tensor  # sum of min(p, q): acceptance probability of a token drawn from q
    survival: Tensor  # probability that this depth and all before it are accepted
    confidence_loss: Tensor  # cross-entropy of the confidence head's alphas with the true ones


@dataclass(frozen=True)
class Objective:
    """Sum over supervised (anchor, depth) of weight x divergence, plus auxiliary losses.

    Args:
        divergence: value and gradient per row.
        weights: weights of the rows.
        chunk: target rows with logits at one time; 0: by the device and the vocabulary.
        kernels: compiled passes over the logits; None: torch's own operations.
    """

    divergence: Divergence
    weights: Weights
    chunk: int = 0
    kernels: Kernels | None = None

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
        """Return the loss, summed (not averaged) over rows, and values to log.

        Args:
            steps: steps of `Drafter.unroll`, depths and anchors ascending.
            last: (B, T, D) input of the target's head; depth j at anchor a is compared with
                `head(last[a + j])`.
            head: head of the target, which is frozen.
            aux_weights: name -> weight of auxiliary losses.
            progress: finished share of the training steps, for weights that warm up.
            tokens: (B, T) the text, for divergences and weights that read it (`nll`).
            confidence: head from hidden states to logits of alpha, trained on the true alphas.
        """
        steps = list(steps)
        if not steps:
            return last.new_zeros((), dtype=torch.promote_types(last.dtype, torch.float32)), []
        trainable = {id(w): w for step in steps for w in _parts(step.head) if w.requires_grad}
        inputs = [step.hidden for step in steps] + list(trainable.values())
        next_tokens = None if tokens is None else tokens.roll(-1, 1).flatten()  # (B * T,)
        targets = _Targets(last.flatten(0, 1), head, next_tokens)
        plan = RowPlan(steps, self.rows(head), last.device)
        total, *per_step = _Chunked.apply(self, steps, plan, targets, progress, *inputs)
        weights, rows = per_step[: len(steps)], per_step[len(steps) :]
        for step, weight in zip(steps, weights, strict=True):
            for name, values in step.aux.items():
                total = total + aux_weights[name] * (weight * values.to(total.dtype)).sum()
        confidence_loss = [values.new_zeros(()) for values in rows]
        if confidence is not None:
            for i in plan.drafts:
                entropy = _cross_entropy(confidence(steps[i].hidden), rows[i][2])  # (M,)
                total = total + (weights[i] * entropy).sum()
                confidence_loss[i] = entropy.detach().sum()
        return total, _scored(steps, plan, rows, confidence_loss)

    def check(self, drafter: Drafter) -> None:
        """Reject acceptance weights for a depth-invariant drafter, which has rows of depth 1 only.

        Raises:
            UserError: the drafter is depth-invariant, and weights need several depths.
        """
        if drafter.traits.depth_invariant and isinstance(self.weights, RowWeights):
            raise UserError(
                "weights: this drafter trains rows of depth 1 only, so there are no earlier depths to weigh "
                "by; set weights=constant"
            )

    def rows(self, head: Head) -> int:
        """Number of target rows in a chunk."""
        return self.chunk or logits_rows(head)

    def weigh(
        self, steps: Sequence[DraftStep], plan: RowPlan, chances: Sequence[Tensor], progress: float
    ) -> list[Tensor]:
        """(M,) weights of every step's rows; `chances` are acceptance probabilities, (M,) per step.

        Depth 0 is no draft and has weight 1. A `training_only` step has the weights of its depth. Weights are
        multiplied by `step.weight`.
        """
        drafts, ones = plan.drafts, [torch.ones_like(a) for a in chances]
        drafted = [steps[i] for i in drafts], plan, [chances[i] for i in drafts], progress
        counts = [ones[i] * steps[i].weight for i in drafts]
        weights = dict(zip(drafts, self._draft_weights(*drafted, counts), strict=True))
        of_depth = dict[int, Tensor]()
        if any(step.training_only for step in steps):
            plain = self._draft_weights(*drafted, [ones[i] for i in drafts])
            of_depth = {steps[i].depth: weight for i, weight in zip(drafts, plain, strict=True)}
        return [
            weights[i] if i in weights else ones[i] * step.weight * of_depth.get(step.depth, 1.0)
            for i, step in enumerate(steps)
        ]

    def _draft_weights(
        self,
        steps: Sequence[DraftStep],
        plan: RowPlan,
        chances: Sequence[Tensor],
        progress: float,
        counts: Sequence[Tensor],
    ) -> list[Tensor]:
        """(M,) weights per drafted step; `counts` (M,) are the counts of its rows."""
        if not isinstance(self.weights, RowWeights):
            return [count * self.weights(step.depth) for step, count in zip(steps, counts, strict=True)]
        if not steps:
            return []
        chance, present = plan.table(chances)
        return plan.columns(self.weights(chance, present, progress, plan.table(counts)[0]))

    @property
    def by_token(self) -> bool:
        """Whether weights use the probability of the text's next token instead of alpha."""
        return isinstance(self.weights, RowWeights) and self.weights.acceptance == "token"


class _Targets(NamedTuple):
    """Training targets of the steps: the target's rows and, if given, the text."""

    last: Tensor  # (B * T, D)
    head: Head
    next_tokens: Tensor | None  # (B * T,) the token after each position


def _parts(head: Head) -> list[Tensor]:
    """Trainable tensors of a head."""
    return [w for w in (head.weight, head.bias, head.side and head.side.weight) if w is not None]


def _cross_entropy(logits: Tensor, chance: Tensor) -> Tensor:
    """(M,) binary cross-entropy with probabilities as labels; rounding may put them above 1."""
    labels = chance.clamp(0, 1)
    return F.binary_cross_entropy_with_logits(logits.to(labels.dtype), labels, reduction="none")


def _scored(
    steps: Sequence[DraftStep],
    plan: RowPlan,
    rows: Sequence[Tensor],
    confidence_loss: Sequence[Tensor],
) -> list[Scored]:
    """Values to log, of the drafted steps and depth 0."""
    survival = dict.fromkeys(range(len(steps)), rows[0].new_zeros(()))
    if plan.drafts:
        chance, _ = plan.table([rows[i][3] for i in plan.drafts])
        survival |= dict(zip(plan.drafts, chance.cumprod(1).sum(0).unbind(), strict=True))
    scored = []
    for i, step in enumerate(steps):
        if not step.training_only:
            divergence, agreed, alpha = rows[i][:3].sum(1).unbind()
            sums = divergence, agreed, alpha, survival[i], confidence_loss[i]
            scored.append(Scored(step.depth, len(step.anchor), *sums))
    return scored


class _Chunked(torch.autograd.Function):
    """Weighted sum of divergences; gradients are computed in the forward pass, chunk by chunk.

    A row's weight only scales its gradient, so gradients of hidden states are weighted at the end. A head's
    gradient sums over rows, so it needs the weights first: if they depend on alphas of all depths, a sweep
    without gradients computes those.
    """

    @staticmethod
    def forward(
        ctx: Any,
        objective: Objective,
        steps: Sequence[DraftStep],
        plan: RowPlan,
        targets: _Targets,
        progress: float,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        hidden, trainable = inputs[: len(steps)], inputs[len(steps) :]
        by = partial(_differentiate, objective, steps, plan, targets, progress, hidden, trainable)
        kernels, eager = objective.kernels, partial(by, EagerRows)
        if kernels and kernels.take(objective.divergence):
            compiled = partial(by, partial(CompiledRows, kernels))
            hidden_grads, head_grads, weights, rows = kernels.attempt(compiled, eager)
        else:
            hidden_grads, head_grads, weights, rows = eager()
        ctx.gradients = [*hidden_grads, *(head_grads[id(w)].to(w.dtype) for w in trainable)]
        ctx.mark_non_differentiable(*weights, *rows)
        # Autocast would round a dot product to bfloat16.
        total = torch.stack([(w * r[0]).sum() for w, r in zip(weights, rows, strict=True)]).sum()
        return total, *weights, *rows

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        del unused
        # Scaled in place and released, since a head's gradient is large.
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [None if g is None else g.mul_(grad_total.to(g.dtype)) for g in gradients]
        return None, None, None, None, None, *scaled


class _Gradients(NamedTuple):
    """Gradients of the weighted sum, with weights and values, by step."""

    hidden: list[Tensor | None]  # (M, D + r), r: input width of `head.side`
    heads: dict[int, Tensor]  # by id of the weight
    weights: list[Tensor]  # (M,)
    rows: list[Tensor]  # (4, M), `Scores.values`


def _differentiate(
    objective: Objective,
    steps: Sequence[DraftStep],
    plan: RowPlan,
    targets: _Targets,
    progress: float,
    hidden: Sequence[Tensor],
    trainable: Sequence[Tensor],
    make_scorer: Callable[[Divergence, bool, torch.dtype, Buffers], RowScorer],
) -> _Gradients:
    """Forward and backward over all chunks."""
    last, head, next_tokens = targets
    wide = torch.promote_types(hidden[0].dtype, torch.float32)  # dtype of the distributions
    hidden_grads = [torch.empty_like(h) if h.requires_grad else None for h in hidden]
    head_grads = {
        id(w): torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in trainable
    }
    # (4, M) divergence, agreed, alpha, chance
    rows = [torch.zeros(4, len(h), dtype=wide, device=h.device) for h in hidden]
    chances = [r[3] for r in rows]
    buffers = Buffers(plan.size)
    scorer = make_scorer(objective.divergence, objective.by_token, wide, buffers)
    sweep = Sweep(steps, plan, last, head, buffers, scorer, next_tokens)
    weights_need_alphas = isinstance(objective.weights, RowWeights)
    # The sweep casts the operands of matrix products itself.
    with torch.autocast(last.device.type, enabled=False):
        if weights_need_alphas and trainable:
            for i, part, _, chance in sweep.pieces(scorer.chances):
                chances[i][part] = chance
        late = weights_need_alphas and not trainable  # weights come after the gradients
        weights = [] if late else objective.weigh(steps, plan, chances, progress)
        for i, part, states, scores in sweep.pieces(scorer.draft):
            draft_head = steps[i].head
            rows[i][:, part] = scores.values
            if (gradient := hidden_grads[i]) is not None:
                sweep.back(draft_head, scores.slope, gradient[part])
            if trainable:
                _add_to_head(head_grads, draft_head, scores.slope, states, weights[i][part, None])
        weights = weights or objective.weigh(steps, plan, chances, progress)
    for gradient, weight in zip(hidden_grads, weights, strict=True):
        if gradient is not None:
            gradient.mul_(weight[:, None])
    return _Gradients(hidden_grads, head_grads, weights, rows)


def _add_to_head(
    head_grads: Mapping[int, Tensor], head: Head, slope: Tensor, hidden: Tensor, weight: Tensor
) -> None:
    """Accumulate a chunk's head gradients from (M, V') slopes, (M, D + r) states and (M, 1) weights."""
    states, low = head.parts(hidden)
    _add_product(head_grads.get(id(head.weight)), slope, states, weight)
    if head.side is not None and (total := head_grads.get(id(head.side.weight))) is not None:
        _add_product(total, columns(slope, head.side.ids), low, weight)
    if head.bias is not None and (total := head_grads.get(id(head.bias))) is not None:
        total.add_((slope.to(total.dtype) * weight).sum(0))


def _add_product(total: Tensor | None, slope: Tensor, states: Tensor, weight: Tensor) -> None:
    if total is None:
        return
    states = (states * weight).to(slope.dtype)  # scales the smaller factor
    if total.dtype == slope.dtype:
        total.addmm_(slope.mT, states)
    else:
        total.add_(slope.mT @ states)
