"""Successive halving (Jamieson and Talwalkar, arXiv:1502.07943) with a budget in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

# Rung numbers of drafters without training, of the winner's final training, and of its scorecard.
FREE, LAST, SCORE = 0, -1, -2
NEGLIGIBLE = 0.005  # relative difference that is ignored


@dataclass(frozen=True, slots=True)
class Verdict:
    """Measured speed of a drafter at one batch size on this machine.

    Attributes:
        plan: name of its fastest plan that drafts.
        tau: acceptance length, by replay.
        round_seconds: measured, with all rows of the batch running.
        speed: predicted tokens per second of the whole batch.
        plain_speed: of plain decoding, timed in turns with the drafter.
    """

    plan: str
    tau: float
    round_seconds: float
    speed: float
    plain_speed: float

    @property
    def speedup(self) -> float:
        """Over plain decoding; load of the machine cancels out."""
        return self.speed / self.plain_speed

    @property
    def cost(self) -> float:
        """Cost of a round in rounds of plain decoding: tau / cost is the speedup."""
        return self.tau / self.speedup


@dataclass(slots=True)
class Row:
    """One family at one rung.

    Attributes:
        rung: from 1, or FREE or LAST.
        family: name of the drafter's configuration.
        seconds: of training so far, with loading.
        steps: of training so far.
        verdict: None if it failed.
        fate: what became of it, for the table.
    """

    rung: int
    family: str
    seconds: float = 0.0
    steps: int = 0
    verdict: Verdict | None = None
    fate: str = ""


def num_rungs(families: int) -> int:
    """Number of rungs until one family is left, when at most half survive each."""
    return int(log2(families)) if families else 0


def best(rows: Sequence[Row], keep: int) -> list[Row]:
    """The rows of highest speedup, in order; ties keep the order of the families.

    Args:
        rows: of one rung, in the order of the families.
        keep: how many at most; rows without a verdict are skipped.
    """
    judged = [row for row in rows if row.verdict]
    return sorted(judged, key=lambda row: -row.verdict.speedup if row.verdict else 0.0)[:keep]


def survivors(rows: Sequence[Row]) -> list[Row]:
    """The faster half of the families of a rung, rounded down, at least one."""
    return best(rows, max(1, len(rows) // 2))


def seconds_per_family(search: float, rungs: int, families: int, parallel: int, judging: float) -> float:
    """Seconds of training for each family of a rung.

    Args:
        search: seconds for all rungs.
        rungs: number of rungs.
        families: in this rung.
        parallel: families trained at the same time.
        judging: seconds to evaluate one family; they are evaluated one after the other.
    """
    return (search / rungs - families * judging) / ceil(families / parallel)


def explain_winner(winner: Row, others: Sequence[Row], winner_rows: Sequence[Row], batch: int) -> str:
    """One sentence on why the winner is faster than the best of the others.

    Args:
        winner: last row of the winner.
        others: last rows of all other families.
        winner_rows: all rows of the winner; it is compared at the rung where the other was evaluated.
        batch: requests decoded together.
    """
    verdict = winner.verdict
    assert verdict
    gain = f"{verdict.speedup:.2f}x plain decoding at batch {batch}"
    if verdict.speedup <= 1:
        return (
            f"nothing pays at batch {batch} on this machine: the best, {winner.family} with {verdict.plan}, "
            f"makes {gain}; decode plainly"
        )
    free = "needs no training; " if any(row.rung == FREE for row in winner_rows) else ""
    second = next(iter(best(others, 1)), None)
    if second is None or second.verdict is None:
        return f"{winner.family} won: {free}{gain} with {verdict.plan}; nothing else was judged"
    here = next((row for row in winner_rows if row.rung == second.rung and row.verdict), winner)
    mine, other = here.verdict, second.verdict
    assert mine
    more, cheaper = mine.tau / other.tau - 1, 1 - mine.cost / other.cost
    taus = f"tau {mine.tau:.2f} against {other.tau:.2f}"
    costs = f"a round costs {mine.cost:.2f} plain ones against {other.cost:.2f}"
    if abs(more) < NEGLIGIBLE:
        reason = f"it accepts as much ({taus}) and is cheaper ({costs})"
    elif abs(cheaper) < NEGLIGIBLE:
        reason = f"it accepts more ({taus}) at the same price ({costs})"
    elif more > 0 and cheaper > 0:
        reason = f"it accepts more ({taus}) and is cheaper ({costs})"
    elif more > 0:
        reason = f"it accepts more ({taus}), which outweighs its price ({costs})"
    else:
        reason = f"it is cheaper ({costs}), which outweighs what it accepts ({taus})"
    then = "" if here is winner else f" when both had been trained for {here.seconds:.0f} s"
    return f"{winner.family} won: {free}{gain} with {verdict.plan}; against {second.family}{then} {reason}"
