"""Weak scaling of training over processes, for each strategy."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from omegaconf import DictConfig

from benchmarks.common import loads, span
from decode.errors import UserError
from decode.hardware import hardware
from distill.config.validate import check_ranges
from distill.scoring.tables import grid
from distill.utils.atomic_files import write_json
from distill.utils.progress import bar
from distill.utils.provenance import commit

TRAIN = Path(__file__).resolve().parents[3] / "train.py"
METRICS = ("tokens_per_second", "peak_gib", "mfu")  # logged as train/...


def scaling(cfg: DictConfig, folder: Path) -> float:
    """Train with every strategy on every number of processes in turn; print a table, write `out` as JSON.

    Every process has the same number of rows (weak scaling): efficiency is tokens per second, over the
    number of processes times those of one process.

    Args:
        cfg: composed from conf/lab/scaling.yaml.
        folder: unused; nothing is written but `out`, and rollouts below `rollouts`.

    Returns:
        The best efficiency of the largest number of processes.

    Raises:
        UserError: bad input, or a run that fails, with its last line.
    """
    del folder
    check_ranges(cfg)
    settings = [(trainer, count) for trainer in cfg.trainers for count in cfg.processes]
    results: dict[tuple[str, int], list[dict[str, float]]] = {setting: [] for setting in settings}
    with loads() as load, bar(cfg.repeats * len(settings), "scaling", "runs", leave=False) as progress:
        for _ in range(cfg.repeats):
            for trainer, count in settings:
                results[trainer, count].append(_train(cfg, trainer, count))
                progress.update()
    rows = [_row(setting, results) for setting in settings]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    conditions = {"hardware": hardware(device), "commit": commit(), "load": load}
    write_json(
        Path(cfg.out), {"what": "scaling", "rows": rows, "overrides": list(cfg.overrides), **conditions}
    )
    print(
        grid(
            ["trainer", "processes", "tokens/s", "efficiency", "peak GiB", "MFU"],
            [_cells(row) for row in rows],
        )
    )
    print(f"{conditions['hardware']}, load {span(load, 2)}, commit {conditions['commit']}")
    return max(row["efficiency"] for row in rows if row["processes"] == max(cfg.processes))


def _train(cfg: DictConfig, trainer: str, count: int) -> dict[str, float]:
    """Metrics of one run: medians over its log lines, without the first (warm-up)."""
    with TemporaryDirectory(prefix="scaling-") as folder:
        options = [f"trainer={trainer}", f"trainer.devices={count}", f"trainer.max_steps={cfg.steps}"]
        options += [
            f"trainer.log_every_n_steps={max(1, cfg.steps // 6)}",
            "score.enabled=false",
            "logger=csv",
        ]
        options += [
            "resume=never",
            f"output_dir={Path(cfg.rollouts).resolve()}",
            f"hydra.run.dir='{folder}'",
        ]
        process = subprocess.run(
            [sys.executable, str(TRAIN), *options, *cfg.overrides],
            env={"OMP_NUM_THREADS": "1"} | os.environ,
            capture_output=True,
            text=True,
        )
        if process.returncode:
            message = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            raise UserError(
                f"benchmark: trainer={trainer} on {count} processes: {message.removeprefix('error: ')}"
            )
        (log,) = Path(folder).rglob("metrics.csv")
        with log.open() as lines:
            records = list(csv.DictReader(lines))
    columns = {name: [float(v) for line in records if (v := line.get(f"train/{name}"))] for name in METRICS}
    return {name: median(values[1:] or values) for name, values in columns.items() if values}


def _row(setting: tuple[str, int], results: dict[tuple[str, int], list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over repeats; efficiency is the median of the ratios within repeats."""
    trainer, count = setting
    least = min(n for name, n in results if name == trainer)
    runs, baselines = results[setting], results[trainer, least]
    key = "tokens_per_second"
    shares = [run[key] * least / (first[key] * count) for run, first in zip(runs, baselines, strict=True)]
    medians = {name: median(run[name] for run in runs) for name in METRICS if name in runs[0]}
    return {"trainer": trainer, "processes": count, "efficiency": median(shares), **medians}


def _cells(row: dict[str, Any]) -> list[str]:
    mfu = f"{row['mfu']:.0%}" if "mfu" in row else "-"
    speed, share = f"{row['tokens_per_second']:.0f}", f"{row['efficiency']:.0%}"
    return [row["trainer"], str(row["processes"]), speed, share, f"{row['peak_gib']:.2f}", mfu]
