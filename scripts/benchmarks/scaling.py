"""Training on several processes against one, strategy by strategy."""

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

from decode.errors import UserError
from decode.hardware import hardware
from distill.config.validate import check_ranges
from distill.report.tables import grid
from distill.utils.atomic_files import write_json
from distill.utils.progress import bar
from distill.utils.provenance import commit

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
MEASURED = ("tokens_per_second", "peak_gib", "mfu")  # of what a run logs as train/...


def scaling(cfg: DictConfig, folder: Path) -> float:
    """Train with every strategy on every number of processes, in turns; a table, and `out` as JSON.

    Every process has as many rows as the one has (weak scaling), so efficiency is tokens a second over
    those of one process times their number.

    Args:
        cfg: composed from conf/benchmark_scaling.yaml.
        folder: unused; nothing is written but `out`, and rollouts below `rollouts`.

    Returns:
        The best efficiency of the largest number of processes.

    Raises:
        UserError: bad input, or a run that fails, with its last line.
    """
    del folder
    check_ranges(cfg)
    settings = [(trainer, count) for trainer in cfg.trainers for count in cfg.processes]
    found: dict[tuple[str, int], list[dict[str, float]]] = {setting: [] for setting in settings}
    load = [os.getloadavg()[0]]
    with bar(cfg.repeats * len(settings), "scaling", "runs", leave=False) as shown:
        for _ in range(cfg.repeats):
            for trainer, count in settings:
                found[trainer, count].append(_train(cfg, trainer, count))
                shown.update()
    load.append(os.getloadavg()[0])
    rows = [_row(setting, found) for setting in settings]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = {"hardware": hardware(device), "commit": commit(), "load": load}
    write_json(Path(cfg.out), {"what": "scaling", "rows": rows, "overrides": list(cfg.overrides), **where})
    print(
        grid(
            ["trainer", "processes", "tokens/s", "efficiency", "peak GiB", "MFU"],
            [_shown(row) for row in rows],
        )
    )
    print(f"{where['hardware']}, load {load[0]:.2f}..{load[1]:.2f}, commit {where['commit']}")
    return max(row["efficiency"] for row in rows if row["processes"] == max(cfg.processes))


def _train(cfg: DictConfig, trainer: str, count: int) -> dict[str, float]:
    """What one run logs: medians over its lines but the first, whose steps warm up."""
    with TemporaryDirectory(prefix="scaling-") as place:
        words = [f"trainer={trainer}", f"trainer.devices={count}", f"trainer.max_steps={cfg.steps}"]
        words += [f"trainer.log_every_n_steps={max(1, cfg.steps // 6)}", "score.enabled=false", "logger=csv"]
        words += ["resume=never", f"output_dir={Path(cfg.rollouts).resolve()}", f"hydra.run.dir='{place}'"]
        done = subprocess.run(
            [sys.executable, str(TRAIN), *words, *cfg.overrides],
            env={"OMP_NUM_THREADS": "1"} | os.environ,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise UserError(
                f"benchmark: trainer={trainer} on {count} processes: {said.removeprefix('error: ')}"
            )
        (log,) = Path(place).rglob("metrics.csv")
        with log.open() as lines:
            logged = list(csv.DictReader(lines))
    columns = {name: [float(v) for line in logged if (v := line.get(f"train/{name}"))] for name in MEASURED}
    return {name: median(values[1:] or values) for name, values in columns.items() if values}


def _row(setting: tuple[str, int], found: dict[tuple[str, int], list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over repeats; efficiency is the median over what the runs of one repeat have."""
    trainer, count = setting
    least = min(n for name, n in found if name == trainer)
    own, alone = found[setting], found[trainer, least]
    key = "tokens_per_second"
    shares = [run[key] * least / (first[key] * count) for run, first in zip(own, alone, strict=True)]
    medians = {name: median(run[name] for run in own) for name in MEASURED if name in own[0]}
    return {"trainer": trainer, "processes": count, "efficiency": median(shares), **medians}


def _shown(row: dict[str, Any]) -> list[str]:
    mfu = f"{row['mfu']:.0%}" if "mfu" in row else "-"
    speed, share = f"{row['tokens_per_second']:.0f}", f"{row['efficiency']:.0%}"
    return [row["trainer"], str(row["processes"]), speed, share, f"{row['peak_gib']:.2f}", mfu]
