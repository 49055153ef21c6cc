"""The panel of a report that says how `drafter=auto` came to its drafter."""

from __future__ import annotations

from markupsafe import Markup

from distill.report import page
from distill.report.history import History
from distill.search.state import HEAD, RECORD, Ledger, lines


def families(run: History) -> Markup | None:
    """All that were compared, rung by rung; None: nobody searched."""
    if not (run.folder / RECORD).exists():
        return None
    found = Ledger.open(run.folder / RECORD)
    says = "Training goes on for the faster half of each rung; speedups are predicted, over plain decoding. "
    says += found.result.get("why", "The search has not ended.")
    return page.section("Families compared", page.table(HEAD, lines(found.rows)), says=says, wide=True)
