"""Loss = sum of factor x weights x divergence, for every drafter; `reference` is the same, written plainly.

Logits exist only in chunks: the target logits of some positions are computed once. Every depth that predicts
their tokens is scored against them and differentiated down to its hidden states and head. Memory holds only a
few (rows, V) blocks, and a chunk that fits the cache is also the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.errors import UserError
from decode.model.head import Head
from distill.losses.chunked_logits import (
    AGREED,
    ALPHA,
    CHANCE,
    DIVERGENCES,
    Buffers,
    RowScorer,
    Sweep,
    columns,
)
from distill.losses.divergences import Divergence
from distill.losses.logits_rows import logits_rows
from distill.losses.mix import Mix, Term, terms_of
from distill.losses.row_plan import RowPlan
from distill.losses.row_scores import CompiledRows, EagerRows, Kernels
from distill.losses.weights import RowWeights, Weights, weigh
from drafters.base import Drafter, DraftStep

# Row of `Scores.values` that weights read, by their `acceptance`.
ACCEPTANCE = {"overlap": ALPHA, "token": CHANCE, "greedy": AGREED}


class Scored(NamedTuple):
    """Sums over one depth's rows, for logging; divide by `rows` after reducing over ranks.

    Sums are scalar tensors, so that a step does not wait for them.
    """

    depth: int
    rows: int
    divergence: Tensor  # of all terms, with their factors
    agreed: Tensor  # rows where draft and target have the same top-1 token
    alpha: Tensor  # sum of min(p, q): acceptance probability of a token drawn from q
    survival: Tensor  # probability that this depth and all before it are accepted
    confidence_loss: Tensor  # cross-entropy of the confidence head's alphas with the true ones
    divergences: Tensor  # (T,) of each term, without factor
    losses: Tensor  # (T,) of each term, with factor and weights; rows of `training_only` steps included


@dataclass(frozen=True)
class Objective:
    """Sum over terms and supervised (anchor, depth) of factor x weight x divergence, plus auxiliary losses.

    Args:
        divergence: value and gradient per row, or a sum of terms.
        weights: weights of the rows: of auxiliary losses, and of terms that have none of their own.
        chunk: target rows with logits at one time; 0: by the device and the vocabulary.
        kernels: compiled passes over the logits; None: torch's own operations.
    """

    divergence: Divergence | Mix
    weights: Weights
    chunk: int = 0
    kernels: Kernels | None = None

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """Terms of the loss; one without a name if it is no mix."""
        return terms_of(self.divergence, self.weights)

    @cached_property
    def divergences(self) -> list[Divergence]:
        """Different divergences of the terms."""
        return list({id(term.divergence): term.divergence for term in self.terms}.values())

    @cached_property
    def kinds(self) -> list[Weights]:
        """Different weights of the terms, `weights` first."""
        return list(dict.fromkeys([self.weights, *(term.weights for term in self.terms)]))

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
        total, losses, *per_step = _Chunked.apply(self, steps, plan, targets, progress, *inputs)
        weights, rows = per_step[: len(steps)], per_step[len(steps) :]
        for step, weight in zip(steps, weights, strict=True):
            for name, values in step.aux.items():
                total = total + aux_weights[name] * (weight * values.to(total.dtype)).sum()
        confidence_loss = [values.new_zeros(()) for values in rows]
        if confidence is not None:
            for i in plan.drafts:
                entropy = _cross_entropy(confidence(steps[i].hidden), rows[i][ALPHA])  # (M,)
                total = total + (weights[i] * entropy).sum()
                confidence_loss[i] = entropy.detach().sum()
        return total, _scored(self, steps, plan, rows, confidence_loss, losses)

    def check(self, drafter: Drafter) -> None:
        """Reject acceptance weights for a depth-invariant drafter, which has rows of depth 1 only.

        Raises:
            UserError: the drafter is depth-invariant, and weights of a term need several depths.
        """
        for term in self.terms:
            if drafter.traits.depth_invariant and isinstance(term.weights, RowWeights):
                own = term.weights is not self.weights
                where = f"objective.terms.{term.name}.weights" if own else "weights"
                raise UserError(
                    f"{where}: this drafter trains rows of depth 1 only, so there are no earlier depths to "
                    f"weigh by; set {where}=constant"
                )

    def rows(self, head: Head) -> int:
        """Number of target rows in a chunk."""
        return self.chunk or logits_rows(head)

    def weigh(
        self, steps: Sequence[DraftStep], plan: RowPlan, rows: Sequence[Tensor], progress: float
    ) -> list[list[Tensor]]:
        """(M,) weights of every step's rows, by kind of weights; see `weights.weigh`.

        Args:
            steps: steps of the unroll.
            plan: of their rows.
            rows: (3 + T, M) of each step, `Scores.values`, of which the divergences are not read.
            progress: finished share of the training steps.
        """
        found = []
        for weights in self.kinds:
            place = ACCEPTANCE[weights.acceptance] if isinstance(weights, RowWeights) else ALPHA
            found.append(weigh(weights, steps, plan, [values[place] for values in rows], progress))
        return found

    @property
    def scales_rows(self) -> bool:
        """Whether rows of different divergences have different weights, which precede their sum."""
        return len(self.divergences) > 1 and len(self.kinds) > 1

    def row_of(self, term: Term) -> int:
        """Row of a term's divergence in `Scores.values`."""
        return DIVERGENCES + next(i for i, d in enumerate(self.divergences) if d is term.divergence)

    def kind_of(self, term: Term) -> int:
        """Index of a term's weights among `kinds`."""
        return self.kinds.index(term.weights)

    @property
    def by_token(self) -> bool:
        """Whether weights of a term use the probability of the text's next token."""
        return any(isinstance(kind, RowWeights) and kind.acceptance == "token" for kind in self.kinds)


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
    objective: Objective,
    steps: Sequence[DraftStep],
    plan: RowPlan,
    rows: Sequence[Tensor],
    confidence_loss: Sequence[Tensor],
    losses: Tensor,
) -> list[Scored]:
    """Values to log, of the drafted steps and depth 0; `losses` (T, steps) are the terms' of each step."""
    survival = dict.fromkeys(range(len(steps)), rows[0].new_zeros(()))
    if plan.drafts:
        chance, _ = plan.table([rows[i][CHANCE] for i in plan.drafts])
        survival |= dict(zip(plan.drafts, chance.cumprod(1).sum(0).unbind(), strict=True))
    of_depth: dict[int, Tensor] = {}
    for step, loss in zip(steps, losses.unbind(1), strict=True):
        of_depth[step.depth] = of_depth[step.depth] + loss if step.depth in of_depth else loss
    scored = []
    for i, step in enumerate(steps):
        if not step.training_only:
            sums = rows[i].sum(1)
            parts = [sums[objective.row_of(term)] for term in objective.terms]
            scaled = [term.factor * part for term, part in zip(objective.terms, parts, strict=True)]
            divergence = torch.stack(scaled).sum()
            values = divergence, sums[AGREED], sums[ALPHA], survival[i], confidence_loss[i]
            by_term = torch.stack(parts), of_depth[step.depth]  # (T,) each
            scored.append(Scored(step.depth, len(step.anchor), *values, *by_term))
    return scored


