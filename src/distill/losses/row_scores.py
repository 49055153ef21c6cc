"""Score a chunk's rows with torch's own operations, or in one compiled pass over the logits.

Both use the same `Student`, `Teacher` and divergence, and differ by rounding. Separate operations read and
write a (rows, V) block about twenty times; the compiled pass keeps a row in the cache. `Objective.kernels`
selects one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import config as compiler_config
from torch.nn import functional as F

from decode.model.head import Head
from distill.losses.attempt import Attempt
from distill.losses.chunked_logits import (
    DIVERGENCES,
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
        divergences: divergences to score, T of them.
        by_token: see `Objective.by_token`.
        dtype: dtype of the distributions.
        buffers: reused blocks.
    """

    def __init__(
        self, divergences: Sequence[Divergence], by_token: bool, dtype: torch.dtype, buffers: Buffers
    ) -> None:
        self._divergences, self._by_token, self._dtype, self._buffers = divergences, by_token, dtype, buffers

    def target(self, head: Head, block: Tensor, count: int, text_ids: Tensor | None) -> EagerTarget:
        """See `RowScorer`."""
        logits = self._wide("target", head.shape(block[:count]))
        p = torch.softmax(logits, -1, out=self._like("p", logits))
        top1 = argmax(logits)
        return EagerTarget(logits, p, _log_z(logits, p, top1), top1, text_ids, {})

    def draft(
        self,
        target: EagerTarget,
        head: Head,
        block: Tensor,
        count: int,
        place: RowIndex,
        shares: Tensor | None,
    ) -> Scores:
        """See `RowScorer`."""
        teacher, product = Teacher(target.over(head.d2t), place), block[:count]
        student = self._student(head, product, teacher)
        scored = self._by_token, head, student, teacher
        values, slope = _score(self._divergences, *scored, shares, self._like)
        return Scores(values, slope if slope.dtype == product.dtype else product.copy_(slope))

    def chances(
        self, target: EagerTarget, head: Head, block: Tensor, count: int, place: RowIndex, shares: None
    ) -> Tensor:
        """See `RowScorer`."""
        del shares
        teacher = Teacher(target.over(head.d2t), place)
        return torch.stack(_acceptance(self._by_token, self._student(head, block[:count], teacher), teacher))

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

    def take(self, *divergences: Divergence) -> bool:
        """Whether the compiled passes support all of these; top-k and autograd stay in torch."""
        functions = [getattr(divergence, "func", divergence) for divergence in divergences]  # of partial
        return self.attempt.works is not False and not any(
            isinstance(f, TopK | by_autograd) for f in functions
        )

    def target(self, head: Head) -> Callable:
        """The pass over a target's rows, `_target_pass`."""
        return self._compiled(_target_pass, head.scale, head.softcap)

    def draft(self, divergences: Sequence[Divergence], by_token: bool, head: Head) -> Callable:
        """The pass over a draft's rows, `_draft_pass`."""
        options = tuple(divergences), by_token, head.d2t is None
        return self._compiled(_draft_pass, head.scale, head.softcap, *options)

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
        divergences, by_token, dtype, buffers: see `EagerRows`.
    """

    def __init__(
        self,
        kernels: Kernels,
        divergences: Sequence[Divergence],
        by_token: bool,
        dtype: torch.dtype,
        buffers: Buffers,
    ) -> None:
        self._divergences, self._by_token, self._dtype, self._buffers = divergences, by_token, dtype, buffers
        self._kernels = kernels
        self._target_head: Head | None = None

    def target(self, head: Head, block: Tensor, count: int, text_ids: Tensor | None) -> CompiledTarget:
        """See `RowScorer`."""
        self._target_head = head
        if text_ids is not None:
            text_ids = torch.cat([text_ids, text_ids.new_zeros(len(block) - count)])
        return CompiledTarget(block, text_ids, {})

    def draft(
        self,
        target: CompiledTarget,
        head: Head,
        block: Tensor,
        count: int,
        place: RowIndex,
        shares: Tensor | None,
    ) -> Scores:
        """See `RowScorer`."""
        if id(head.d2t) not in target.probs:
            target.probs[id(head.d2t)] = self._over(target, head.d2t)
        if isinstance(place, slice):
            place = torch.arange(place.start, place.stop, device=block.device)
        more = 0, len(block) - count
        shares = None if shares is None else F.pad(shares, more)
        run = self._kernels.draft(self._divergences, self._by_token, head)
        values = run(block, F.pad(place, more), shares, *target.probs[id(head.d2t)])
        return Scores(values[:, :count], block[:count])

    def chances(
        self, target: CompiledTarget, head: Head, block: Tensor, count: int, place: RowIndex, shares: None
    ) -> Tensor:
        """See `RowScorer`."""
        # The same pass as for gradients, since another one would have to be compiled.
        several = len(self._divergences) > 1
        unused = torch.zeros(len(self._divergences), count, dtype=self._dtype, device=block.device)
        scores = self.draft(target, head, block, count, place, unused if several else shares)
        return scores.values[:DIVERGENCES]

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
    divergences: Sequence[Divergence],
    by_token: bool,
    full_vocabulary: bool,
    block: Tensor,
    rows: Tensor,
    shares: Tensor | None,
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
        divergences: divergences to score.
        by_token: see `Objective.by_token`.
        full_vocabulary: whether the draft vocabulary is the target's.
        block: see above.
        rows: (R,) target row of each draft row.
        shares: (T, R), see `RowScorer.draft`.
        p: (R, V') probabilities of the target; all arguments below are the target's too.
        target_logits: (R, V').
        log_z: (R,).
        top1: (R,) in draft ids.
        negentropy: (R,).
        text_ids: (R,) in draft ids.

    Returns:
        (3 + T, R), `Scores.values`.
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
    scored = by_token, head, student, teacher
    values, slope = _score(divergences, *scored, shares, lambda _, block: torch.empty_like(block))
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
    divergences: Sequence[Divergence],
    by_token: bool,
    head: Head,
    student: Student,
    teacher: Teacher,
    shares: Tensor | None,
    like: Callable[[str, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """(3 + T, M) `Scores.values`, and (M, V') gradients with respect to the head's product.

    Args:
        divergences: T of them.
        by_token: see `Objective.by_token`.
        head: head of the draft.
        student: its blocks are overwritten.
        teacher: what it is compared with.
        shares: (T, M), see `RowScorer.draft`.
        like: an uninitialised block of a name, as large as the given one.
    """
    # Computed first, since a divergence overwrites the student's blocks.
    shape_slope, values = head.slope(student.logits), _acceptance(by_token, student, teacher)
    last, summed, slope = len(divergences) - 1, None, student.q
    for i, divergence in enumerate(divergences):
        value, slope = divergence(_copied(student, like) if i < last else student, teacher)
        values.append(value)
        if shares is not None:
            slope = slope.mul_(shares[i, :, None])
        if summed is not None:
            slope = summed.add_(slope)
        elif i < last:  # in a block of its own: the next divergence overwrites the others
            slope = like("sum of divergences", slope).copy_(slope)
        summed = slope
    if shape_slope is not None:
        slope = slope.mul_(shape_slope)
    return torch.stack(values), slope


def _copied(student: Student, like: Callable[[str, Tensor], Tensor]) -> Student:
    """A student whose blocks a divergence may overwrite while others still need the original."""
    logits = like("logits of a divergence", student.logits).copy_(student.logits)
    return student._replace(logits=logits, q=like("q of a divergence", student.q).copy_(student.q))


def _acceptance(by_token: bool, student: Student, teacher: Teacher) -> list[Tensor]:
    """(M,) each: top-1 agreement, alpha, and q of the text's token (`by_token`) or alpha again."""
    agreed = (student.top1 == teacher.top1).to(student.alpha.dtype)
    if not by_token:
        return [agreed, student.alpha, student.alpha]
    at = teacher.text_ids[:, None]
    return [agreed, student.alpha, student.q.gather(1, at.clamp_min(0))[:, 0] * (at[:, 0] >= 0)]


def _log_z(logits: Tensor, probs: Tensor, top1: Tensor) -> Tensor:
    """(M,) logsumexp as z - log p at the most likely token, without another pass over the block."""
    at = top1[:, None]
    return (logits.gather(1, at) - probs.gather(1, at).log())[:, 0]
