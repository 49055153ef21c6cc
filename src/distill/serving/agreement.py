"""Whether acceptance that an engine counted is the scorecard's, position by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scipy import stats

from decode.errors import UserError
from decode.evaluation.replay import CONFIDENCE
from decode.evaluation.scorecard import Row, Scorecard
from distill.serving.metrics import Served

VAGUE = 0.15  # of acceptance: where noise hides more than this, agreement says nothing
HALF_95 = 1.96  # standard errors on either side of an interval of 95 %


class Figure(NamedTuple):
    """One number, there and here.

    Attributes:
        name: as tables show it.
        served: by the engine.
        scored: in the scorecard.
        noise: what two such counts of the same thing differ by at most, at `CONFIDENCE` over all figures.
        tolerance: differences up to this do not matter, however sure they are.
        edge: that an engine may be above, because it counts the rounds that an end cuts as well.
    """

    name: str
    served: float
    scored: float
    noise: float
    tolerance: float
    edge: float = 0.0

    @property
    def differs(self) -> bool:
        """By more than chance, and by enough to matter."""
        off = self.served - self.scored
        return max(off - self.edge, -off) > max(self.noise, self.tolerance)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All figures of one engine.

    Attributes:
        served: what was counted.
        row: of the scorecard.
        tau: tokens a round.
        survival: of every position that the engine counts.
    """

    served: Served
    row: Row
    tau: Figure
    survival: tuple[Figure, ...]

    @property
    def agrees(self) -> bool:
        """No figure differs."""
        return not any(figure.differs for figure in (self.tau, *self.survival))

    @property
    def vague(self) -> bool:
        """Too little was counted to tell agreement from chance."""
        first = self.survival[0] if self.survival else self.tau
        return first.noise > VAGUE * (1 if self.survival else len(self.row.acceptance.survival))


def rounds(row: Row) -> float:
    """Behind a row's acceptance."""
    return sum(row.counts.rounds) if row.replay else row.rounds


def answers(row: Row) -> int:
    """Behind a row's acceptance, where it says so; each has one round that its end may cut."""
    return len(row.counts.rounds)


def choose(card: Scorecard, depth: int, temperature: float, name: str | None, again: str) -> Row:
    """The row that such a server can be held against: a chain of the same depth, at the same temperature.

    Args:
        card: the scorecard.
        depth: tokens that the engine drafts at once.
        temperature: that it answers at.
        name: of the row, as the scorecard's table has it; None: the likeliest tokens, one after another.
        again: the command that scores the checkpoint once more.

    Raises:
        UserError: there is none, and how to get it.
    """
    wanted = name or f"chain-{depth}"
    rows = [r for r in card.rows if r.decode == wanted and r.temperature == temperature]
    if lossless := [r for r in rows if not r.lossy and len(r.acceptance.survival) == depth]:
        return min(lossless, key=lambda r: r.batch_size)
    has = sorted({f"{r.decode} at T={r.temperature:g}" for r in card.rows})
    raise UserError(
        f"the engine drafts chains of {depth} at T={temperature:g}, and the scorecard has no row "
        f"{wanted} there (it has {', '.join(has)}); score one: {again}"
    )


def compare(served: Served, row: Row, tolerance: float, same: bool = False) -> Comparison:
    """Hold what an engine counted against a row of the scorecard.

    Rounds of one answer are alike, so intervals of independent rounds would be too narrow: they are
    widened by what the scorecard's own interval, over prompts, is wider than such a one. Greedy answers
    to the `same` prompts share what makes them easy, so that there even independent rounds are too wide.

    s_j is over rounds that no end cuts, and engines count all. With one cut round of R in an answer,
    theirs is at most (1 - s_j) / R above ours.

    Args:
        served: counts.
        row: of the same shape and temperature.
        tolerance: in acceptance.
        same: the prompts of the row were sent.
    """
    scored = row.acceptance
    expected, behind = scored.survival, rounds(row)
    per_round = _variance(expected)
    wide = (scored.tau_interval[1] - scored.tau_interval[0]) / 2 / HALF_95
    effect = max(1.0, wide**2 * behind / per_round) if per_round else 1.0
    effect = 1.0 if same and not row.temperature else effect
    cut = answers(row) / max(behind, 1.0)  # rounds of all that an end cuts, at most
    figures = 1 + (len(expected) if served.survival else 0)
    reach = float(stats.norm.ppf(1 - (1 - CONFIDENCE) / 2 / figures))
    share = effect * (1 / max(served.rounds, 1.0) + 1 / max(behind, 1.0))

    def figure(place: int, found: float) -> Figure:
        both = (found * served.rounds + expected[place] * behind) / max(served.rounds + behind, 1.0)
        noise = reach * math.sqrt(max(both * (1 - both), 0.0) * share)
        edge = (1 - expected[place]) * cut
        return Figure(f"s_{place + 1}", found, expected[place], noise, tolerance, edge)

    # A histogram ends where the luckiest round did.
    counted = [*served.survival, *[0.0] * (len(expected) - len(served.survival))] if served.survival else []
    survival = tuple(figure(place, found) for place, found in enumerate(counted))
    spread = max(per_round, _variance(served.survival))
    noise = reach * math.sqrt(spread * share)
    scored_tau = 1 + sum(expected) if counted else scored.tau
    edge = sum(one.edge for one in survival)
    tau = Figure("tau", served.tau, scored_tau, noise, tolerance * len(expected), edge)
    return Comparison(served, row, tau, survival)


def _variance(survival: Sequence[float]) -> float:
    """Of the tokens that a round keeps."""
    square = sum((2 * j - 1) * s for j, s in enumerate(survival, 1))
    return max(square - sum(survival) ** 2, 0.0)
