"""Lines of the table of results: one for all seeds of an arm with one number of steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

from scipy import stats

from benchmarks.drafter_table.arms import Run
from decode.evaluation.rows import Row
from decode.evaluation.scorecard import Scorecard
from distill.scoring.compare import draft_ms
from distill.scoring.tables import markdown

LEVELS = 4
TEMPERATURES = (0.0, 1.0)
HEAD = [
    *("drafter", "steps", "seeds", "tau, T=0", "tau, T=1", *(f"s_{j}" for j in range(1, LEVELS + 1))),
    *("speedup", "draft, ms", "CPU minutes", "parameters", "precision", "commit"),
]


class Result(NamedTuple):
    """A finished run."""

    run: Run
    card: Scorecard

    def row(self, temperature: float, plan: str = "") -> Row:
        """The row of a plan at a temperature; of the headline's where none is named."""
        rows = [row for row in self.card.rows if row.temperature == temperature and row.nodes]
        return next((row for row in rows if row.decode == plan), rows[0])


class Estimate(NamedTuple):
    """A mean with its 95 % interval."""

    value: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        low, high = format(self.low, form), format(self.high, form)
        return f"{format(self.value, form)} ({low}..{high})"


class Line(NamedTuple):
    """All seeds of an arm with one number of steps."""

    arm: str
    steps: int
    results: list[Result]

    def tau(self, temperature: float, plan: str = "") -> Estimate:
        """Mean over seeds; of one seed the interval over prompts, of several that of the mean (t)."""
        parts = [result.row(temperature, plan).acceptance for result in self.results]
        if len(parts) == 1:
            return Estimate(parts[0].tau, *parts[0].tau_interval)
        return _mean([part.tau for part in parts])

    def over(self, other: Line, temperature: float, plan: str = "") -> Estimate | None:
        """Difference of tau to another line, paired by seed; None where fewer than two seeds are in both."""
        theirs = {result.run.seed: result.row(temperature, plan).acceptance.tau for result in other.results}
        both = [result for result in self.results if result.run.seed in theirs]
        if len(both) < 2:
            return None
        mine = [(result.row(temperature, plan).acceptance.tau, result.run.seed) for result in both]
        return _mean([tau - theirs[seed] for tau, seed in mine])

    @property
    def plans(self) -> list[str]:
        """Names of its plans, the headline's first."""
        return list(dict.fromkeys(row.decode for row in self.results[0].card.rows if row.nodes))

    @property
    def minutes(self) -> float:
        """CPU minutes of the training steps, the mean over seeds."""
        return mean(one.card.checkpoint.train_cpu_seconds or 0.0 for one in self.results) / 60


def grouped(results: Sequence[Result]) -> list[Line]:
    """Lines of the table, the longest acceptance at T=0 first."""
    groups: dict[tuple[str, int], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.run.arm, result.run.steps].append(result)
    lines = [Line(*key, group) for key, group in groups.items()]
    return sorted(lines, key=lambda line: -line.tau(TEMPERATURES[0]).value)


def table(lines: Sequence[Line]) -> str:
    """The table of all lines."""
    return markdown([HEAD, *map(_cells, lines)])


def _mean(values: Sequence[float]) -> Estimate:
    """Mean of at least two values, with Student's interval."""
    value = mean(values)
    wide = float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return Estimate(value, value - wide, value + wide)


def _cells(line: Line) -> list[str]:
    checkpoint = line.results[0].card.checkpoint
    rows = [result.row(TEMPERATURES[0]) for result in line.results]
    shares = [row.acceptance.survival[:LEVELS] for row in rows]
    survival = [mean(column) for column in zip(*shares, strict=True)]
    return [
        line.arm,
        str(line.steps or ""),
        str(len(line.results)),
        *(f"{line.tau(temperature):.2f}" for temperature in TEMPERATURES),
        *(f"{share:.2f}" for share in survival),
        *("-" for _ in range(LEVELS - len(survival))),
        f"{mean(row.speed for row in rows):.2f}x",
        f"{mean(map(draft_ms, rows)):.1f}",
        f"{line.minutes:.1f}" if line.steps else "",
        f"{checkpoint.parameters / 1e6:.2f} M" if checkpoint.parameters else "",
        ", ".join(dict.fromkeys(one.card.checkpoint.train_precision for one in line.results)),
        ", ".join(dict.fromkeys(one.card.checkpoint.commit[:7] for one in line.results)),
    ]
