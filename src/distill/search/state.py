"""State of a `drafter=auto` run: its JSON file and the result table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from decode.errors import UserError
from distill.scoring.tables import grid
from distill.search.halving import Row, Verdict
from distill.utils.atomic_files import read_json, write_json

PAGE = "auto.md"
RECORD = "auto.json"  # of a search, in its run's folder
HEAD = ["family", "rung", "trained", "steps", "tau", "plan", "ms/round", "tokens/s", "speedup", "fate"]
RUNGS = {0: "-", -1: "last"}  # 0: drafters without training; -1: the winner, trained to the end


@dataclass
class Ledger:
    """State of a search. It is written after every change, so that a killed run loses at most one job.

    Attributes:
        path: of the file.
        spent: seconds of the budget.
        rows: results in the order of evaluation.
        given: seconds of training, by "<rung>/<family>".
        searched: seconds for all rungs together.
        setup: seconds before the first training step of the newest job.
        took: seconds of each phase, and what was expected.
        result: winner, plan and reason.
    """

    path: Path
    spent: float = 0.0
    rows: list[Row] = field(default_factory=list)
    given: dict[str, float] = field(default_factory=dict)
    searched: float = 0.0
    setup: float = 0.0
    took: dict[str, float] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """Read the state from its file, or start an empty one.

        Raises:
            UserError: the file is damaged.
        """
        advice = "resume=never starts another search"
        values = read_json(path, advice) or {}
        try:
            rows = values.pop("rows", [])
            for row in rows:
                if row["verdict"]:
                    row["verdict"] = Verdict(**row["verdict"])
            return cls(path, rows=[Row(**row) for row in rows], **values)
        except (KeyError, TypeError):
            raise UserError(f"{path}: damaged; {advice}") from None

    def write(self) -> None:
        """Write the file."""
        values = {k: v for k, v in vars(self).items() if k not in ("path", "rows")}
        write_json(self.path, values | {"rows": [asdict(row) for row in self.rows]})

    def row(self, rung: int, family: str) -> Row | None:
        """The row of a family at a rung."""
        return next((r for r in self.rows if (r.rung, r.family) == (rung, family)), None)

    def trained(self, family: str) -> float:
        """Seconds that a family was trained so far."""
        return max((row.seconds for row in self.rows if row.family == family), default=0.0)

    def newest(self) -> list[Row]:
        """The last row with a verdict of every family."""
        last_rows = {row.family: row for row in self.rows if row.verdict}
        return list(last_rows.values())


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    return lines([asdict(row) for row in rows])


def text(rows: Sequence[Row]) -> str:
    """The table as plain text."""
    return grid(HEAD, _cells(rows))


def markdown(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The table as Markdown, followed by notes."""
    table = [HEAD, ["---"] * len(HEAD), *_cells(rows)]
    return "\n".join(["| " + " | ".join(row) + " |" for row in table] + ["", *notes]) + "\n"


def lines(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Table of the families compared, as text; tokens a second are of the whole batch."""
    table = []
    for row in rows:
        rung = RUNGS.get(row["rung"], str(row["rung"]))
        cells = [row["family"], rung, f"{row['seconds']:.0f} s", str(row["steps"])]
        if verdict := row["verdict"]:
            cells += [f"{verdict['tau']:.2f}", verdict["plan"], f"{1000 * verdict['round_seconds']:.1f}"]
            speedup = verdict["speed"] / verdict["plain_speed"]
            cells += [f"{verdict['speed']:.0f}", f"{speedup:.2f}x"]
        else:
            cells += ["-"] * 5
        table.append([*cells, row["fate"]])
    return table
