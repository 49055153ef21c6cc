"""Scorecards in a run's folder."""

from __future__ import annotations

import sys
from pathlib import Path

from decode.errors import UserError
from decode.evaluation.scorecard import Scorecard, read_scorecard
from distill.utils.redact import hidden, printable
from distill.utils.run_folder import checkpoints


def scorecards(folder: Path) -> dict[int, Scorecard]:
    """Scorecards of a run by the step of their checkpoint, oldest first; prints damaged ones."""
    cards = {}
    for checkpoint in checkpoints(folder):
        if (file := checkpoint / "score.json").exists():
            try:
                cards[int(checkpoint.name)] = read_scorecard(file)
            except UserError as error:
                print(printable(hidden(f"left out: {error}")), file=sys.stderr, flush=True)
    return cards
