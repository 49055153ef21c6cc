"""What a run wrote into its folder: scorecards, curves and configuration."""

from __future__ import annotations

import csv
import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

import distill.config.resolvers  # noqa: F401  that a configuration uses
from decode.errors import UserError
from decode.evaluation.scorecard import SCHEMA
from distill.utils.atomic_files import read_json
from distill.utils.redact import override, resolved, without_secrets
from distill.utils.run_folder import checkpoints

WRITTEN = ("run.json", "checkpoints", "csv")  # a run's folder has one of these
Curve = tuple[list[float], list[float]]  # optimizer steps, values


@dataclass(frozen=True, slots=True)
class History:
    """A run as its folder has it; what is not there is empty.

    Attributes:
        folder: of the run.
        cards: scorecards by step.
        best: step of the best one.
        curves: of everything logged in training, by name without `train/`.
        config: resolved, as YAML.
        overrides: that it was started with.
        started: seconds since 1970, or None.
    """

    folder: Path
    cards: dict[int, dict[str, Any]] = field(default_factory=dict)
    best: int | None = None
    curves: dict[str, Curve] = field(default_factory=dict)
    config: str = ""
    overrides: list[str] = field(default_factory=list)
    started: float | None = None

    @property
    def card(self) -> dict[str, Any] | None:
        """The best checkpoint's scorecard, or the newest."""
        if not self.cards:
            return None
        return self.cards[self.best if self.best in self.cards else max(self.cards)]


def read(folder: Path) -> History:
    """A run's folder, finished or not, of this version or an older one.

    Raises:
        UserError: no run there, or a file of it that cannot be read.
    """
    if not any((folder / name).exists() for name in WRITTEN):
        raise UserError(f"{folder}: no run there; give the folder that train.py printed")
    cards = {}
    for checkpoint in checkpoints(folder):
        if (place := checkpoint / "score.json").exists():
            cards[int(checkpoint.name)] = read_card(place)
    best = folder / "checkpoints" / "best"
    step = best.resolve().name
    config, overrides = _configuration(folder / ".hydra")
    started = None
    with suppress(ValueError, AttributeError):  # half a file, or another's: then it is not known
        started = (read_json(folder / "run.json") or {}).get("started")
    return History(
        folder,
        cards,
        int(step) if best.exists() and step.isdigit() else None,
        curves(folder / "csv"),
        config,
        overrides,
        started,
    )


def read_card(place: Path) -> dict[str, Any]:
    """What was measured, as it stands in a file.

    Raises:
        UserError: it is no scorecard, or one of another version.
    """
    card: Any = None
    try:
        card = json.loads(place.read_text())
        version = card["schema"]
    except (OSError, ValueError, TypeError, KeyError):
        version = "none"
    if version != SCHEMA:
        raise UserError(
            f"{place}: a scorecard of version {version}, this one reads {SCHEMA}; score the checkpoint again"
        )
    return card


def curves(folder: Path) -> dict[str, Curve]:
    """Of a CSV logger and its later parts: a run that went on at a step has a file from there."""
    parts = [(0, folder / "metrics.csv")]
    for path in folder.glob("from-*/metrics.csv"):
        begun = path.parent.name.removeprefix("from-")
        if begun.isdigit():
            parts.append((int(begun), path))
    parts = sorted((begin, path) for begin, path in parts if path.is_file())
    ends = [begin for begin, _ in parts[1:]] + [math.inf]
    found: dict[str, Curve] = {}
    for (_, path), end in zip(parts, ends, strict=False):
        with path.open(newline="", errors="replace") as handle:
            for line in csv.DictReader(part.replace("\0", "") for part in handle):  # as a crash may leave
                step = _number(line.get("step"))
                if step is not None and step < end:
                    _note(found, step, line)
    return found


def _note(found: dict[str, Curve], step: float, line: dict[str, Any]) -> None:
    for name, text in line.items():
        value = _number(text) if name and name.startswith("train/") else None
        if value is not None:
            steps, values = found.setdefault(name.removeprefix("train/"), ([], []))
            steps.append(step + 1)  # Lightning counts from 0
            values.append(value)


def _number(text: Any) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _configuration(folder: Path) -> tuple[str, list[str]]:
    """Resolved and without secrets."""
    try:
        config = OmegaConf.load(folder / "config.yaml")
        given: Any = OmegaConf.to_container(OmegaConf.load(folder / "overrides.yaml"), resolve=False)
    except (OSError, YAMLError):  # none, or half of one
        return "", []
    try:
        shown = resolved(config)
    except Exception:  # of any kind: resolvers are functions; another version may have had others
        shown = without_secrets(OmegaConf.to_container(config, resolve=False))
    return OmegaConf.to_yaml(OmegaConf.create(shown)), [override(str(one)) for one in given]
