"""Target and draft distributions of every scored row, in chunks: the input of the divergences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from decode.kernels.half_products import product_dtype
from decode.model.head import Head, Side
from distill.losses.row_plan import RowIndex, RowPlan
from drafters.base import DraftStep

MIN_LOG_PROB = -1e4  # exp of it is 0 in every dtype, and 0 * MIN_LOG_PROB is 0, not NaN


class TargetProbs:
    """The target's distribution at the rows of a chunk, over one draft vocabulary.

    Quantities that only some divergences need are computed lazily, once for all depths.

    Args:
        logits: (R, V) logits of the target.
        p: (R, V) softmax of `logits`.
        log_z: (R,) logsumexp of `logits`.
        top1: (R,) most likely token.
        d2t: (V',) the target's id of each draft token; None if draft and target share a vocabulary.
        text_ids: (R,) next token of the text; None without the text.
        negentropy: see the property; None: computed when it is read.
    """

    def __init__(
        self,
        logits: Tensor,
        p: Tensor,
        log_z: Tensor,
        top1: Tensor,
        d2t: Tensor | None,
        text_ids: Tensor | None = None,
        negentropy: Tensor | None = None,
    ) -> None:
        self._logits, self._log_z, self._d2t, self.full_vocabulary = logits, log_z, d2t, d2t is None
        # Cached manually: torch.compile cannot trace a cached_property.
        self._tops: dict[int, tuple[Tensor, Tensor]] = {}
        self._log_p: Tensor | None = None
        self._negentropy = negentropy
        # Selecting columns is slow, so only logits are selected; p and log p are computed from them.
        self.p = p if d2t is None else self.log_p.exp()  # (R, V')
        self.mass = self.p.sum(-1)  # (R,)
        self.top1 = self._draft_ids(top1)  # (R,)
        self.text_ids = None if text_ids is None else self._draft_ids(text_ids)

    def _draft_ids(self, ids: Tensor) -> Tensor:
        return draft_ids(ids, self._d2t, self._logits.shape[1])

    @property
    def log_p(self) -> Tensor:
        """(R, V') log p, computed from logits so that it is finite where p underflows to 0."""
        if self._log_p is None:
            logits = self._logits if self._d2t is None else self._logits.index_select(1, self._d2t)
            self._log_p = (logits - self._log_z[:, None]).clamp_min_(MIN_LOG_PROB)
        return self._log_p

    @property
    def negentropy(self) -> Tensor:
        """(R,) sum of p log p over the draft's tokens."""
        if self._negentropy is None:
            if self._d2t is not None:
                self._negentropy = (self.p * self.log_p).sum(-1)
            else:
                # sum p log p = sum p z - log_z sum p: one (R, V) block fewer than with log p.
                total = self._logits.clamp_min(MIN_LOG_PROB).mul_(self.p).sum(-1)
                self._negentropy = total - self._log_z * self.mass
        return self._negentropy

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """(R, k) probabilities and draft ids of the target's k most likely tokens."""
        if k not in self._tops:
            logits, ids = self._logits.topk(min(k, self._logits.shape[1]))
            self._tops[k] = (logits - self._log_z[:, None]).exp(), self._draft_ids(ids)
        return self._tops[k]


class Teacher:
    """M rows of a `TargetProbs`, read-only.

    Attributes:
        full_vocabulary: whether the draft vocabulary is the target's.
    """

    def __init__(self, probs: TargetProbs, rows: RowIndex) -> None:
        self._probs, self._rows, self.full_vocabulary = probs, rows, probs.full_vocabulary
        self.p = probs.p[rows] if isinstance(rows, slice) else probs.p.index_select(0, rows)  # (M, V')

    @property
    def log_p(self) -> Tensor:
        """(M, V') log p, at least `MIN_LOG_PROB`."""
        return self._probs.log_p[self._rows]

    @property
    def mass(self) -> Tensor:
        """(M,) sum of p."""
        return self._probs.mass[self._rows]

    @property
    def negentropy(self) -> Tensor:
        """(M,) sum of p log p."""
        return self._probs.negentropy[self._rows]

    @property
    def top1(self) -> Tensor:
        """(M,) draft id of the target's most likely token; -1 for a miss."""
        return self._probs.top1[self._rows]

    @property
    def text_ids(self) -> Tensor:
        """(M,) draft id of the text's next token; -1 for a miss."""
        assert self._probs.text_ids is not None, "the objective was not given the text"
        return self._probs.text_ids[self._rows]

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """(M, k) probability and draft id of the target's most likely tokens; -1 for a miss."""
        p, ids = self._probs.top(k)
        return p[self._rows], ids[self._rows]


class Student(NamedTuple):
    """The draft's distribution at M rows; divergences may overwrite `logits` and `q`."""

    logits: Tensor  # (M, V')
    q: Tensor  # (M, V') softmax of logits
    log_z: Tensor  # (M,) logsumexp of logits
    top1: Tensor  # (M,) most likely token, as a draft id
    alpha: Tensor  # (M,) sum of min(p, q): acceptance probability of the token rule


# Rows of `Scores.values`; those of the divergences follow.
AGREED, ALPHA, CHANCE, DIVERGENCES = range(4)


class Scores(NamedTuple):
    """Values and gradients of M rows of a depth, for T divergences."""

    values: Tensor  # (3 + T, M) top-1 agreement, alpha, acceptance probability of the match rule, divergences
    slope: Tensor  # (M, V') gradient of their sum with respect to the head's product, in its dtype


class RowScorer(Protocol):
    """Turns products of heads into `Scores`; `row_scores` has two implementations.

    A block has as many rows as a chunk; the first `count` are valid. A scorer may overwrite it.
    """

    def target(self, head: Head, block: Tensor, count: int, text_ids: Tensor | None) -> Any:
        """Take the target's (R, V) rows of a chunk; the result is passed to `draft`."""
        ...

    def draft(
        self, target: Any, head: Head, block: Tensor, count: int, place: RowIndex, shares: Tensor | None
    ) -> Scores:
        """Score the draft's (M, V') rows, row i against the target's row `place[i]`.

        `shares` (T, M) multiply the gradients of T divergences before they are added; None: there is one
        divergence, and its gradient is not multiplied.
        """
        ...

    def chances(
        self, target: Any, head: Head, block: Tensor, count: int, place: RowIndex, shares: None
    ) -> Tensor:
        """(3, M), the first rows of `Scores.values`, without gradients."""
        ...


Scored = TypeVar("Scored")


class Piece(NamedTuple, Generic[Scored]):
    """Rows of one depth that predict the tokens of one chunk of target rows."""

    step: int  # index of the depth's `DraftStep`
    rows: slice  # rows of that step
    hidden: Tensor  # (M, D') in the dtype of the matrix products
    scored: Scored


class Buffers:
    """Reused blocks: allocating a large block costs more than a pass over it."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._blocks: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def block(self, name: str, like: Tensor, width: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        """A whole (rows, width) block, uninitialised; width and dtype default to `like`'s."""
        key = (name, width or like.shape[1], dtype or like.dtype)
        if key not in self._blocks:
            self._blocks[key] = like.new_empty(self._rows, key[1], dtype=key[2])
        return self._blocks[key]


class Sweep:
    """Iterates over the target's rows in chunks; computes a row's target logits once for all depths.

    Logits and probabilities are in reused buffers, so a `Piece` is valid until the next one.

    Args:
        steps: depths to score.
        plan: of their rows.
        last: (B * T, D) input of the target's head.
        head: head of the target.
        buffers: buffers of `plan.size` rows, shared with the scorer.
        scorer: scores the logits.
        next_tokens: (B * T,) the text's token after each position; None without the text.
    """

    def __init__(
        self,
        steps: Sequence[DraftStep],
        plan: RowPlan,
        last: Tensor,
        head: Head,
        buffers: Buffers,
        scorer: RowScorer,
        next_tokens: Tensor | None = None,
    ) -> None:
        self._steps, self._plan, self._last, self._head = steps, plan, last, head
        self._buffers, self._scorer, self._next_tokens = buffers, scorer, next_tokens
        self._weights: dict[int, Tensor] = {}  # weights by id, in the dtype of matrix products
        # Cast once: autocast would cast the head for every chunk.
        device = last.device.type
        self._product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def pieces(
        self,
        score: Callable[[Any, Head, Tensor, int, RowIndex, Any], Scored],
        shares: Sequence[Tensor] | None = None,
    ) -> Iterator[Piece[Scored]]:
        """Yield every piece with the result of `score`, a method of the scorer.

        Args:
            score: `draft` or `chances`.
            shares: (T, M) of each step, for `draft`; None: none.
        """
        for chunk in self._plan.chunks:
            target = self._target_chunk(chunk.target)
            for i, rows, place in chunk.parts:
                head = self._steps[i].head
                hidden = self._steps[i].hidden[rows].to(self.weight(head).dtype)
                block = self._logits("draft", head, hidden)
                share = None if shares is None else shares[i][:, rows]
                yield Piece(i, rows, hidden, score(target, head, block, len(hidden), place, share))

    def _target_chunk(self, rows: RowIndex) -> Any:
        """Pass the target's rows to the scorer and return its result."""
        hidden = self._last[rows].to(self.weight(self._head).dtype)
        text_ids = None if self._next_tokens is None else self._next_tokens[rows]
        block = self._logits("target", self._head, hidden)
        return self._scorer.target(self._head, block, len(hidden), text_ids)

    def weight(self, head: Head) -> Tensor:
        """A head's weight in the dtype of the products."""
        dtype = self._product or head.weight.dtype
        return self._cast(head.weight, product_dtype(dtype, head.weight.device, self._plan.size))

    def side(self, head: Head, side: Side) -> Tensor:
        """Weight of a head's side branch, in the same dtype."""
        return self._cast(side.weight, self.weight(head).dtype)

    def _cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if id(weight) not in self._weights:
            self._weights[id(weight)] = weight.detach().to(dtype)
        return self._weights[id(weight)]

    def back(self, head: Head, slope: Tensor, out: Tensor) -> None:
        """Backward of a head: (M, V') gradients of the logits -> `out`, (M, D' + r) of the hidden states."""
        if head.side is None:
            out.copy_(slope @ self.weight(head))
            return
        states, low = head.parts(out)
        states.copy_(slope @ self.weight(head))
        low.copy_(columns(slope, head.side.ids) @ self.side(head, head.side))

    def _logits(self, name: str, head: Head, hidden: Tensor) -> Tensor:
        """A block with a head's product with (M, D' + r) hidden states in its first M rows."""
        weight = self.weight(head)
        states, low = head.parts(hidden)
        block = self._buffers.block(name, hidden, len(weight))
        out = block[: len(hidden)]
        if head.bias is None:
            torch.mm(states, weight.mT, out=out)
        else:
            torch.addmm(head.bias.detach().to(hidden.dtype), states, weight.mT, out=out)
        if head.side is not None:
            side = self.side(head, head.side).mT  # (r, V_s)
            if head.side.ids is None:
                out.addmm_(low, side)
            else:
                out.index_add_(1, head.side.ids, low @ side)
        return block


def argmax(rows: Tensor) -> Tensor:
    """(M, V) -> (M,) index of the first maximum, in blocks: torch's argmax costs more than a softmax."""
    vocab, width = rows.shape[1], 64
    even = vocab - vocab % width  # columns in whole blocks
    tops = [rows[:, :even].unflatten(1, (-1, width)).amax(-1)] if even else []  # (M, even / width)
    if even < vocab:
        tops.append(rows[:, even:].amax(-1, keepdim=True))
    block = torch.cat(tops, 1).argmax(-1, keepdim=True)  # (M, 1)
    inside = (block * width + torch.arange(width, device=rows.device)).clamp_max(vocab - 1)  # (M, width)
    return inside.gather(1, rows.gather(1, inside).argmax(-1, keepdim=True))[:, 0]


def draft_ids(ids: Tensor, d2t: Tensor | None, vocab: int) -> Tensor:
    """(R, ...) target ids -> draft ids; -1 for tokens outside the draft vocabulary (misses)."""
    if d2t is None:
        return ids
    t2d = ids.new_full((vocab,), -1)
    t2d[d2t] = torch.arange(len(d2t), device=ids.device)
    return t2d[ids]


def columns(block: Tensor, ids: Tensor | None) -> Tensor:
    """(M, V') -> (M, V_s): the columns of a `Side`."""
    return block if ids is None else block.index_select(1, ids)
