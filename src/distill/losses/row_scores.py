"""Score a chunk's rows with torch's own operations, or in one compiled pass over the logits.

Both use the same `Student`, `Teacher` and divergence, and differ by rounding. Separate operations read and
write a (rows, V) block about twenty times; the compiled pass keeps a row in the cache. `Objective.kernels`
selects one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import config as compiler_config
from torch.nn import functional as F

from decode.model.head import Head
from distill.losses.attempt import Attempt
from distill.losses.chunked_logits import (
    Buffers,
    Scores,
    Student,
    TargetProbs,
    Teacher,
    argmax,
    draft_ids,
)
from distill.losses.divergences import Divergence, TopK, by_autograd
from distill.losses.row_plan import RowIndex

RECOMPILES = 64  # compilations of one function: shapes, dtypes and heads of all runs of a process


class EagerTarget(NamedTuple):
    """The target's rows of a chunk."""

    logits: Tensor  # (R, V)
    p: Tensor  # (R, V)
    log_z: Tensor  # (R,)
    top1: Tensor  # (R,)
    text_ids: Tensor | None  # (R,)
    probs: dict[int, TargetProbs]  # by draft vocabulary

    def over(self, d2t: Tensor | None) -> TargetProbs:
        """Distribution over a draft vocabulary."""
        if id(d2t) not in self.probs:
            chunk = (self.logits, self.p, self.log_z, self.top1)
            self.probs[id(d2t)] = TargetProbs(*chunk, d2t, self.text_ids)
        return self.probs[id(d2t)]


class EagerRows:
    """Scores by torch's own operations, in reused blocks.

    Args:
        divergence: divergence to score.
        by_token: see `Objective.by_token`.
        dtype: dtype of the distributions.
        buffers: reused blocks.
    """

    def __init__(self, divergence: Divergence, by_token: bool, dtype: torch.dtype, buffers: Buffers) -> None:
        self._divergence, self._by_token, self._dtype, self._buffers = divergence, by_token, dtype, buffers

    def target(self, head: Head, block: Tensor, count: int, text_ids: Tensor | None) -> EagerTarget:
        """See `RowScorer`."""
        logits = self._wide("target", head.shape(block[:count]))
        p = torch.softmax(logits, -1, out=self._like("p", logits))
        top1 = argmax(logits)
        return EagerTarget(logits, p, _log_z(logits, p, top1), top1, text_ids, {})

    def draft(self, target: EagerTarget, head: Head, block: Tensor, count: int, place: RowIndex) -> Scores:
        """See `RowScorer`."""
        teacher, product = Teacher(target.over(head.d2t), place), block[:count]
        student = self._student(head, product, teacher)
        values, slope = _score(self._divergence, self._by_token, head, student, teacher)
        return Scores(values, slope if slope.dtype == product.dtype else product.copy_(slope))

    def chances(self, target: EagerTarget, head: Head, block: Tensor, count: int, place: RowIndex) -> Tensor:
        """See `RowScorer`."""
        teacher = Teacher(target.over(head.d2t), place)
        return _chance(self._by_token, self._student(head, block[:count], teacher), teacher)

    def _student(self, head: Head, product: Tensor, teacher: Teacher) -> Student:
        logits = self._wide("draft", head.shape(product))
        q = torch.softmax(logits, -1, out=self._like("q", logits))
        top1 = argmax(logits)
        alpha = torch.minimum(teacher.p, q, out=self._like("min", logits)).sum(-1)
        return Student(logits, q, _log_z(logits, q, top1), top1, alpha)

    def _wide(self, name: str, logits: Tensor) -> Tensor:
        """(M, V) in the dtype of the distributions."""
        if logits.dtype == self._dtype:
            return logits
        return self._buffers.block(f"{name} wide", logits, dtype=self._dtype)[: len(logits)].copy_(logits)

    def _like(self, name: str, logits: Tensor) -> Tensor:
        return self._buffers.block(name, logits)[: len(logits)]


