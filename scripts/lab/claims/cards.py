"""Scorecards of a folder of results: one file for each arm, number of steps and seed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from decode.errors import UserError
from decode.evaluation.rows import Row
from decode.evaluation.scorecard import Scorecard, read_scorecard

RESULTS = Path(__file__).resolve().parents[1] / "results"
TEMPERATURES = (0.0, 1.0)
NAME = re.compile(r"(?P<arm>.+)-(?P<steps>\d+)-(?P<seed>\d+)")
DIRTY = re.compile(r'"([0-9a-f]{7,40}-dirty)"')


class Result(NamedTuple):
    """A finished run.

    Attributes:
        arm: its name in the tables.
        steps: of training; 0: nothing is trained.
        seed: of weights, order of the rows and sampled anchors.
        card: its scorecard.
    """

    arm: str
    steps: int
    seed: int
    card: Scorecard

    def row(self, temperature: float, plan: str = "") -> Row | None:
        """The row of a plan at a temperature; of the first draft where none is named.

        Args:
            temperature: of the sampler.
            plan: name of the plan, with or without its parentheses.
        """
        rows = [row for row in self.card.rows if row.temperature == temperature and row.nodes]
        rows = [row for row in rows if not row.lossy]
        return next((row for row in rows if plan in ("", row.decode, row.decode.partition(" (")[0])), None)


class Line(NamedTuple):
    """All seeds of an arm with one number of steps."""

    arm: str
    steps: int
    results: list[Result]

    @property
    def name(self) -> str:
        """Beginning of its files' names."""
        return f"{self.arm}-{self.steps}"

    @property
    def trained(self) -> bool:
        """Whether it has weights, which another seed would make others."""
        return self.results[0].card.checkpoint.parameters > 0

    @property
    def plans(self) -> list[str]:
        """Names of its plans, the headline's first."""
        return list(dict.fromkeys(row.decode for row in self.results[0].card.rows if row.nodes))

    @property
    def minutes(self) -> float:
        """CPU minutes of the training steps, the mean over seeds."""
        return mean(one.card.checkpoint.train_cpu_seconds or 0.0 for one in self.results) / 60


def read_folder(folder: Path) -> list[Line]:
    """All results of a folder, by name.

    Raises:
        UserError: no results; a file's name, or a damaged one; a result of uncommitted changes.
    """
    results = []
    for file in sorted(folder.glob("*.json")):
        named = NAME.fullmatch(file.stem)
        if not named:
            raise UserError(f"{file}: results are named <arm>-<steps>-<seed>.json")
        refuse_dirty(file)
        numbers = int(named["steps"]), int(named["seed"])
        results.append(Result(named["arm"], *numbers, read_scorecard(file)))
    if not results:
        raise UserError(f"{folder}: no results there")
    return grouped(results)


def refuse_dirty(file: Path) -> None:
    """Refuse a result that came from uncommitted changes: nobody can make it again.

    Raises:
        UserError: a commit in the file ends in -dirty.
    """
    if found := DIRTY.search(file.read_text(encoding="utf-8")):
        raise UserError(
            f"{file}: made by uncommitted changes ({found[1]}); run it again from a commit, or remove it"
        )


def grouped(results: Sequence[Result]) -> list[Line]:
    """One line for each arm and number of steps, in the order of the results."""
    groups: dict[tuple[str, int], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.arm, result.steps].append(result)
    return [Line(*key, sorted(group, key=lambda one: one.seed)) for key, group in groups.items()]


def common_seeds(line: Line, other: Line) -> tuple[Line, Line]:
    """Two lines without the seeds that only one of them has."""
    both = {one.seed for one in line.results} & {one.seed for one in other.results}
    first, second = ([one for one in each.results if one.seed in both] for each in (line, other))
    return line._replace(results=first), other._replace(results=second)


def line_of(lines: Sequence[Line], name: str, folder: str) -> Line:
    """The line of a name such as `eagle-800`.

    Raises:
        UserError: there is none.
    """
    if (found := next((line for line in lines if line.name == name), None)) is None:
        raise UserError(f"{folder}: no {name}; there are {', '.join(line.name for line in lines)}")
    return found
