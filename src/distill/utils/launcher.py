"""Detect launchers (torchrun, SLURM), and exit when another process of the run has died.

A launcher is known by its environment variables: `launch` says whether this process is the first, and what
all processes of the launch have in common. `watch` polls once a second and ends a process that hangs in a
collective, in which no signal handler of Python runs, `GRACE` seconds after another has died.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

# Variables that are all 0 in the first process, and those that identify the launch. torchrun comes first,
# since it may run inside SLURM.
LAUNCHERS = (
    (("RANK",), ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")),
    (("SLURM_PROCID",), ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
    (("NODE_RANK", "LOCAL_RANK"), ("MASTER_ADDR", "MASTER_PORT")),  # by hand
)
PARENT = "FOREDRAFT_RANK_0"  # process id of rank 0, for ranks that Lightning starts
GRACE = 20.0  # seconds for a process to notice by itself, and report, that another has died


class LostRankError(RuntimeError):
    """Another process of this run has died; shown as one line, exit code 1."""


def launch() -> tuple[bool, str] | None:
    """Whether this process is the first of its launch, and an identifier shared by all its processes.

    None without a launcher: there is one process, or Lightning starts the others.
    """
    for numbers, names in LAUNCHERS:
        if numbers[0] in os.environ:
            first = not any(int(os.environ.get(number, 0)) for number in numbers)
            return first, " ".join(os.environ.get(name, "") for name in names)
    return None


def process_age() -> float:
    """Seconds since this process started; 0 if unknown."""
    try:
        start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        now = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return 0.0
    return max(0.0, now - start_ticks / os.sysconf("SC_CLK_TCK")) if start_ticks else 0.0


def watch(died: Callable[[], str | None], grace: float | None = None) -> None:
    """Exit this process after another has died, from a thread: it may hang in a collective.

    Args:
        died: called once a second; returns the error message if another process has died.
        grace: seconds before the exit; None: GRACE.
    """

    def run() -> None:
        while not (text := died()):
            time.sleep(1.0)
        time.sleep(GRACE if grace is None else grace)
        print(f"error: {text}", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=run, daemon=True, name="watch").start()


def started_by_rank_0() -> int:
    """In a rank that Lightning started, the process id of rank 0, which has claimed the folder; else 0."""
    return int(os.environ.get(PARENT, 0)) if int(os.environ.get("LOCAL_RANK", 0)) else 0


def watch_parent() -> None:
    """In a rank that Lightning started: exit soon after rank 0."""
    if parent := started_by_rank_0():
        watch(lambda: None if os.getppid() == parent else "rank 0 of this run has ended")
