"""Panel of a report with the families that `drafter=auto` compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from distill.report import page
from distill.report.history import History
from distill.utils.atomic_files import read_json

RECORD = "auto.json"  # of a search, in its run's folder
HEAD = ["family", "rung", "trained", "steps", "tau", "plan", "ms/round", "tokens/s", "speedup", "fate"]
RUNGS = {0: "-", -1: "last"}  # 0: drafters without training; -1: the winner, trained to the end


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


def families(run: History) -> Markup | None:
    """All families, rung by rung; None: no search."""
    advice = "resume=never starts another search; without the file, the report leaves the families out"
    if not (record := read_json(run.folder / RECORD, advice, rows=list, result=dict)):
        return None
    caption = (
        "Training continues for the faster half of each rung; speedups are predicted, over plain decoding. "
    )
    caption += record["result"].get("why", "The search has not ended.")
    return page.section(
        "Families compared", page.table(HEAD, lines(record["rows"])), caption=caption, wide=True
    )
