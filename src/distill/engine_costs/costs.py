"""Seconds of plain rounds and of rounds with drafts in an engine, and the speedup that acceptance gives.

A round with k drafted tokens of which tau - 1 are accepted in the mean gives tau tokens for round(k) seconds;
plain decoding gives one for round(0). So speedup = tau(k) round(0) / round(k) (Leviathan et al.,
arXiv:2211.17192, section 3.3, with measured costs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PAYS = 1.05  # speedup below which drafting is not advised
STEPS = 60  # halvings of the search for a rate


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedLength:
    """Rounds of one draft length.

    Attributes:
        length: most tokens of a draft.
        drafted: drafted tokens of a round, in the mean; less than `length` where answers end.
        seconds: seconds of a round, when plain ones take `EngineCosts.plain`.
        tau: tokens of a round, in the mean.
        measured: tokens a second over those of plain decoding, of the same prompts in turns.
        tau_interval: 95 % bootstrap interval over the answered groups of prompts; None: too few of them.
        measured_interval: the same of `measured`.
    """

    length: int
    drafted: float
    seconds: float
    tau: float
    measured: float
    tau_interval: tuple[float, float] | None = None
    measured_interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """Costs at one number of requests that run side by side.

    Attributes:
        batch_size: number of requests.
        plain: seconds of a plain round.
        lengths: rounds with drafts, by increasing length.
        prefill: seconds per prompt token, without a drafter.
        drafted_prefill: the same with the drafter, which reads the prompt too.
    """

    batch_size: int
    plain: float
    lengths: tuple[TimedLength, ...]
    prefill: float
    drafted_prefill: float

    def round_seconds(self, length: int) -> float:
        """Seconds of a round whose drafts have `length` tokens; linear between the timed ones."""
        if not length:
            return self.plain
        drafted = [one.drafted for one in self.lengths]
        seconds = [one.seconds for one in self.lengths]
        if length > drafted[-1] and len(drafted) > 1:  # answers end before the last drafts do
            slope = (seconds[-1] - seconds[-2]) / (drafted[-1] - drafted[-2])
            return seconds[-1] + slope * (length - drafted[-1])
        return float(np.interp(length, drafted, seconds))

    def speedup(self, survival: Sequence[float], length: int) -> float:
        """Predicted speedup of chains of `length` tokens.

        Args:
            survival: P(at least j drafted tokens are accepted), j from 1; at least `length` of them.
            length: tokens of a draft; 0: plain decoding.
        """
        return (1 + sum(survival[:length])) * self.plain / self.round_seconds(length)

    def choices(self, survival: Sequence[float]) -> list[int]:
        """Lengths to choose among: none, and those between the timed ones with a known acceptance."""
        first, last = self.lengths[0].length, min(self.lengths[-1].length, len(survival))
        return [0, *range(first, last + 1)]

    def best(self, survival: Sequence[float]) -> tuple[int, float]:
        """Length with the largest predicted speedup, the shortest of equal ones, and that speedup."""
        length = max(self.choices(survival), key=lambda k: (self.speedup(survival, k), -k))
        return length, self.speedup(survival, length)

    def ceiling(self) -> tuple[int, float]:
        """`best` if every drafted token were accepted."""
        return self.best([1.0] * self.lengths[-1].length)

    def needed(self, speedup: float) -> float | None:
        """Least rate a, P(at least j accepted) = a^j, whose best length reaches a speedup; None: none does.

        Raises:
            ValueError: a speedup of 1 or less, which plain decoding has.
        """
        if speedup <= 1:
            raise ValueError(f"speedup={speedup}: must be above 1")
        if self.ceiling()[1] < speedup:
            return None
        low, high = 0.0, 1.0
        for _ in range(STEPS):
            middle = (low + high) / 2
            if self.best(constant(middle, self.lengths[-1].length))[1] < speedup:
                low = middle
            else:
                high = middle
        return high


def read_costs(values: Mapping[str, Any]) -> EngineCosts:
    """Costs from the JSON that `asdict` made of them."""
    lengths = tuple(TimedLength(**one) for one in values["lengths"])
    return EngineCosts(**{**values, "lengths": lengths})


def constant(rate: float, length: int) -> list[float]:
    """P(at least j accepted), j from 1 to `length`, if each token is accepted with the same probability."""
    return [rate**j for j in range(1, length + 1)]
