"""On-policy training on texts of the drafter (DistillSpec, arXiv:2310.08461; GKD, arXiv:2306.13649).

A share of the rows keep their prompts and get an answer sampled from the drafter; the target is the teacher
on that text. There is no gradient through the sampling. Works with any drafter that has `as_target`,
independent of its `unroll` and of the objective.
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
from distill.data.batches import MicroBatch
from drafters import optional
from drafters.base import Drafter, supervised_anchors

ROWS = 128  # positions processed at once


@dataclass(frozen=True)
class OnPolicy:
    """Replaces answers of some rows by the drafter's, truncated where the target would probably reject.

    Decoding never continues after a rejected token. An answer is therefore truncated after the first token
    with an acceptance probability of all tokens so far, the running product of min(1, p / q), below `cut`.

    Args:
        share: probability that the drafter answers a row; lambda of DistillSpec and GKD.
        cut: from 0 (no cut) to 1.
        sampler: distribution of the answers, and of p and q.
        max_new_tokens: maximum length of an answer.
        max_tokens: maximum length of a row.
        stop: end tokens.

    Raises:
        UserError: share or cut outside [0, 1].
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

    def __call__(self, micros: Sequence[MicroBatch], drafter: Drafter, target: Target) -> list[MicroBatch]:
        """Replace some answers of micro-batches; depends only on their seeds and the drafter.

        `anchors` is not updated, since it includes other ranks.
        """
        chosen = [self.chosen(micro) for micro in micros]  # row numbers per micro-batch
        if not any(chosen):
            return list(micros)
        with torch.autocast(target.device.type, enabled=False):  # in the precision of decoding
            student = optional.as_target(drafter, target)
            return [self._mixed(m, c, student, target) for m, c in zip(micros, chosen, strict=True)]

    def chosen(self, micro: MicroBatch) -> list[int]:
        """Rows that the drafter answers, drawn with the seed of the micro-batch."""
        uniform = torch.rand(len(micro.tokens), generator=torch.Generator().manual_seed(micro.seed))
        return (uniform < self.share).nonzero()[:, 0].tolist()

    def _mixed(self, micro: MicroBatch, chosen: list[int], student: Target, target: Target) -> MicroBatch:
        ends = [int(mask.nonzero().max()) + 1 for mask in micro.loss_mask]
        rows = [(micro.tokens[i, :end], micro.loss_mask[i, :end]) for i, end in enumerate(ends)]
        replaced = []
        for row, tokens, mask in self._answered(micro, chosen, student, target):
            if supervised_anchors(mask[None], 1).any():  # otherwise too short to train on
                rows[row] = tokens, mask
                replaced.append(row)
        if not replaced:
            return micro
        tokens = pad_sequence([tokens for tokens, _ in rows], batch_first=True)
        mask = pad_sequence([mask for _, mask in rows], batch_first=True)
        anchors = int(supervised_anchors(mask[replaced], 1).sum())
        micro = micro._replace(tokens=tokens, loss_mask=mask, target_states=None, on_policy=anchors)
        return micro._replace(lengths=[len(row_tokens) for row_tokens, _ in rows]) if micro.lengths else micro

    def _answered(
        self, micro: MicroBatch, chosen: list[int], student: Target, target: Target
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield row number, (n,) tokens up to the cut and their (n,) loss mask."""
        starts = micro.loss_mask.int().argmax(1).clamp_min(1).tolist()  # first token of each answer
        room = min(self.max_tokens, student.max_positions or self.max_tokens)
        chosen = [row for row in chosen if starts[row] < room]
        num_shared = min(student.vocab_size, target.vocab_size)
        prompts = [micro.tokens[row, : starts[row]].clamp_max(num_shared - 1).tolist() for row in chosen]
        options = {"max_new_tokens": self.max_new_tokens, "sampler": self.sampler, "stop": self.stop}
        outputs = generate(student, None, prompts, **options, seed=micro.seed).outputs
        for row, output in zip(chosen, outputs, strict=True):
            start = starts[row]
            # The drafter's head may be padded with ids that the target lacks.
            answer = list(takewhile(lambda token: token < target.vocab_size, output.tokens))
            text = torch.cat([micro.tokens[row, :start], micro.tokens.new_tensor(answer)])[: self.max_tokens]
            # (n, D) states that predict each of the n tokens of the answer.
            target_last = target.read(text[None]).last[0, start - 1 : -1]
            student_last = student.read(text[None].clamp_max(num_shared - 1)).last[0, start - 1 : -1]
            p = self._probs(target.head, target_last, text[start:])
            q = self._probs(student.head, student_last, text[start:])
            end = start + int(accepted_prefix(p, q, self.cut).sum())
            yield row, text[:end], torch.arange(end) >= start

    def _probs(self, head: Head, last: Tensor, tokens: Tensor) -> Tensor:
        """(n, D) states, (n,) tokens -> (n,) probability of each token, ROWS positions at a time."""
        parts = zip(last.split(ROWS), tokens.split(ROWS), strict=True)
        probs = [self.sampler.probs(head(states)).gather(1, t[:, None])[:, 0] for states, t in parts]
        return torch.cat(probs)


def accepted_prefix(p: Tensor, q: Tensor, cut: float) -> Tensor:
    """(n,) bool: tokens with a running product of min(1, p / q), exclusive, of at least `cut`."""
    accepted = (p / q.clamp_min(torch.finfo(q.dtype).tiny)).clamp_max(1).cumprod(0)
    return torch.cat([accepted.new_ones(1), accepted[:-1]])[: len(p)] >= cut
