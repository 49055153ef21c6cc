"""A chain of a draft model in fewer passes: tokens that another drafter expects are read before the draw.

The vertical cascade of Cascade Speculative Drafting (Chen et al., arXiv:2312.11462), as in staged speculative
decoding (Spector and Re, arXiv:2308.04623) and TriForce (Sun et al., arXiv:2404.11912). There the draft model
accepts or rejects each guess by a draw. Here it draws every token itself, at the same key, from the same
distribution as without guesses; a guess counts if it is that token. So the draft is the same, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from decode.draft import PAD, Draft
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import Coin
from decode.sampling import Sampler
from decode.transfer import upload
from drafters.drafting.tree import expand


class Reading(NamedTuple):
    """What a draft model makes of n tokens of each row."""

    last: Tensor  # (B, n, D') input of the head after each token
    logits: Tensor  # (B, n, V) of the token that follows each


@runtime_checkable
class ReadsAhead(Protocol):
    """A drafter that can read tokens before they are drafted.

    Its state has `last` (B, D') and `logits` (B, V) at the root, once that is read.
    """

    def read_settled(
        self, state: Any, target: Target, tokens: Tensor, counts: Sequence[int], root: Tensor, guesses: Tensor
    ) -> Reading:
        """`Drafter.advance`, with (B, G) guesses of what it will draft read behind the root."""
        ...

    def read_drafted(self, state: Any, target: Target, tokens: Tensor, scratch: int) -> Reading:
        """Read (B, n) tokens below the root, behind the first `scratch` ones that were read there."""
        ...


@dataclass(frozen=True, slots=True)
class Ahead:
    """Tokens that were read ahead, and what follows them.

    Attributes:
        begin: number of drafted tokens before the first of them.
        tokens: n of each row; `PAD` where nothing was guessed.
        reading: of the n tokens.
    """

    begin: int
    tokens: Sequence[Sequence[int]]
    reading: Reading

    def first(self, count: int) -> Ahead:
        """Of the first `count` tokens alone."""
        return Ahead(self.begin, [row[:count] for row in self.tokens], self.reading)

    def place(self, level: int, drawn: Sequence[int]) -> int | None:
        """Index of the token of a level, counted from 0, if it is what was drawn in every row."""
        place = level - self.begin
        if all(
            place < len(row) and row[place] == token for row, token in zip(self.tokens, drawn, strict=True)
        ):
            return place
        return None


Guess = Callable[[int, Sequence[int], int], Sequence[int]]  # row, path below the root, n -> at most n tokens


class ReadAheadChain:
    """The `Step` of a chain (see `expand`) that reads a token together with guesses of those after it.

    Where every row draws what was guessed, its logits are known and no pass is made. Otherwise all rows read
    what they have drawn, with new guesses, in the slots of those that were wrong.

    Args:
        read: (B, n) tokens, number of tokens below the root that stay before them -> what follows each.
        guess: next tokens of a row.
        depth: of the chain; its last token is not read.
        ahead: what was read behind the root; None: nothing.
        last: (B, D') input of the head at the root.

    Attributes:
        last: (B, 1, D') input of the head after the newest token.
        ahead: what is still true of the argument `ahead`, whose slots later passes may have taken.
    """

    def __init__(
        self,
        read: Callable[[Tensor, int], Reading],
        guess: Guess,
        depth: int,
        ahead: Ahead | None,
        last: Tensor,
    ) -> None:
        self._read, self._guess, self._depth = read, guess, depth
        self.ahead, self._newest = ahead, ahead
        self.last = last[:, None]
        self._paths: list[list[int]] = [[] for _ in range(len(last))]

    def __call__(self, token: Tensor, parent: Tensor) -> Tensor:
        """(B, 1) drawn tokens -> (B, 1, V) logits of what follows."""
        del parent
        level, drawn = len(self._paths[0]), token[:, 0].tolist()
        for path, newest in zip(self._paths, drawn, strict=True):
            path.append(newest)
        place = None if self._newest is None else self._newest.place(level, drawn)
        if place is None:
            self._newest, place = self._pass(token, drawn, level), 0
        assert self._newest is not None
        here, reading = slice(place, place + 1), self._newest.reading
        self.last = reading.last[:, here]
        return reading.logits[:, here]

    def draft(
        self,
        logits: Tensor,
        sampler: Sampler,
        coin: Coin,
        plan: Plan,
        confidence: Callable[[], Tensor] | None,
    ) -> Draft:
        """The chain below the root's (B, V) logits; other arguments as in `expand`."""
        return expand(logits, self, sampler, coin, plan, confidence=confidence)

    def _pass(self, token: Tensor, drawn: Sequence[int], level: int) -> Ahead:
        """Read the drawn tokens, and guesses of all later ones but the last of the chain."""
        guesses = guessed(self._guess, self._paths, self._depth - level - 2)
        if guesses[0]:
            # Where nothing was guessed, token 0 is read.
            token = torch.cat([token, as_tokens(guesses, token.device).clamp_min(0)], 1)
        if self.ahead is not None:
            self.ahead = self.ahead.first(level)
        rows = [[newest, *more] for newest, more in zip(drawn, guesses, strict=True)]
        return Ahead(level, rows, self._read(token, level))


def guessed(guess: Guess, paths: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """At most `count` tokens after each row's path, with `PAD` after those of the shorter rows."""
    rows = [list(guess(row, path, count)) if count > 0 else [] for row, path in enumerate(paths)]
    width = max(map(len, rows))
    return [[*row, *[PAD] * (width - len(row))] for row in rows]


def as_tokens(guesses: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """(B, n) on the device."""
    return upload(np.array(guesses, np.int64), device)
