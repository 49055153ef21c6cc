"""Successive halving (Jamieson and Talwalkar, arXiv:1502.07943) in seconds: who goes on, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

# Rungs of drafters that need no training, of the family that all the rest is spent on, and of its scorecard.
FREE, LAST, SCORE = 0, -1, -2
SAME = 0.005  # relative; a smaller difference is none


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a drafter is worth at one batch size on this machine.

    Attributes:
        plan: name of its best one that drafts.
        tau: replayed.
        round_seconds: measured, with all rows of the batch running.
        speed: predicted tokens a second of the whole batch, to its last row.
        plain_speed: of plain decoding, measured in turns with it.
    """

    plan: str
    tau: float
    round_seconds: float
    speed: float
    plain_speed: float

    @property
    def speedup(self) -> float:
        """Over plain decoding; what the machine does beside it falls out."""
        return self.speed / self.plain_speed

    @property
    def cost(self) -> float:
        """Of a round, in rounds of plain decoding: what acceptance is divided by."""
        return self.tau / self.speedup


@dataclass(slots=True)
class Row:
    """One family at one rung.

    Attributes:
        rung: from 1; FREE or LAST.
        family: its name.
        seconds: that it has been trained for in all, loading included.
        steps: likewise.
        verdict: None: it failed.
        fate: in a word or two.
    """

    rung: int
    family: str
    seconds: float = 0.0
    steps: int = 0
    verdict: Verdict | None = None
    fate: str = ""


def rungs(families: int) -> int:
    """Rounds of comparison until one is left, when at most half go on each time."""
    return int(log2(families)) if families else 0


def best(rows: Sequence[Row], keep: int) -> list[Row]:
    """Those of the highest speedup, in order; of equals, whoever was named first.

    Args:
        rows: of one rung, in the order in which families were named.
        keep: at most so many; a row without a verdict never is one.
    """
    judged = [row for row in rows if row.verdict]
    return sorted(judged, key=lambda row: -row.verdict.speedup if row.verdict else 0.0)[:keep]


def going_on(rows: Sequence[Row]) -> list[Row]:
    """Half of the families of a rung, rounded down, one at the least."""
    return best(rows, max(1, len(rows) // 2))


def share(search: float, rungs: int, families: int, parallel: int, judging: float) -> float:
    """Seconds of training for each family of a rung.

    Args:
        search: seconds for all rungs.
        rungs: that there are.
        families: in this one.
        parallel: trained at the same time.
        judging: seconds that one takes to be compared, one after the other.
    """
    return (search / rungs - families * judging) / ceil(families / parallel)


def why(winner: Row, others: Sequence[Row], own: Sequence[Row], batch: int) -> str:
    """One sentence: what the winner does better than the best of the others.

    Args:
        winner: its last row.
        others: the last rows of all others.
        own: all rows of the winner; it is compared as it was where the other was judged.
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
    free = "needs no training; " if any(row.rung == FREE for row in own) else ""
    second = next(iter(best(others, 1)), None)
    if second is None or second.verdict is None:
        return f"{winner.family} won: {free}{gain} with {verdict.plan}; nothing else was judged"
    here = next((row for row in own if row.rung == second.rung and row.verdict), winner)
    mine, other = here.verdict, second.verdict
    assert mine
    more, cheaper = mine.tau / other.tau - 1, 1 - mine.cost / other.cost
    taus = f"tau {mine.tau:.2f} against {other.tau:.2f}"
    costs = f"a round costs {mine.cost:.2f} plain ones against {other.cost:.2f}"
    if abs(more) < SAME:
        reason = f"it accepts as much ({taus}) and is cheaper ({costs})"
    elif abs(cheaper) < SAME:
        reason = f"it accepts more ({taus}) at the same price ({costs})"
    elif more > 0 and cheaper > 0:
        reason = f"it accepts more ({taus}) and is cheaper ({costs})"
    elif more > 0:
        reason = f"it accepts more ({taus}), which outweighs its price ({costs})"
    else:
        reason = f"it is cheaper ({costs}), which outweighs what it accepts ({taus})"
    then = "" if here is winner else f" when both had been trained for {here.seconds:.0f} s"
    return f"{winner.family} won: {free}{gain} with {verdict.plan}; beside {second.family}{then} {reason}"
