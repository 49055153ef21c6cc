"""How far a draft's law is from the target's: values, and gradients with respect to the logits.

p is the target's law, q the draft's. A draft may know fewer tokens than the target; V' are its
own. p is then p on these tokens, never renormalised: it sums to `mass` < 1, and what is left over
are misses, which the draft can neither propose nor be taught.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

Where = slice | Tensor  # which rows of a chunk


class Law:
    """The target's law at the rows of a chunk, seen from one draft vocabulary.

    Args:
        logits: (R, V) the target's.
        p: (R, V) their softmax.
        norm: (R,) their logarithmic normaliser.
        best: (R,) the likeliest token.
        d2t: (V',) the target's id of each draft token, or None where the vocabularies are one.
    """

    def __init__(self, logits: Tensor, p: Tensor, norm: Tensor, best: Tensor, d2t: Tensor | None) -> None:
        self._logits, self._norm, self._d2t = logits, norm, d2t
        self.whole = d2t is None
        self.p = p if d2t is None else p.index_select(1, d2t)  # (R, V')
        self.mass = self.p.sum(-1)  # (R,)
        self.best = self._draft_ids(best)

    def _draft_ids(self, ids: Tensor) -> Tensor:
        """The draft's ids of the target's; -1 where it has none."""
        if self._d2t is None:
            return ids
        t2d = self._logits.new_full((self._logits.shape[1],), -1, dtype=torch.long)
        t2d[self._d2t] = torch.arange(len(self._d2t), device=t2d.device)
        return t2d[ids]

    @cached_property
    def negentropy(self) -> Tensor:
        """(R,) sum over the draft's tokens of p log p."""
        # A token of probability zero adds nothing: 0 log 0 = 0.
        return torch.xlogy(self.p, self.p).sum(-1)


class Teacher:
    """Some rows of a `Law`; M of them.

    Attributes:
        whole: the draft knows all of the target's tokens.
    """

    def __init__(self, law: Law, where: Where) -> None:
        self._law, self._where, self.whole = law, where, law.whole

    @cached_property
    def p(self) -> Tensor:
        """(M, V') not to be written to."""
        return self._law.p[self._where]

    @cached_property
    def mass(self) -> Tensor:
        """(M,) sum of p."""
        return self._law.mass[self._where]

    @cached_property
    def best(self) -> Tensor:
        """(M,) draft id of the target's likeliest token, -1 for a miss."""
        return self._law.best[self._where]

    @property
    def negentropy(self) -> Tensor:
        """(M,) sum of p log p."""
        return self._law.negentropy[self._where]


class Student(NamedTuple):
    """The draft's law at M rows; the blocks may be overwritten."""

    logits: Tensor  # (M, V')
    q: Tensor  # (M, V') their softmax
    norm: Tensor  # (M,) their logarithmic normaliser
    alpha: Tensor  # (M,) sum of min(p, q)


# Returns the (M,) values in nats and their (M, V') gradients with respect to the draft's logits.
Divergence = Callable[[Student, Teacher], tuple[Tensor, Tensor]]


def kl(student: Student, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum p log(p / q); gradient mass q - p.

    Misses are left out: their term is infinite whatever the draft does.
    """
    value = teacher.negentropy + teacher.mass * student.norm
    value -= student.logits.mul_(teacher.p).sum(-1)
    q = student.q if teacher.whole else student.q.mul_(teacher.mass[:, None])
    return value, q.sub_(teacher.p)


def ce(student: Student, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """Cross-entropy to the target's likeliest token; gradient q - onehot. A miss is 0."""
    at, known = teacher.best.clamp_min(0)[:, None], (teacher.best >= 0).to(student.q.dtype)
    value = (student.norm - student.logits.gather(1, at)[:, 0]) * known
    q = student.q if teacher.whole else student.q.mul_(known[:, None])
    return value, q.scatter_add_(1, at, -known[:, None])
