"""Scorecards in a run's folder."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from decode.errors import UserError
from decode.evaluation.scorecard import Scorecard, read_scorecard
from distill.config.choices import objective_name
from distill.losses.mix import Mix
from distill.utils.atomic_files import read_json
from distill.utils.paths import CONF
from distill.utils.redact import hidden, printable
from distill.utils.run_folder import checkpoints
from distill.utils.run_record import read_options
from drafters.hub import RECIPE


def objective_of(file: Path) -> str:
    """Objective of the run or the recipe around a scorecard's file; "" if unknown."""
    with suppress(UserError, KeyError, TypeError):
        if options := read_options(file.parents[2]):
            return objective_name(CONF, options.values["objective"])
    with suppress(UserError, KeyError, TypeError, AttributeError):
        objective = (read_json(file.with_name(RECIPE), "") or {})["objective"]
        kind = str(objective["is"])
        return "+".join(objective["terms"]) if kind == Mix.__name__ else kind.lower()
    return ""


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
