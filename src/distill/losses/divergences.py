"""Divergences between target and draft distribution: values, and gradients with respect to the logits.

p is the target's distribution, q the draft's; alpha = sum min(p, q) is the probability that a token drawn
from q is accepted. Sums run over the draft vocabulary. If that is smaller than the target's, p is restricted
to it and not renormalised: its sum, `mass`, is below 1. Target tokens outside it are misses: the draft can
neither propose nor learn them. For logits z and g = dL/dq, dL/dz = q (g - sum q g).

Gradients are closed formulas, since passes over the large (M, V') blocks are expensive. A divergence
overwrites the blocks of the student.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode.errors import UserError
from distill.losses.chunked_logits import MIN_LOG_PROB, Student, Teacher

# Returns (M,) values in nats and (M, V') gradients with respect to the draft's logits.
Divergence = Callable[[Student, Teacher], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class by_autograd:  # noqa: N801  a decorator
    """A divergence from a function of its values; autograd computes the gradients.

    Args:
        values: `(log_q, teacher, its options) -> (M,)`, with log_q (M, V') the draft's log probabilities, at
            least `MIN_LOG_PROB`.
    """

    values: Callable[..., Tensor]

    def __call__(self, student: Student, teacher: Teacher, **options: Any) -> tuple[Tensor, Tensor]:
        """See `Divergence`.

        Raises:
            UserError: the function gives no value per row, or none that depends on log_q.
        """
        with torch.enable_grad():
            logits = student.logits.detach().requires_grad_()
            values = self.values(logits.log_softmax(-1).clamp_min(MIN_LOG_PROB), teacher, **options)
            if values.shape != logits.shape[:1] or not values.requires_grad:
                name = getattr(self.values, "__name__", "objective")
                raise UserError(
                    f"objective {name}: must return a value per row, ({len(logits)},), computed from log_q"
                )
            (slope,) = torch.autograd.grad(values.sum(), logits)
        return values.detach(), slope


def kl(student: Student, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum p log(p / q); gradient mass q - p.

    Misses are omitted: their term is infinite for every draft.
    """
    value = teacher.negentropy + teacher.mass * student.log_z
    value -= student.logits.mul_(teacher.p).sum(-1)
    q = student.q if teacher.full_vocabulary else student.q.mul_(teacher.mass[:, None])
    return value, q.sub_(teacher.p)


def ce(student: Student, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """Cross-entropy to the target's most likely token; gradient q - onehot. A miss is 0."""
    return _cross_entropy(teacher.top1, student, teacher)


def nll(student: Student, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """Cross-entropy to the next token of the text; a miss is 0.

    Sequence-level distillation (SeqKD, arXiv:1606.07947) if the target wrote the text.
    """
    return _cross_entropy(teacher.text_ids, student, teacher)


def hit(student: Student, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """1 - q(x) of the next token x of the text; gradient q(x) (q - onehot). A miss is 1.

    For texts by the target: the probability that the match rule rejects a token drawn from q.
    """
    at, in_vocab = teacher.text_ids.clamp_min(0)[:, None], (teacher.text_ids >= 0).to(student.q.dtype)
    mass = student.q.gather(1, at)[:, 0] * in_vocab  # (M,)
    return 1 - mass, student.q.mul_(mass[:, None]).scatter_add_(1, at, -mass[:, None])


def _cross_entropy(labels: Tensor, student: Student, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """Cross-entropy to (M,) labels in draft ids; rows with a miss (-1) are 0."""
    at, in_vocab = labels.clamp_min(0)[:, None], (labels >= 0).to(student.q.dtype)
    value = (student.log_z - student.logits.gather(1, at)[:, 0]) * in_vocab
    q = student.q if teacher.full_vocabulary else student.q.mul_(in_vocab[:, None])
    return value, q.scatter_add_(1, at, -in_vocab[:, None])  # q - onehot


@dataclass(frozen=True)
class TopK:
    """- sum p log q over the target's `k` most likely tokens; gradient q sum p - p on them.

    HASS's harmonised objective (arXiv:2408.15766, equation 4). Misses among the k add nothing.
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UserError(f"objective.k={self.k}: must be at least 1")

    def __call__(self, student: Student, teacher: Teacher) -> tuple[Tensor, Tensor]:
        """See `Divergence`."""
        p, ids = teacher.top(self.k)  # (M, k)
        p, at = p * (ids >= 0), ids.clamp_min(0)
        value = (p * (student.log_z[:, None] - student.logits.gather(1, at))).sum(-1)
        return value, student.q.mul_(p.sum(-1, keepdim=True)).scatter_add_(1, at, -p)


@dataclass(frozen=True)
class ReverseKL:
    """KL(q || p) = sum q log(q / p); gradient q (log(q / p) - KL). Exact in a reduced vocabulary.

    Infinite where p is 0, as at masked tokens, so p is clamped to at least `floor`.
    """

    floor: float

    def __post_init__(self) -> None:
        if not 0 < self.floor < 1:
            raise UserError(f"objective.floor={self.floor}: a probability between 0 and 1")

    def __call__(self, student: Student, teacher: Teacher) -> tuple[Tensor, Tensor]:
        """See `Divergence`."""
        gap = student.logits.sub_(student.log_z[:, None])  # log q
        gap -= teacher.log_p.clamp_min(math.log(self.floor))
        value = (student.q * gap).sum(-1)
        return value, student.q.mul_(gap.sub_(value[:, None]))


@dataclass(frozen=True)
class JSD:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q.

    Generalised Jensen-Shannon divergence (GKD, arXiv:2306.13649; DistillSpec, arXiv:2310.08461); gradient q
    (G - sum q G), G = (1 - beta) log(q / m). A miss costs beta log(1 / beta) p, as in the whole vocabulary,
    where its q is 0.
    """

    beta: float

    def __post_init__(self) -> None:
        if not 0 < self.beta < 1:
            raise UserError(f"objective.beta={self.beta}: between 0 and 1; its ends are kl and reverse_kl")

    def __call__(self, student: Student, teacher: Teacher) -> tuple[Tensor, Tensor]:
        """See `Divergence`."""
        q, beta = student.q, self.beta
        log_m = torch.lerp(q, teacher.p, beta).clamp_min_(torch.finfo(q.dtype).tiny).log_()
        value = beta * (teacher.p * (teacher.log_p - log_m)).sum(-1)
        gap = student.logits.sub_(student.log_z[:, None]).sub_(log_m)
        from_q = (q * gap).sum(-1)
        value += (1 - beta) * from_q - beta * math.log(beta) * (1 - teacher.mass)
        return value, q.mul_(gap.sub_(from_q[:, None])).mul_(1 - beta)


def tv(student: Student, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """Total variation, 1 - alpha, misses included; gradient -q (1[q < p] - sum q 1[q < p]).

    The rejection probability of the token rule. Nearly flat while q is far from p, since its gradient has a
    factor q.
    """
    below, mass = _below(student, teacher, student.logits)
    return 1 - student.alpha, student.q.mul_(mass).sub_(below)


@dataclass(frozen=True)
class NLLTV:
    """`nll` x cross-entropy to the text's token + `tv` x total variation.

    DSpark's loss (arXiv:2607.05147) uses the L1 norm, which is twice the total variation.
    """

    nll: float
    tv: float

    def __post_init__(self) -> None:
        if self.nll < 0 or self.tv < 0 or not self.nll + self.tv:
            raise UserError(f"objective: nll={self.nll}, tv={self.tv}; both must be >= 0, and one above 0")

    def __call__(self, student: Student, teacher: Teacher) -> tuple[Tensor, Tensor]:
        """See `Divergence`."""
        at, in_vocab = teacher.text_ids.clamp_min(0)[:, None], (teacher.text_ids >= 0).to(student.q.dtype)
        value = self.nll * (student.log_z - student.logits.gather(1, at)[:, 0]) * in_vocab
        value += self.tv * (1 - student.alpha)
        below, mass = _below(student, teacher, student.logits)
        slope = student.q.mul_(self.nll * in_vocab[:, None] + self.tv * mass).sub_(below.mul_(self.tv))
        return value, slope.scatter_add_(1, at, -self.nll * in_vocab[:, None])


def lk(student: Student, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """- log alpha, the negative log-likelihood of acceptance; gradient: `tv`'s divided by alpha.

    Computed in logarithms, so that value and gradient do not underflow where q and p hardly overlap. For a
    one-hot p, it is the cross-entropy.
    """
    log_q, log_p = student.logits.sub_(student.log_z[:, None]), teacher.log_p
    below = torch.lt(log_q, log_p, out=torch.empty_like(log_q))
    least = torch.minimum(log_q, log_p, out=log_q)
    value = -least.logsumexp(-1)
    below *= least.add_(value[:, None]).exp_()  # share of each token in alpha, where q < p
    return value, student.q.mul_(below.sum(-1, keepdim=True)).sub_(below)


@dataclass(frozen=True)
class LKHybrid:
    """w KL(p || q) + (1 - w) (1 - alpha) with w = exp(-decay alpha), held constant.

    KL dominates while alpha is small, total variation when it is large. As in vLLM's speculators
    (`lk_hybrid`, decay 3).
    """

    decay: float

    def __post_init__(self) -> None:
        if self.decay < 0:
            raise UserError(f"objective.decay={self.decay}: must be at least 0")

    def weight(self, student: Student) -> Tensor:
        """(M,) w."""
        return (-self.decay * student.alpha).exp()

    def __call__(self, student: Student, teacher: Teacher) -> tuple[Tensor, Tensor]:
        """See `Divergence`."""
        w = self.weight(student)
        below, mass = _below(student, teacher, torch.empty_like(student.q))
        near = below.sub_(student.q * mass).mul_((w - 1)[:, None])
        value, slope = kl(student, teacher)
        return w * value + (1 - w) * (1 - student.alpha), slope.mul_(w[:, None]).add_(near)


def _below(student: Student, teacher: Teacher, out: Tensor) -> tuple[Tensor, Tensor]:
    """(M, V') q where it is below p, else 0; and its sum (M, 1)."""
    # Compared in floating point: a bool mask and a `where` are several times slower.
    below = torch.lt(student.q, teacher.p, out=out).mul_(student.q)
    return below, below.sum(-1, keepdim=True)