class _Chunked(torch.autograd.Function):
    """Weighted sum of divergences; gradients are computed in the forward pass, chunk by chunk.

    The gradients of all divergences are added before the head's backward product, so the number of products
    does not depend on the number of terms. With one divergence, or one kind of weights, a row's weight scales
    the sum, and gradients of hidden states are weighted at the end. Gradients of a head, and divergences with
    different weights, need the weights first: if these depend on alphas of all depths, a sweep without
    gradients computes them.
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
        if kernels and kernels.take(*objective.divergences):
            compiled = partial(by, partial(CompiledRows, kernels))
            found = kernels.attempt(compiled, eager)
        else:
            found = eager()
        ctx.gradients = [*found.hidden, *(found.heads[id(w)].to(w.dtype) for w in trainable)]
        losses = _losses(objective, found.weights, found.rows)  # (T, steps)
        ctx.mark_non_differentiable(losses, *found.weights[0], *found.rows)
        # Autocast would round a dot product to bfloat16.
        return losses.sum(), losses.clone(), *found.weights[0], *found.rows

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
    weights: list[list[Tensor]]  # (M,) by kind of weights
    rows: list[Tensor]  # (3 + T, M), `Scores.values`


def _losses(objective: Objective, weights: Sequence[Sequence[Tensor]], rows: Sequence[Tensor]) -> Tensor:
    """(T, steps) sums over rows of factor x weight x divergence."""
    found = []
    for term in objective.terms:
        place, of_step = objective.row_of(term), zip(weights[objective.kind_of(term)], rows, strict=True)
        found.append(torch.stack([term.factor * (w * r[place]).sum() for w, r in of_step]))
    return torch.stack(found)


def _differentiate(
    objective: Objective,
    steps: Sequence[DraftStep],
    plan: RowPlan,
    targets: _Targets,
    progress: float,
    hidden: Sequence[Tensor],
    trainable: Sequence[Tensor],
    make_scorer: Callable[[Sequence[Divergence], bool, torch.dtype, Buffers], RowScorer],
) -> _Gradients:
    """Forward and backward over all chunks."""
    last, head, next_tokens = targets
    wide = torch.promote_types(hidden[0].dtype, torch.float32)  # dtype of the distributions
    hidden_grads = [torch.empty_like(h) if h.requires_grad else None for h in hidden]
    head_grads = {
        id(w): torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in trainable
    }
    count = DIVERGENCES + len(objective.divergences)
    rows = [torch.zeros(count, len(h), dtype=wide, device=h.device) for h in hidden]
    buffers = Buffers(plan.size)
    scorer = make_scorer(objective.divergences, objective.by_token, wide, buffers)
    sweep = Sweep(steps, plan, last, head, buffers, scorer, next_tokens)
    need_alphas = any(isinstance(kind, RowWeights) for kind in objective.kinds)
    # The sweep casts the operands of matrix products itself.
    with torch.autocast(last.device.type, enabled=False):
        if first := need_alphas and (objective.scales_rows or bool(trainable)):
            for i, part, _, values in sweep.pieces(scorer.chances):
                rows[i][:DIVERGENCES, part] = values
        late = need_alphas and not first  # weights come after the gradients
        weights = [] if late else objective.weigh(steps, plan, rows, progress)
        shares = _shares(objective, weights, rows)
        for i, part, states, scores in sweep.pieces(scorer.draft, shares):
            draft_head = steps[i].head
            rows[i][:, part] = scores.values
            if (gradient := hidden_grads[i]) is not None:
                sweep.back(draft_head, scores.slope, gradient[part])
            if trainable:
                weight = _scale(objective, weights, i)[part, None]
                _add_to_head(head_grads, draft_head, scores.slope, states, weight)
        weights = weights or objective.weigh(steps, plan, rows, progress)
    for i, gradient in enumerate(hidden_grads):
        if gradient is not None:
            gradient.mul_(_scale(objective, weights, i)[:, None])
    return _Gradients(hidden_grads, head_grads, weights, rows)


def _shares(
    objective: Objective, weights: Sequence[Sequence[Tensor]], rows: Sequence[Tensor]
) -> list[Tensor] | None:
    """(T, M) of each step: what multiplies the gradients of T divergences; None: nothing."""
    if len(objective.divergences) == 1:
        return None
    shares = [torch.zeros_like(values[DIVERGENCES:]) for values in rows]
    for term in objective.terms:
        for i, share in enumerate(shares):
            # With one kind of weights, they follow the sum, and may not be known yet.
            weight = weights[objective.kind_of(term)][i] if objective.scales_rows else 1.0
            share[objective.row_of(term) - DIVERGENCES] += term.factor * weight
    return shares


def _scale(objective: Objective, weights: Sequence[Sequence[Tensor]], step: int) -> Tensor:
    """(M,) what multiplies the summed gradient of a step's rows."""
    if objective.scales_rows:
        return torch.ones_like(weights[0][step])
    if len(objective.divergences) > 1:
        return weights[0][step]
    scaled = [term.factor * weights[objective.kind_of(term)][step] for term in objective.terms]
    return torch.stack(scaled).sum(0)


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
