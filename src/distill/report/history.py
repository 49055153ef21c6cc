"""Read a run's folder: scorecards, curves and configuration."""

from __future__ import annotations

import csv
import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode.errors import UserError
from decode.evaluation.scorecard import Scorecard
from distill.config.recorded import readable_overrides
from distill.scoring.run_scorecards import scorecards
from distill.utils.atomic_files import read_json
from distill.utils.run_folder import RECORD, is_step
from distill.utils.run_record import read_options

LATEST = 2**32  # seconds since 1970 (year 2106); later dates are invalid
WRITTEN = (RECORD, "checkpoints", "csv")  # a run's folder has at least one of these
Curve = tuple[list[float], list[float]]  # optimizer steps, values


@dataclass(frozen=True, slots=True)
class History:
    """Contents of a run's folder; fields without a file are empty.

    Attributes:
        folder: folder of the run.
        cards: scorecards by step.
        best: step of the best scorecard.
        curves: everything logged in training, by name without `train/`.
        config: options of the run as YAML, with what chose open ones; "" in runs of older versions.
        overrides: overrides of the command line.
        started: seconds since 1970, or None.
    """

    folder: Path
    cards: dict[int, Scorecard] = field(default_factory=dict)
    best: int | None = None
    curves: dict[str, Curve] = field(default_factory=dict)
    config: str = ""
    overrides: list[str] = field(default_factory=list)
    started: float | None = None

    @property
    def card(self) -> Scorecard | None:
        """The best checkpoint's scorecard, or the newest."""
        if not self.cards:
            return None
        return self.cards[self.best if self.best in self.cards else max(self.cards)]


def read(folder: Path) -> History:
    """Read a run's folder, finished or not.

    Raises:
        UserError: no run in the folder, or an unreadable file.
    """
    if not any((folder / name).exists() for name in WRITTEN):
        raise UserError(f"{folder}: no run there; give the folder that the run printed")
    best = folder / "checkpoints" / "best"
    step = best.resolve().name if best.exists() else ""
    started, config = None, ""
    with suppress(UserError):  # damaged: the page omits them
        started = (read_json(folder / RECORD, "", started=(int, float)) or {}).get("started")
    with suppress(UserError):
        options = read_options(folder)
        config = options.as_text() if options else ""
    return History(
        folder,
        scorecards(folder),
        int(step) if is_step(step) else None,
        curves(folder / "csv"),
        config,
        readable_overrides(folder),
        started if started and 0 < started < LATEST else None,
    )


def curves(folder: Path) -> dict[str, Curve]:
    """Read the values of the CSV logger; a resumed run has a new file from its first step."""
    parts = [(0, folder / "metrics.csv")]
    for path in folder.glob("from-*/metrics.csv"):
        first_step = path.parent.name.removeprefix("from-")
        if is_step(first_step):
            parts.append((int(first_step), path))
    parts = sorted((begin, path) for begin, path in parts if path.is_file())
    ends = [begin for begin, _ in parts[1:]] + [math.inf]
    by_name: dict[str, Curve] = {}
    for (_, path), end in zip(parts, ends, strict=False):
        # An unterminated field: keep the lines before it.
        with path.open(newline="", errors="replace") as handle, suppress(csv.Error):
            for line in csv.DictReader(part.replace("\0", "") for part in handle):  # a crash can leave NULs
                step = _number(line.get("step"))
                if step is not None and step < end:
                    _add(by_name, step, line)
    return by_name


def _add(by_name: dict[str, Curve], step: float, line: dict[str, Any]) -> None:
    for name, text in line.items():
        value = _number(text) if name and name.startswith("train/") else None
        if value is not None:
            steps, values = by_name.setdefault(name.removeprefix("train/"), ([], []))
            steps.append(step + 1)  # Lightning counts from 0
            values.append(value)


def _number(text: Any) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
