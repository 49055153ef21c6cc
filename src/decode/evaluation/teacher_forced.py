"""Every place on stored answers where a round may begin, the drafter told the text so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.draft import PAD
from decode.generation.types import Proposer
from decode.model.target import Target, TargetOutput
from decode.rng import Key


class Rollout(NamedTuple):
    """A prompt and what the target made of it, an end token included."""

    prompt: list[int]
    answer: list[int]


class Start(NamedTuple):
    """A round may begin below token `place` - 1 of the answers; it would draft token `place` first."""

    place: int
    rows: int  # whose answers go that far, the first ones
    state: Any  # the drafter's, of these


class Texts:
    """Rollouts side by side, read once.

    Args:
        target: that wrote them.
        rollouts: the longest answer first.
        ahead: tokens past a start that are looked at.

    Attributes:
        answers: (B, longest + ahead), then `PAD`.
        read: rows and taps of the whole texts.
    """

    def __init__(self, target: Target, rollouts: Sequence[Rollout], ahead: int) -> None:
        texts = [r.prompt + r.answer for r in rollouts]
        tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        answers = torch.full((len(texts), len(rollouts[0].answer) + ahead), PAD)
        for row, (text, rollout) in enumerate(zip(texts, rollouts, strict=True)):
            tokens[row, : len(text)] = torch.tensor(text)
            answers[row, : len(rollout.answer)] = torch.tensor(rollout.answer)
        self.target, self.rollouts = target, rollouts
        self.tokens, self.answers = tokens.to(target.device), answers.to(target.device)
        self.read: TargetOutput = target.read(self.tokens)

    def starts(self, drafter: Proposer) -> Iterator[Start]:
        """All of them, in order; the drafter may `propose` at each as often as one likes."""
        row = torch.arange(len(self.rollouts), device=self.tokens.device)
        state: Any = drafter.new_state(len(row))
        counts = [len(r.prompt) for r in self.rollouts]
        begin = torch.tensor(counts, device=self.tokens.device)
        settled, taps = self.tokens[:, : max(counts)], self.read.taps[:, : max(counts)]
        for place in range(1, len(self.rollouts[0].answer)):
            rows = sum(len(r.answer) > place for r in self.rollouts)
            if rows < len(row):
                drafter.select(state, list(range(rows)))
                settled, taps, counts, row = settled[:rows], taps[:rows], counts[:rows], row[:rows]
            drafter.advance(state, self.target, settled, taps, counts, self.answers[row, place - 1])
            yield Start(place, rows, state)
            at = (begin[row] + place - 1)[:, None]  # the root's place: it is settled next
            settled, taps, counts = (
                self.tokens[row[:, None], at],
                self.read.taps[row[:, None], at],
                [1] * rows,
            )


class Dictate:
    """A coin that draws the rollout's own token at every level of a draft, wherever it is asked.

    Args:
        ahead: (B, K) tokens.
    """

    def __init__(self, ahead: Tensor) -> None:
        self.ahead, self.level = ahead, 0

    def draw(self, weights: Tensor, key: Key, active: Tensor) -> Tensor:
        """(B,) or (B, n): drafts are grown level by level, a draw for each."""
        del weights, key
        token = self.ahead[:, self.level].clamp_min(0)
        self.level += 1
        return token if active.ndim == 1 else token[:, None].expand(active.shape)
