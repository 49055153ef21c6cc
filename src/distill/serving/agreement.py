"""Compare acceptance counted by an engine with a scorecard, position by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scipy import stats

from decode.errors import UserError
from decode.evaluation.replay import CONFIDENCE
from decode.evaluation.rows import Row
from decode.evaluation.scorecard import Scorecard
from distill.serving.metrics import ServedAcceptance

MAX_NOISE = 0.15  # acceptance noise above which agreement is inconclusive
Z_95 = 1.96  # half-width of a 95 % interval, in standard errors


class Figure(NamedTuple):
    """One figure as served and as scored.

    Attributes:
        name: name in tables.
        served: value counted by the engine.
        scored: value in the scorecard.
        noise: largest difference by chance, at `CONFIDENCE` over all figures.
        tolerance: differences up to this are ignored, even if significant.
        edge: possible excess of an engine that counts tokens accepted after the end of an answer.
    """

    name: str
    served: float
    scored: float
    noise: float
    tolerance: float
    edge: float = 0.0

    @property
    def differs(self) -> bool:
        """Whether the difference exceeds both noise and tolerance."""
        off = self.served - self.scored
        return max(off - self.edge, -off) > max(self.noise, self.tolerance)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All figures of one engine.

    Attributes:
        served: acceptance from the engine's counters.
        row: row of the scorecard.
        tau: tokens per round.
        survival: survival at every position that the engine counts.
    """

    served: ServedAcceptance
    row: Row
    tau: Figure
    survival: tuple[Figure, ...]

    @property
    def agrees(self) -> bool:
        """No figure differs."""
        return not any(figure.differs for figure in (self.tau, *self.survival))

    @property
    def inconclusive(self) -> bool:
        """Whether there are too few rounds to confirm agreement."""
        first = self.survival[0] if self.survival else self.tau
        return first.noise > MAX_NOISE * (1 if self.survival else len(self.row.acceptance.survival))


def rounds(row: Row) -> float:
    """Number of rounds behind a row's acceptance."""
    return sum(row.counts.rounds) if row.replay else row.rounds


def answers(row: Row) -> int:
    """Number of answers of a row; the last round of each may be truncated."""
    return len(row.counts.rounds)


def matching_row(card: Scorecard, depth: int, temperature: float, name: str | None, again: str) -> Row:
    """Find the row comparable with the server: a chain of the same depth at the same temperature.

    Args:
        card: the scorecard.
        depth: draft length of the engine.
        temperature: temperature of its answers.
        name: name of the row's plan; None: a greedy chain.
        again: command that scores the checkpoint with this plan.

    Raises:
        UserError: there is no such row; the message names the command that adds it.
    """
    plan_name = name or f"chain-{depth}"
    rows = [r for r in card.rows if r.decode == plan_name and r.temperature == temperature]
    if lossless := [r for r in rows if not r.lossy and len(r.acceptance.survival) == depth]:
        return min(lossless, key=lambda r: r.batch_size)
    has = sorted({f"{r.decode} at T={r.temperature:g}" for r in card.rows})
    raise UserError(
        f"the engine drafts chains of {depth} at T={temperature:g}, and the scorecard has no row "
        f"{plan_name} there (it has {', '.join(has)}); score one: {again}"
    )


def chain_row(card: Scorecard, checkpoint: str, depth: int, temperature: float, name: str | None) -> Row:
    """`matching_row` of a scorecard that was read from `checkpoint`."""
    again = (
        f"foredraft score checkpoint={checkpoint} decode=chain decode.depth={depth} "
        f"'score.temperatures=[{temperature:g}]' out=<a file>, and checkpoint=<that file>"
    )
    return matching_row(card, depth, temperature, name, again)


def same_prompts(card: Scorecard, row: Row, sent: str) -> bool:
    """Whether the prompts of a row were sent, and no others.

    Args:
        card: the scorecard.
        row: one of its rows.
        sent: `ids_digest` of the prompts sent; "" if none were.
    """
    conditions = card.conditions
    return bool(sent) and sent == (conditions.replayed_digest if row.replay else conditions.prompts_digest)


def compare(served: ServedAcceptance, row: Row, tolerance: float, same: bool = False) -> Comparison:
    """Compare an engine's acceptance with a row of the scorecard.

    Rounds of one answer are correlated, so intervals are widened by the design effect, which follows from the
    scorecard's interval over prompts. Greedy answers to the `same` prompts need no widening, since the
    prompts' difficulty cancels out.

    The scorecard's s_j excludes tokens after the end of an answer; engines may count them. With one such
    round of R in an answer, the engine's s_j is at most (1 - s_j) / R higher.

    Args:
        served: acceptance of the engine.
        row: row with the same plan and temperature.
        tolerance: tolerance of acceptance.
        same: the row's prompts were sent.
    """
    scored = row.acceptance
    expected, scored_rounds = scored.survival, rounds(row)
    per_round = _variance(expected)
    wide = (scored.tau_interval[1] - scored.tau_interval[0]) / 2 / Z_95
    effect = max(1.0, wide**2 * scored_rounds / per_round) if per_round else 1.0
    effect = 1.0 if same and not row.temperature else effect
    cut = answers(row) / max(scored_rounds, 1.0)  # largest share of truncated rounds
    figures = 1 + (len(expected) if served.survival else 0)
    reach = float(stats.norm.ppf(1 - (1 - CONFIDENCE) / 2 / figures))
    share = effect * (1 / max(served.rounds, 1.0) + 1 / max(scored_rounds, 1.0))

    def figure(position: int, value: float) -> Figure:
        both = (value * served.rounds + expected[position] * scored_rounds) / max(
            served.rounds + scored_rounds, 1.0
        )
        noise = reach * math.sqrt(max(both * (1 - both), 0.0) * share)
        edge = (1 - expected[position]) * cut
        return Figure(f"s_{position + 1}", value, expected[position], noise, tolerance, edge)

    # Histograms end at the longest accepted length.
    counted = [*served.survival, *[0.0] * (len(expected) - len(served.survival))] if served.survival else []
    survival = tuple(figure(position, value) for position, value in enumerate(counted))
    spread = max(per_round, _variance(served.survival))
    noise = reach * math.sqrt(spread * share)
    scored_tau = 1 + sum(expected) if counted else scored.tau
    edge = sum(one.edge for one in survival)
    tau = Figure("tau", served.tau, scored_tau, noise, tolerance * len(expected), edge)
    return Comparison(served, row, tau, survival)


def _variance(survival: Sequence[float]) -> float:
    """Variance of the accepted tokens per round."""
    square = sum((2 * j - 1) * s for j, s in enumerate(survival, 1))
    return max(square - sum(survival) ** 2, 0.0)
