"""Training runs of the bundled target, timed or scored: scripts/lab/benchmark.py fit | field."""

from __future__ import annotations

import csv
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from benchmarks.drafter_table.arms import Run, planned, train
from decode.errors import UserError
from decode.hardware import hardware
from distill.config.resolvers import device_of
from distill.config.validate import check_out, check_ranges
from distill.scoring.compare import scorecard
from distill.utils.atomic_files import write_json
from distill.utils.provenance import commit

SECONDS = "train/step_seconds"


def field(cfg: DictConfig, folder: Path) -> float:
    """Train and score one drafter of the bundled target, and write its scorecard without texts as `out`.

    Args:
        cfg: composed from conf/lab/field.yaml.
        folder: unused; the run goes below `runs`.

    Returns:
        tau of the headline.

    Raises:
        UserError: bad input, or the run failed.
    """
    del folder
    run, place = _trained(cfg)
    card = scorecard(place / run.name)
    write_json(Path(cfg.out), replace(card, samples=[]).to_json())
    return card.headline.tau


def fit(cfg: DictConfig, folder: Path) -> float:
    """Train one drafter without scores, and write the time of a step in the run as `out`.

    Args:
        cfg: composed from conf/lab/fit.yaml.
        folder: unused; the run goes below `runs`.

    Returns:
        Milliseconds of a step, the median over log lines.

    Raises:
        UserError: bad input, or the run failed.
    """
    del folder
    run, place = _trained(cfg)
    logged = _column(place / run.name, SECONDS)
    if not logged:
        raise UserError(f"benchmark fit: {run.name} has no {SECONDS}; train more steps")
    card: dict[str, Any] = {
        "what": "fit",
        "run": run.name,
        "words": list(run.words),
        "step_ms": 1000 * statistics.median(logged),
        "spread": [1000 * min(logged), 1000 * max(logged)],
        "hardware": hardware(torch.device(device_of(cfg.device))),
        "commit": commit(),
    }
    write_json(Path(cfg.out), card)
    print(f"{run.name}: {card['step_ms']:.1f} ms a step")
    return card["step_ms"]


def _trained(cfg: DictConfig) -> tuple[Run, Path]:
    """Train the first run of the arm, after the run that it reads; `also` follows its own words.

    A finished run of this commit is trained again, an interrupted one continues.

    Returns:
        The run, and the folder of this commit's runs.

    Raises:
        UserError: no such arm, or the run failed.
    """
    check_ranges(cfg)
    check_out(cfg)
    runs, place = planned(cfg), Path(cfg.runs) / commit()
    if (run := next((run for run in runs if run.arm == cfg.arm), None)) is None:
        known = dict.fromkeys(run.arm for run in runs)
        raise UserError(f"arm={cfg.arm}: there is none; choose one of {', '.join(known)}")
    needed = [one for one in runs if one.name == run.after]
    if cfg.steps is not None:
        needed = [one._replace(steps=cfg.steps) for one in needed]
        words = [word.replace(run.after, needed[0].name) if needed else word for word in run.words]
        run = run._replace(steps=cfg.steps if run.steps else 0, words=tuple(words))
    if _finished(place / run.name):
        shutil.rmtree(place / run.name)
    common = [f"trainer={cfg.device}", *map(str, cfg.common)]
    for one in (*needed, run):
        if not _finished(place / one.name):
            train(one._replace(words=(*one.words, *map(str, cfg.also))), place, common)
    return run, place


def _finished(folder: Path) -> bool:
    return (folder / "checkpoints" / "best").exists()


def _column(folder: Path, name: str) -> list[float]:
    """Values of a column of a run's CSV log."""
    values = []
    for path in sorted((folder / "csv").rglob("metrics.csv")):
        with path.open(newline="") as file:
            values += [float(line[name]) for line in csv.DictReader(file) if line.get(name)]
    return values
