"""Panel of a report about the families that `drafter=auto` compared."""

from __future__ import annotations

from markupsafe import Markup

from distill.report import page
from distill.report.history import History
from distill.search.state import HEAD, RECORD, lines
from distill.utils.atomic_files import read_json


def families(run: History) -> Markup | None:
    """All families, rung by rung; None without a search."""
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