class Kernels:
    """Compiled passes for all steps of a run; cached on disk for later runs.

    Attributes:
        attempt: runs compiled passes, or what is uncompiled where they fail.
    """

    def __init__(self) -> None:
        self.attempt = Attempt("compile_objective")
        self._made: dict[tuple, Callable] = {}
        compiler_config.recompile_limit = max(compiler_config.recompile_limit, RECOMPILES)

    def take(self, divergence: Divergence) -> bool:
        """Whether the compiled passes support a divergence; top-k and autograd stay in torch."""
        function = getattr(divergence, "func", divergence)  # of functools.partial
        return self.attempt.works is not False and not isinstance(function, TopK | by_autograd)

    def target(self, head: Head) -> Callable:
        """The pass over a target's rows, `_target_pass`."""
        return self._compiled(_target_pass, head.scale, head.softcap)

    def draft(self, divergence: Divergence, by_token: bool, head: Head) -> Callable:
        """The pass over a draft's rows, `_draft_pass`."""
        return self._compiled(_draft_pass, head.scale, head.softcap, divergence, by_token, head.d2t is None)

    def _compiled(
        self, function: Callable, scale: float, softcap: float | None, *options: object
    ) -> Callable:
        key = (function, scale, softcap, *options)
        if key not in self._made:
            head = Head(torch.empty(0), scale=scale, softcap=softcap)  # only scale and softcap are read

            def run(*tensors: Tensor | None) -> object:
                return function(head, *options, *tensors)

            # Blocks always have as many rows as a chunk, so that shapes never change.
            self._made[key] = torch.compile(run, fullgraph=True, dynamic=False)
        return self._made[key]


class CompiledTarget(NamedTuple):
    """The target's rows of a chunk; R is a whole chunk, with undefined rows at the end."""

    block: Tensor  # (R, V) product of the head
    text_ids: Tensor | None  # (R,)
    probs: dict[int, tuple[Tensor | None, ...]]  # by draft vocabulary: inputs of `_draft_pass`


class CompiledRows:
    """Scores by one compiled pass over each block.

    Args:
        kernels: compiled passes.
        divergence, by_token, dtype, buffers: see `EagerRows`.
    """

    def __init__(
        self,
        kernels: Kernels,
        divergence: Divergence,
        by_token: bool,
        dtype: torch.dtype,
        buffers: Buffers,
    ) -> None:
        self._divergence, self._by_token, self._dtype, self._buffers = divergence, by_token, dtype, buffers
        self._kernels = kernels
        self._target_head: Head | None = None

    def target(self, head: Head, block: Tensor, count: int, text_ids: Tensor | None) -> CompiledTarget:
        """See `RowScorer`."""
        self._target_head = head
        if text_ids is not None:
            text_ids = torch.cat([text_ids, text_ids.new_zeros(len(block) - count)])
        return CompiledTarget(block, text_ids, {})

    def draft(self, target: CompiledTarget, head: Head, block: Tensor, count: int, place: RowIndex) -> Scores:
        """See `RowScorer`."""
        if id(head.d2t) not in target.probs:
            target.probs[id(head.d2t)] = self._over(target, head.d2t)
        if isinstance(place, slice):
            place = torch.arange(place.start, place.stop, device=block.device)
        rows = F.pad(place, (0, len(block) - count))
        run = self._kernels.draft(self._divergence, self._by_token, head)
        values = run(block, rows, *target.probs[id(head.d2t)])
        return Scores(values[:, :count], block[:count])

    def chances(
        self, target: CompiledTarget, head: Head, block: Tensor, count: int, place: RowIndex
    ) -> Tensor:
        """See `RowScorer`."""
        return self.draft(target, head, block, count, place).values[3]

    def _over(self, target: CompiledTarget, d2t: Tensor | None) -> tuple[Tensor | None, ...]:
        """The target's distribution over a draft vocabulary."""
        assert self._target_head is not None
        block, head = target.block, self._target_head
        p = self._buffers.block(f"p {id(d2t)}", block, 0 if d2t is None else len(d2t), self._dtype)
        log_z, top1, negentropy, *reshaped = self._kernels.target(head)(block, p, d2t)
        vocab = block.shape[1]
        text = None if target.text_ids is None else draft_ids(target.text_ids, d2t, vocab)
        return p, *(reshaped or [block]), log_z, draft_ids(top1, d2t, vocab), negentropy, text


