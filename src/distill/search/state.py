"""What a run of `drafter=auto` knows and has spent: on file, in a table, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distill.report.search_panel import HEAD, lines
from distill.report.tables import grid
from distill.search.halving import Row, Verdict
from distill.utils.atomic_files import read_json, write_json

PAGE = "auto.md"


@dataclass
class Ledger:
    """Written after every change, so that a kill loses a job at most.

    Attributes:
        path: of the file.
        spent: seconds of the budget.
        rows: in the order in which they came to be.
        given: seconds of a family's next stretch, by "<rung>/<family>".
        searched: seconds for all rungs together.
        setup: seconds before the first step of the newest job that came to one.
        took: seconds of the parts of the work, and what had been expected.
        result: winner, plan, why.
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
        """Go on with what is there."""
        found = read_json(path) or {}
        rows = found.pop("rows", [])
        for row in rows:
            if row["verdict"]:
                row["verdict"] = Verdict(**row["verdict"])
        return cls(path, rows=[Row(**row) for row in rows], **found)

    def write(self) -> None:
        """To the file."""
        kept = {k: v for k, v in vars(self).items() if k not in ("path", "rows")}
        write_json(self.path, kept | {"rows": [asdict(row) for row in self.rows]})

    def row(self, rung: int, family: str) -> Row | None:
        """Of a family at a rung."""
        return next((r for r in self.rows if (r.rung, r.family) == (rung, family)), None)

    def trained(self, family: str) -> float:
        """Seconds so far."""
        return max((row.seconds for row in self.rows if row.family == family), default=0.0)

    def newest(self) -> list[Row]:
        """The last verdict on every family that has one."""
        found = {row.family: row for row in self.rows if row.verdict}
        return list(found.values())


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    return lines([asdict(row) for row in rows])


def text(rows: Sequence[Row]) -> str:
    """For a terminal."""
    return grid(HEAD, _cells(rows))


def markdown(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """For a page."""
    table = [HEAD, ["---"] * len(HEAD), *_cells(rows)]
    return "\n".join(["| " + " | ".join(row) + " |" for row in table] + ["", *notes]) + "\n"
