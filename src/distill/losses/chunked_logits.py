"""Both laws at every row that is scored, in chunks: what divergences are computed from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from decode.model.head import Head, Side
from drafters.base import DraftStep

Where = slice | Tensor  # which rows; a slice is a view, a tensor makes a copy
LEAST = -1e4  # as a logarithm: of a probability that is zero in any dtype, yet 0 * LEAST = 0


class Law:
    """The target's law at the rows of a chunk, seen from one draft vocabulary.

    What only some divergences want is made when it is asked for, once for all depths.

    Args:
        logits: (R, V) the target's.
        p: (R, V) their softmax.
        norm: (R,) their logarithmic normaliser.
        best: (R,) the likeliest token.
        d2t: (V',) the target's id of each draft token; None where the vocabularies are one.
        written: (R,) the text's own token; None where the text is not known.
    """

    def __init__(
        self,
        logits: Tensor,
        p: Tensor,
        norm: Tensor,
        best: Tensor,
        d2t: Tensor | None,
        written: Tensor | None = None,
    ) -> None:
        self._logits, self._norm, self._d2t, self.whole = logits, norm, d2t, d2t is None
        self._tops: dict[int, tuple[Tensor, Tensor]] = {}
        # One look-up of columns, which is slow: of the logits.
        self.p = p if d2t is None else self.log_p.exp()  # (R, V')
        self.mass = self.p.sum(-1)  # (R,)
        self.best = self._draft_ids(best)  # (R,)
        self.written = None if written is None else self._draft_ids(written)

    def _draft_ids(self, ids: Tensor) -> Tensor:
        """The draft's ids of the target's; -1 where it has none."""
        if self._d2t is None:
            return ids
        t2d = ids.new_full((self._logits.shape[1],), -1)
        t2d[self._d2t] = torch.arange(len(self._d2t), device=ids.device)
        return t2d[ids]

    @cached_property
    def log_p(self) -> Tensor:
        """(R, V') from the logits: finite where p is zero."""
        logits = self._logits if self._d2t is None else self._logits.index_select(1, self._d2t)
        return (logits - self._norm[:, None]).clamp_min_(LEAST)

    @cached_property
    def negentropy(self) -> Tensor:
        """(R,) sum over the draft's tokens of p log p."""
        if self._d2t is not None:
            return (self.p * self.log_p).sum(-1)
        # With one block fewer: logarithms of p are not kept, and nothing is as small as to matter.
        return self._logits.clamp_min(LEAST).mul_(self.p).sum(-1) - self._norm * self.mass

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """(R, k) probability and draft id of the target's likeliest tokens."""
        if k not in self._tops:
            logits, ids = self._logits.topk(min(k, self._logits.shape[1]))
            self._tops[k] = (logits - self._norm[:, None]).exp(), self._draft_ids(ids)
        return self._tops[k]


class Teacher:
    """M rows of a `Law`; none of it may be written to.

    Attributes:
        whole: the draft knows all of the target's tokens.
    """

    def __init__(self, law: Law, where: Where) -> None:
        self._law, self._where, self.whole = law, where, law.whole

    @cached_property
    def p(self) -> Tensor:
        """(M, V') probabilities."""
        return self._law.p[self._where]

    @property
    def log_p(self) -> Tensor:
        """(M, V') their logarithms, at least `LEAST`."""
        return self._law.log_p[self._where]

    @property
    def mass(self) -> Tensor:
        """(M,) sum of p."""
        return self._law.mass[self._where]

    @property
    def negentropy(self) -> Tensor:
        """(M,) sum of p log p."""
        return self._law.negentropy[self._where]

    @property
    def best(self) -> Tensor:
        """(M,) draft id of the target's likeliest token; -1 for a miss."""
        return self._law.best[self._where]

    @property
    def written(self) -> Tensor:
        """(M,) draft id of the text's own token; -1 for a miss."""
        assert self._law.written is not None, "the objective was not given the text"
        return self._law.written[self._where]

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """(M, k) probability and draft id of the target's likeliest tokens; -1 for a miss."""
        p, ids = self._law.top(k)
        return p[self._where], ids[self._where]


class Student(NamedTuple):
    """The draft's law at M rows; the blocks may be overwritten."""

    logits: Tensor  # (M, V')
    q: Tensor  # (M, V') their softmax
    norm: Tensor  # (M,) their logarithmic normaliser
    best: Tensor  # (M,) likeliest token
    alpha: Tensor  # (M,) sum of min(p, q)


class Piece(NamedTuple):
    """The rows of one step that answer one chunk of the target's."""

    step: int
    rows: slice
    hidden: Tensor  # (M, D') as products read them
    student: Student
    teacher: Teacher


class Sweep:
    """Walks over the target's rows in chunks; each row's logits are made once for all depths.

    Blocks are made in buffers that are written over, so a piece is good until the next.

    Args:
        steps: whose rows are scored.
        last: (B * T, D) the target head's input.
        head: the target's.
        dtype: of the laws.
        size: target rows of a chunk.
        following: (B * T,) the text's token after each position, if it is known.
    """

    def __init__(
        self,
        steps: Sequence[DraftStep],
        last: Tensor,
        head: Head,
        dtype: torch.dtype,
        size: int,
        following: Tensor | None = None,
    ) -> None:
        self._steps, self._last, self._head, self._dtype, self._size = steps, last, head, dtype, size
        self._following = following
        self._weights: dict[int, Tensor] = {}  # as products read them
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}
        # What autocast would do to the products is done by hand, once for a whole head.
        kind = last.device.type
        self._product = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def __iter__(self) -> Iterator[Piece]:
        # Planned on the host, so that no chunk waits for the device.
        answered = [(step.anchor + step.depth).cpu() for step in self._steps]
        positions = torch.cat(answered).unique()  # ascending, and so are those of a step
        places = [torch.searchsorted(positions, a) for a in answered]
        starts = range(0, len(positions), self._size)
        bounds = torch.tensor([*starts, len(positions)])
        cuts = [torch.searchsorted(place, bounds).tolist() for place in places]
        for n, start in enumerate(starts):
            where = self._where(positions[start : start + self._size])
            chunk, written = self._teach(where), None if self._following is None else self._following[where]
            laws: dict[int, Law] = {}
            for i, (step, place) in enumerate(zip(self._steps, places, strict=True)):
                rows = slice(cuts[i][n], cuts[i][n + 1])
                if rows.start == rows.stop:
                    continue
                if id(step.head.d2t) not in laws:
                    laws[id(step.head.d2t)] = Law(*chunk, step.head.d2t, written)
                teacher = Teacher(laws[id(step.head.d2t)], self._where(place[rows] - start))
                hidden = step.hidden[rows].to(self.weight(step.head).dtype)
                yield Piece(i, rows, hidden, self._learn(step.head, hidden, teacher), teacher)

    def _where(self, rows: Tensor) -> Where:
        first, last = int(rows[0]), int(rows[-1])
        return slice(first, last + 1) if last - first + 1 == len(rows) else rows.to(self._last.device)

    def _teach(self, where: Where) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(R, V) logits and law of the target, (R,) normaliser and likeliest token."""
        hidden = self._last[where].to(self.weight(self._head).dtype)
        logits = self._logits("target", self._head, hidden)
        p = torch.softmax(logits, -1, out=self._buffer("p", logits))
        best = argmax(logits)
        return logits, p, _norm(logits, p, best), best

    def _learn(self, head: Head, hidden: Tensor, teacher: Teacher) -> Student:
        logits = self._logits("draft", head, hidden)
        q = torch.softmax(logits, -1, out=self._buffer("q", logits))
        best = argmax(logits)
        alpha = torch.minimum(teacher.p, q, out=self._buffer("least", logits)).sum(-1)
        return Student(logits, q, _norm(logits, q, best), best, alpha)

    def weight(self, head: Head) -> Tensor:
        """A head's weight as products read it."""
        return self._as_read(head.weight, self._product or head.weight.dtype)

    def side(self, head: Head, side: Side) -> Tensor:
        """That of its side, in the dtype of the head's."""
        return self._as_read(side.weight, self.weight(head).dtype)

    def _as_read(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if id(weight) not in self._weights:
            self._weights[id(weight)] = weight.detach().to(dtype)
        return self._weights[id(weight)]

    def back(self, head: Head, slope: Tensor, out: Tensor) -> None:
        """From (M, V') gradients of the logits to (M, D' + r) of the hidden states."""
        if head.side is None:
            out.copy_(slope @ self.weight(head))
            return
        states, low = head.parts(out)
        states.copy_(slope @ self.weight(head))
        low.copy_(columns(slope, head.side.ids) @ self.side(head, head.side))

    def _logits(self, name: str, head: Head, hidden: Tensor) -> Tensor:
        weight = self.weight(head)
        states, low = head.parts(hidden)
        out = self._buffer(name, hidden, len(weight))
        if head.bias is None:
            torch.mm(states, weight.mT, out=out)
        else:
            torch.addmm(head.bias.detach().to(hidden.dtype), states, weight.mT, out=out)
        if head.side is not None:
            own = self.side(head, head.side).mT
            if head.side.ids is None:
                out.addmm_(low, own)
            else:
                out.index_add_(1, head.side.ids, low @ own)
        return head.shape(out).to(self._dtype)

    def _buffer(self, name: str, like: Tensor, width: int = 0) -> Tensor:
        """Memory for a block as long as `like`: that of a large block costs more than a pass over it."""
        width = width or like.shape[1]
        key = (name, width, like.dtype)
        if key not in self._buffers:
            self._buffers[key] = like.new_empty(self._size, width)
        return self._buffers[key][: len(like)]


def argmax(rows: Tensor) -> Tensor:
    """(M, V) -> (M,) the first of the largest, by blocks: torch's own costs more than a softmax."""
    vocab, width = rows.shape[1], 64
    whole = vocab - vocab % width
    tops = [rows[:, :whole].unflatten(1, (-1, width)).amax(-1)] if whole else []
    if whole < vocab:
        tops.append(rows[:, whole:].amax(-1, keepdim=True))
    block = torch.cat(tops, 1).argmax(-1, keepdim=True)  # (M, 1)
    inside = (block * width + torch.arange(width, device=rows.device)).clamp_max(vocab - 1)  # (M, width)
    return inside.gather(1, rows.gather(1, inside).argmax(-1, keepdim=True))[:, 0]


def columns(block: Tensor, ids: Tensor | None) -> Tensor:
    """(M, V') -> (M, V_s), those that a `Side` knows."""
    return block if ids is None else block.index_select(1, ids)


def _norm(logits: Tensor, law: Tensor, best: Tensor) -> Tensor:
    """(M,) logsumexp, from the softmax at the likeliest token."""
    at = best[:, None]
    return (logits.gather(1, at) - law.gather(1, at).log())[:, 0]
