"""Detect launchers (torchrun, SLURM), and exit when another process of the run has died.

Launchers are detected by environment variables: `launch` returns whether this process is the first, and an
identifier of the launch. `watch` polls once a second. `GRACE` seconds after another process has died, it ends
this one, which may hang in a collective where Python's signal handlers do not run.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

# Variables that are all 0 in the first process, and variables that identify the launch. torchrun is first,
# since it may run inside SLURM.
LAUNCHERS = (
    (("RANK",), ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")),
    (("SLURM_PROCID",), ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
    (("NODE_RANK", "LOCAL_RANK"), ("MASTER_ADDR", "MASTER_PORT")),  # manual launch
)
PARENT = "FOREDRAFT_RANK_0"  # process id of rank 0, for ranks that Lightning starts
GRACE = 20.0  # seconds for a process to detect and report a death itself
TOLD = 10.0  # seconds for rank 0 to report an error that all ranks have


class LostRankError(RuntimeError):
    """Another process of this run has died; printed as one line, exit code 1."""


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
    """Exit this process after another has died; runs in a thread, since it may hang in a collective.

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
    """Process id of rank 0, which has claimed the folder, in a rank started by Lightning; else 0."""
    return int(os.environ.get(PARENT, 0)) if int(os.environ.get("LOCAL_RANK", 0)) else 0


def reported_by_rank_0() -> bool:
    """In a rank that Lightning started and that has failed, wait for rank 0, which may have the same error.

    Returns:
        Whether rank 0 has ended, so that its line is enough; False in rank 0 itself.
    """
    parent, end = started_by_rank_0(), time.monotonic() + TOLD
    while parent and time.monotonic() < end:
        if os.getppid() != parent:
            return True
        time.sleep(0.1)
    return False


def watch_parent() -> None:
    """In a rank started by Lightning, exit soon after rank 0."""
    if parent := started_by_rank_0():
        watch(lambda: None if os.getppid() == parent else "rank 0 of this run has ended")
