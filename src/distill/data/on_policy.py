"""Training on the drafter's own texts (DistillSpec, arXiv:2310.08461; GKD, arXiv:2306.13649).

A share of the rows keep their prompts and get an answer that the drafter samples; the teacher is
the target, read over that text. Nothing is differentiated through the sampling. Any drafter that
has an `alone` can be trained so; neither its `unroll` nor the objective knows of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.head import Head
from decode.model.target import Target
from decode.sampling import Sampler
from distill.data.batches import Micro
from drafters.base import Drafter, supervised_anchors

ROWS = 128  # whose laws exist at one time


@dataclass(frozen=True)
class OnPolicy:
    """Which rows of a batch the drafter answers, and how far into an answer it is taught.

    The target never sees a draft that it has rejected, so an answer counts up to the first token
    by which the chance that all of it is accepted, the running product of min(1, p / q), is below
    `cut`; that token still counts.

    Args:
        share: of the rows, each by itself; DistillSpec's and GKD's lambda.
        cut: from 0 (nothing is cut) to 1.
        sampler: law of the answers, and of p and q.
        max_new_tokens: of an answer.
        max_tokens: of a row.
        stop: end tokens.

    Raises:
        UserError: a share or a cut that is none.
    """

    share: float
    cut: float
    sampler: Sampler
    max_new_tokens: int
    max_tokens: int
    stop: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("share", "cut"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"on_policy.{name}={getattr(self, name)}: must be from 0 to 1")

    def __call__(self, micros: Sequence[Micro], drafter: Drafter, target: Target) -> list[Micro]:
        """Micro-batches with some answers replaced: a function of their seeds and the drafter.

        `anchors` are left alone, since they count those of other ranks too.
        """
        chosen = [self.chosen(micro) for micro in micros]
        if not any(chosen):
            return list(micros)
        with torch.autocast(target.device.type, enabled=False):  # as it will be decoded
            student = drafter.as_target(target)
            return [self._mixed(m, c, student, target) for m, c in zip(micros, chosen, strict=True)]

    def chosen(self, micro: Micro) -> list[int]:
        """Rows that the drafter answers."""
        dice = torch.rand(len(micro.tokens), generator=torch.Generator().manual_seed(micro.seed))
        return (dice < self.share).nonzero()[:, 0].tolist()

    def _mixed(self, micro: Micro, chosen: list[int], student: Target, target: Target) -> Micro:
        ends = [int(mask.nonzero().max()) + 1 for mask in micro.loss_mask]
        rows = [(micro.tokens[i, :end], micro.loss_mask[i, :end]) for i, end in enumerate(ends)]
        written = []
        for row, tokens, mask in self._answered(micro, chosen, student, target):
            if supervised_anchors(
                mask[None], 1
            ).any():  # else there is nothing to learn, and the row stays as it was
                rows[row] = tokens, mask
                written.append(row)
        if not written:
            return micro
        tokens = pad_sequence([tokens for tokens, _ in rows], batch_first=True)
        mask = pad_sequence([mask for _, mask in rows], batch_first=True)
        anchors = int(supervised_anchors(mask[written], 1).sum())
        micro = micro._replace(tokens=tokens, loss_mask=mask, read=None, on_policy=anchors)
        return micro._replace(lengths=[len(own) for own, _ in rows]) if micro.lengths else micro

    def _answered(
        self, micro: Micro, chosen: list[int], student: Target, target: Target
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Row, its (n,) tokens up to the cut and their loss mask."""
        starts = micro.loss_mask.int().argmax(1).clamp_min(1).tolist()  # of the answers
        room = min(self.max_tokens, student.max_positions or self.max_tokens)
        chosen = [row for row in chosen if starts[row] < room]
        known = min(student.vocab_size, target.vocab_size)
        prompts = [micro.tokens[row, : starts[row]].clamp_max(known - 1).tolist() for row in chosen]
        options = {"max_new_tokens": self.max_new_tokens, "sampler": self.sampler, "stop": self.stop}
        outputs = generate(student, None, prompts, **options, seed=micro.seed).outputs
        for row, output in zip(chosen, outputs, strict=True):
            start = starts[row]
            # The target has never heard of ids that only pad the drafter's head.
            answer = list(takewhile(lambda token: token < target.vocab_size, output.tokens))
            text = torch.cat([micro.tokens[row, :start], micro.tokens.new_tensor(answer)])[: self.max_tokens]
            theirs = target.read(text[None]).last[0, start - 1 : -1]
            last = student.read(text[None].clamp_max(known - 1)).last[0, start - 1 : -1]
            p = self._chances(target.head, theirs, text[start:])
            q = self._chances(student.head, last, text[start:])
            end = start + int(reached(p, q, self.cut).sum())
            yield row, text[:end], torch.arange(end, device=text.device) >= start

    def _chances(self, head: Head, last: Tensor, tokens: Tensor) -> Tensor:
        """(n,) probability of each token after (n, D) states."""
        parts = zip(last.split(ROWS), tokens.split(ROWS), strict=True)
        return torch.cat(
            [self.sampler.probs(head(part)).gather(1, own[:, None])[:, 0] for part, own in parts]
        )


def reached(p: Tensor, q: Tensor, cut: float) -> Tensor:
    """(n,) bool: tokens before which the running product of min(1, p / q) has not fallen below `cut`."""
    accepted = (p / q.clamp_min(torch.finfo(q.dtype).tiny)).clamp_max(1).cumprod(0)
    return torch.cat([accepted.new_ones(1), accepted[:-1]])[: len(p)] >= cut