def _target_pass(head: Head, block: Tensor, p: Tensor, d2t: Tensor | None) -> tuple[Tensor, ...]:
    """Distribution of the target over a draft vocabulary.

    Args:
        head: head with the target's scale and softcap.
        block: (R, V) product of the head.
        p: (R, V') output buffer for probabilities.
        d2t: (V',) the target's id of each draft token; None: all.

    Returns:
        (R,) logsumexp of all logits, (R,) most likely token, (R,) negentropy over the draft vocabulary, and
        (R, V') logits unless they equal the block.
    """
    wide = block.to(p.dtype)
    logits = head.shape(wide)
    probs, log_z, top1 = _softmax(logits)
    if d2t is not None:
        logits = logits[:, d2t]
        probs = (logits - log_z[:, None]).exp()
    p.copy_(probs)
    found = log_z, top1, TargetProbs(logits, probs, log_z, top1, None).negentropy
    return found if logits is wide and d2t is None else (*found, logits)


def _draft_pass(
    head: Head,
    divergence: Divergence,
    by_token: bool,
    full_vocabulary: bool,
    block: Tensor,
    rows: Tensor,
    p: Tensor,
    target_logits: Tensor,
    log_z: Tensor,
    top1: Tensor,
    negentropy: Tensor,
    text_ids: Tensor | None,
) -> Tensor:
    """Score the draft's rows; `block` (R, V'), the product of its head, becomes the gradient.

    Args:
        head: head with the draft's scale and softcap.
        divergence: divergence to score.
        by_token: see `Objective.by_token`.
        full_vocabulary: whether the draft vocabulary is the target's.
        block: see above.
        rows: (R,) target row of each draft row.
        p: (R, V') probabilities of the target; all arguments below are the target's too.
        target_logits: (R, V').
        log_z: (R,).
        top1: (R,) in draft ids.
        negentropy: (R,).
        text_ids: (R,) in draft ids.

    Returns:
        (4, R), `Scores.values`.
    """
    texts = None if text_ids is None else text_ids[rows]
    chunk = target_logits[rows].to(p.dtype), p[rows], log_z[rows], top1[rows]
    probs = TargetProbs(*chunk, None, texts, negentropy[rows])
    probs.full_vocabulary = full_vocabulary
    teacher = Teacher(probs, slice(None))
    logits = head.shape(block.to(p.dtype))
    q, draft_log_z, draft_top1 = _softmax(logits)
    alpha = torch.minimum(teacher.p, q).sum(-1)
    student = Student(logits, q, draft_log_z, draft_top1, alpha)
    values, slope = _score(divergence, by_token, head, student, teacher)
    block.copy_(slope)
    return values


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(R, V) -> softmax, (R,) logsumexp and first maximum; exponentials are computed once."""
    most = logits.amax(-1, keepdim=True)
    powers = (logits - most).exp()
    total = powers.sum(-1, keepdim=True)
    # Smallest index in floating point, since the compiler does not vectorise argmax.
    index = torch.arange(logits.shape[1], dtype=logits.dtype, device=logits.device)
    # Rows of NaN have no maximum: use the last index.
    first = torch.where(logits == most, index, float(logits.shape[1] - 1)).amin(-1)
    return powers * (1 / total), (most + total.log())[:, 0], first.long()


def _score(
    divergence: Divergence, by_token: bool, head: Head, student: Student, teacher: Teacher
) -> tuple[Tensor, Tensor]:
    """(4, M) `Scores.values`, and (M, V') gradients with respect to the head's product."""
    agreed = student.top1 == teacher.top1
    # Computed first, since the divergence overwrites the student's blocks.
    shape_slope, chance = head.slope(student.logits), _chance(by_token, student, teacher)
    value, slope = divergence(student, teacher)
    if shape_slope is not None:
        slope = slope.mul_(shape_slope)
    return torch.stack([value, agreed.to(value.dtype), student.alpha, chance]), slope


def _chance(by_token: bool, student: Student, teacher: Teacher) -> Tensor:
    """(M,) acceptance probability used by the weights."""
    if not by_token:
        return student.alpha
    at = teacher.text_ids[:, None]
    return student.q.gather(1, at.clamp_min(0))[:, 0] * (at[:, 0] >= 0)


def _log_z(logits: Tensor, probs: Tensor, top1: Tensor) -> Tensor:
    """(M,) logsumexp as z - log p at the most likely token, without another pass over the block."""
    at = top1[:, None]
    return (logits.gather(1, at) - probs.gather(1, at).log())[:, 0]
