"""Time of rollouts next to busy processes, for each way in which threads wait for one another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from distill.utils.phase_log import read_phases
from distill.utils.progress import bar
from distill.utils.provenance import commit
from distill.utils.thread_spinning import NAMES

TRAIN = Path(__file__).resolve().parents[3] / "train.py"
LOOP = "while True: pass"


def waiting(cfg: DictConfig, folder: Path) -> float:
    """Make rollouts with every setting and every number of busy loops, in turn; write `out` as JSON.

    Args:
        cfg: composed from conf/lab/waiting.yaml.
        folder: unused; nothing is written but `out`.

    Returns:
        The largest ratio of the first setting's times with busy loops to its time without.

    Raises:
        UserError: bad input, or a run that fails, with its last line.
    """
    del folder
    check_ranges(cfg)
    cases = [(str(setting), int(loops)) for loops in cfg.loops for setting in cfg.settings]
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    with loads() as load, bar(cfg.repeats * len(cases), "waiting", "runs", leave=False) as progress:
        for _ in range(cfg.repeats):
            for setting, loops in cases:
                with _busy(loops, cfg.core):
                    seconds[setting, loops].append(_rollouts(setting, cfg.count, list(cfg.overrides)))
                progress.update()
    medians = {case: median(times) for case, times in seconds.items()}
    conditions = {"hardware": hardware(torch.device("cpu")), "commit": commit(), "load": load}
    rows = [
        {"setting": setting, "loops": loops, "seconds": seconds[setting, loops]} for setting, loops in cases
    ]
    write_json(Path(cfg.out), {"what": "waiting", "count": cfg.count, "rows": rows, **conditions})
    print(grid(["seconds with busy loops:", *map(str, cfg.loops)], _lines(cfg, medians)))
    print(f"{conditions['hardware']}, load {span(load, 2)}, commit {conditions['commit']}")
    alone, first = int(cfg.loops[0]), str(cfg.settings[0])
    return max(medians[first, int(loops)] for loops in cfg.loops) / medians[first, alone]


def _lines(cfg: DictConfig, medians: Mapping[tuple[str, int], float]) -> list[list[str]]:
    """A line per setting: seconds, and the ratio to its own time with the first number of loops."""

    def cell(setting: str, loops: int) -> str:
        own = medians[setting, loops]
        return f"{own:.1f} ({own / medians[setting, int(cfg.loops[0])]:.2f}x)"

    return [[str(s) or "none", *(cell(str(s), int(loops)) for loops in cfg.loops)] for s in cfg.settings]


def environment(setting: str) -> dict[str, str]:
    """This process's environment with the variables of a setting, as in `A=1 B=2`, and no others like them.

    Raises:
        UserError: a part without `=`.
    """
    pairs = [part.partition("=") for part in setting.split()]
    if wrong := [name for name, sign, _ in pairs if not sign]:
        raise UserError(f"settings: {wrong[0]}: write variables as NAME=VALUE, with spaces between them")
    ours = (*NAMES, "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {name: value for name, _, value in pairs}


@contextmanager
def _busy(loops: int, core: int | None) -> Iterator[None]:
    """Run so many busy processes, all on one core if it is given."""
    running = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(loops)]
    try:
        for process in running:
            if core is not None:
                os.sched_setaffinity(process.pid, {core})
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def _rollouts(setting: str, answers: int, overrides: Sequence[str]) -> float:
    """Seconds of the rollouts of the first command, without its start."""
    with TemporaryDirectory(prefix="waiting-") as folder:
        options: list[Any] = ["experiment=quick", f"prompts.self={answers}", "trainer.max_steps=1"]
        options += ["score.enabled=false", "logger=csv", "resume=never", f"output_dir={folder}/outputs"]
        run = [f"hydra.run.dir='{folder}/run'"]
        process = subprocess.run(
            [sys.executable, str(TRAIN), *options, *overrides, *run],
            env=environment(setting),
            capture_output=True,
            text=True,
        )
        if process.returncode:
            message = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            raise UserError(f"benchmark: {setting}: {message.removeprefix('error: ')}")
        return next(phase.seconds for phase in read_phases(Path(folder) / "run") if phase.name == "rollouts")
