"""Time and memory of what a training run does before its first step, by the number of records."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch
from omegaconf import DictConfig

from benchmarks.common import loads, span
from decode.errors import UserError
from decode.hardware import hardware
from distill.cli.main import rewrite
from distill.config.build import PromptReader, TargetSource
from distill.config.compose import compose
from distill.config.read import checked_options
from distill.config.validate import check_ranges
from distill.data.batches import RolloutBatches
from distill.data.rows import open_rows
from distill.options.run import TrainOptions
from distill.rollouts.produce import fill, open_store, rollout_plan
from distill.scoring.tables import grid
from distill.utils.atomic_files import write_json
from distill.utils.paths import CONF
from distill.utils.progress import bar
from distill.utils.provenance import commit
from distill.utils.run_folder import DONE

TRAIN = Path(__file__).resolve().parents[3] / "train.py"
WORDS = ["the", "of", "a", "river", "in", "stone", "and", "seven", "to", "house", "green", "letter", "water"]
PHASES = (
    *("read", "read again", "plan", "make shards", "check shards", "open rows", "open again", "first batch"),
    "restart",
)


@dataclass
class Phases:
    """CPU seconds of each phase, those of child processes included, and the memory after all of them."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_gib: float = 0.0

    def time(self, name: str, call: Callable[[], Any]) -> Any:
        """Call and time it."""
        begun = _cpu()
        result = call()
        self.seconds[name] = _cpu() - begun
        self.peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return result


def scale(cfg: DictConfig, folder: Path) -> float:
    """Measure each number of records in a process of its own; print a table, write `out` as JSON.

    Args:
        cfg: composed from conf/lab/scale.yaml.
        folder: unused.

    Returns:
        The highest exponent of growth between the two largest sizes, of phases of a second or more.

    Raises:
        UserError: a run fails, with its last line.
    """
    del folder
    check_ranges(cfg)
    sizes = [(1, n) for n in cfg.records] + [(cfg.turns, n) for n in cfg.conversations]
    root, rows = Path(cfg.runs).resolve(), []
    shutil.rmtree(root, ignore_errors=True)
    with loads() as load, bar(len(sizes), "scale", "sizes", leave=False) as progress:
        for turns, count in sizes:
            place = root / f"{count}-{turns}"
            rows.append({"turns": turns, "records": count} | _measured(place, turns, count, cfg.batch_size))
            shutil.rmtree(place)
            progress.update()
    growth = {turns: exponents([r for r in rows if r["turns"] == turns]) for turns in dict(sizes)}
    conditions = {"hardware": hardware(torch.device("cpu")), "commit": commit(), "load": load}
    write_json(Path(cfg.out), {"what": "scale", "rows": rows, "exponents": growth, **conditions})
    head = [
        "turns",
        "records",
        *(f"{name}, s" for name in PHASES),
        "peak, GiB",
        "restart, GiB",
        "restart, wall s",
    ]
    cells = [[str(row["turns"]), str(row["records"]), *map(_short, _columns(row))] for row in rows]
    powers = [
        [str(turns), "exponent", *(f"{e[name]:.2f}" if name in e else "" for name in PHASES), "", "", ""]
        for turns, e in growth.items()
    ]
    print(grid(head, cells + powers))
    print(f"{conditions['hardware']}, load {span(load, 2)}, commit {conditions['commit']}")
    return max((power for e in growth.values() for power in e.values()), default=0.0)


def exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Exponent of growth of each phase between the two largest sizes, where the larger takes a second."""
    if len(rows) < 2:
        return {}
    small, large = sorted(rows, key=lambda row: row["records"])[-2:]
    factor = math.log(large["records"] / small["records"])
    pairs = {name: (small["seconds"][name], seconds) for name, seconds in large["seconds"].items()}
    return {name: math.log(b / max(a, 1e-3)) / factor for name, (a, b) in pairs.items() if b >= 1}


def _columns(row: dict[str, Any]) -> list[float]:
    seconds = [row["seconds"][name] for name in PHASES]
    return [*seconds, row["peak_gib"], row["restart_gib"], row["restart_wall"]]


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _measured(place: Path, turns: int, count: int, batch_size: int) -> dict[str, Any]:
    """Phases of one size in a new process, then a run and its restart before its last step."""
    place.mkdir(parents=True)
    write_records(place / "records.jsonl", turns, count)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # a new process: its peak memory is its own
        phases = pool.submit(measure, place, batch_size).result()
    options = [*_options(place, batch_size), "trainer.max_steps=2", "score.every=1"]
    _train(options, place)
    _undo(place / "run", step=2)
    begun, before = time.perf_counter(), _cpu()
    peak = _train(options, place)
    restart = {"restart_wall": time.perf_counter() - begun, "restart_gib": peak}
    return {"seconds": phases.seconds | {"restart": _cpu() - before}, "peak_gib": phases.peak_gib} | restart


def _undo(run: Path, step: int) -> None:
    """Leave a finished run as one that was killed before its last step."""
    (run / DONE).unlink()
    shutil.rmtree(run / "checkpoints" / str(step))


def write_records(path: Path, turns: int, count: int) -> None:
    """Synthetic records, no two of them alike."""
    random = Random(count)

    def text(words: int) -> str:
        return " ".join(random.choices(WORDS, k=words))

    with path.open("w") as file:
        for number in range(count):
            messages = [
                {"role": role, "content": f"{number}.{turn} {text(words)}"}
                for turn in range(turns)
                for role, words in (("user", 8), ("assistant", 12))
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def measure(place: Path, batch_size: int) -> Phases:
    """The phases of a training run up to its first batch, by the functions that a run calls."""
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")
    phases = Phases()
    with (place / "output").open("w") as file, redirect_stdout(file), redirect_stderr(file):
        options = checked_options(TrainOptions, compose(rewrite(_options(place, batch_size), CONF), CONF))
        phases.time("read", lambda: PromptReader.of_run(options).read_for_run(place))
        chat, prompts, _ = phases.time("read again", lambda: PromptReader.of_run(options).read_for_run(place))
        target = TargetSource(options.target).load(decodes=False)
        plan = phases.time("plan", lambda: rollout_plan(options, target, chat, prompts))
        store = open_store(options, Path(options.output_dir) / "rollouts", target, chat, plan, prompts)
        phases.time("make shards", lambda: fill(options, target, chat, store, None, None))
        phases.time("check shards", lambda: fill(options, target, chat, store, None, None))
        phases.time("open rows", lambda: open_rows(store))
        rows = phases.time("open again", lambda: open_rows(store))
        phases.time(
            "first batch", lambda: RolloutBatches(rows, batch_size, 2, max_tokens=options.max_tokens)[0]
        )
    return phases


def _options(place: Path, batch_size: int) -> list[str]:
    return [
        *("rollout=given", f"prompts={place / 'records.jsonl'}", f"output_dir={place}"),
        *("score.enabled=false", "taps=online", "logger=csv", "max_tokens=512", f"batch_size={batch_size}"),
        "try_largest=false",
    ]


def _train(options: list[str], place: Path) -> float:
    """Run train.py; returns its peak memory in GiB."""
    process = subprocess.Popen(
        [sys.executable, str(TRAIN), *options, f"hydra.run.dir={place / 'run'}"],
        env=os.environ | {"XDG_CACHE_HOME": str(place / "cache")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    error = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise UserError(f"benchmark scale: {(error.strip().splitlines() or [f'status {status}'])[-1]}")
    return usage.ru_maxrss / 2**20


def _cpu() -> float:
    """CPU seconds of this process and of those it has waited for."""
    return sum(os.times()[:4])
