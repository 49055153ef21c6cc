"""Settled tokens that a drafter reads later in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from decode.row_state import select_rows
from decode.transfer import RowInts, upload


class Advance(NamedTuple):
    """Arguments of `Proposer.advance`."""

    tokens: Tensor  # (B, M)
    taps: Tensor  # (B, M, L, D)
    counts: RowInts
    root: Tensor  # (B,)


@dataclass(slots=True)
class Deferred:
    """Rounds that were settled since the drafter last read, oldest first."""

    rounds: list[Advance] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Upper bound on the tokens of a row."""
        return sum(part.tokens.shape[1] for part in self.rounds)

    def add(self, tokens: Tensor, taps: Tensor, counts: Sequence[int], root: Tensor) -> None:
        """Append one round."""
        used = max(counts)
        self.rounds.append(Advance(tokens[:, :used], taps[:, :used], RowInts.of(counts), root))

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        rows = RowInts.of(rows)
        self.rounds = [Advance(*(select_rows(part, rows) for part in round_)) for round_ in self.rounds]

    def append(self, other: Deferred) -> None:
        """Check that both are empty: rows can be appended only if all have read their settled tokens."""
        assert not self.rounds
        assert not other.rounds

    def take(self) -> Advance | None:
        """Remove all rounds and return them joined; None if there are none."""
        rounds, self.rounds = self.rounds, []
        if len(rounds) < 2:
            return rounds[0] if rounds else None
        tokens, taps = torch.cat([part.tokens for part in rounds], 1), torch.cat([p.taps for p in rounds], 1)
        counts = rounds[0].counts
        for part in rounds[1:]:
            counts = counts.plus(part.counts)
        if min(counts) < tokens.shape[1]:  # gaps between the rounds of some row
            index = upload(_places(rounds, max(counts)), tokens.device)  # (B, M)
            row = torch.arange(len(index), device=tokens.device)[:, None]
            tokens, taps = tokens[row, index], taps[row, index]
        return Advance(tokens, taps, counts, rounds[-1].root)


def _places(rounds: Sequence[Advance], width: int) -> np.ndarray:
    """(B, width) columns of the joined rounds that each row uses, in order, padded with 0."""
    places = np.zeros((len(rounds[0].counts), width), np.int64)
    filled, start = [0] * len(places), 0
    for tokens, _, counts, _ in rounds:
        for row, count in enumerate(counts):
            places[row, filled[row] : filled[row] + count] = np.arange(start, start + count)
            filled[row] += count
        start += tokens.shape[1]
    return places
