"""Who started this process as one of several, and what becomes of it when another of them dies."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

# Numbers that are all 0 in the first process, and what names the launch. torchrun may run inside SLURM.
LAUNCHERS = (
    (("RANK",), ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")),
    (("SLURM_PROCID",), ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
    (("NODE_RANK", "LOCAL_RANK"), ("MASTER_ADDR", "MASTER_PORT")),  # by hand
)
PARENT = "FOREDRAFT_RANK_0"  # process id, for ranks that Lightning starts
GRACE = 20.0  # seconds in which a process may find out and say by itself that another has died


class LostRankError(RuntimeError):
    """Another process of this run has died; the text is the one line that is shown (exit 1)."""


def launch() -> tuple[bool, str] | None:
    """Whether this process is the first of a launch, and a name that all processes of it share.

    None where nobody says: there is one process, or Lightning starts the others.
    """
    for numbers, names in LAUNCHERS:
        if numbers[0] in os.environ:
            first = not any(int(os.environ.get(number, 0)) for number in numbers)
            return first, " ".join(os.environ.get(name, "") for name in names)
    return None


def lived() -> float:
    """Seconds that this process has been there; 0 where the system does not say."""
    try:
        begun = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # ticks
        now = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return 0.0
    return max(0.0, now - begun / os.sysconf("SC_CLK_TCK")) if begun else 0.0


def watch(died: Callable[[], str | None], grace: float | None = None) -> None:
    """End this process after another, from a thread: it may hang in a collective, where no signal helps.

    Args:
        died: asked once a second; what to say if another process has died.
        grace: seconds that it has to find out by itself; GRACE if None.
    """

    def run() -> None:
        while not (text := died()):
            time.sleep(1.0)
        time.sleep(GRACE if grace is None else grace)
        print(f"error: {text}", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=run, daemon=True, name="watch").start()


def watch_parent() -> None:
    """In a rank that Lightning has started: end soon after rank 0, whoever has killed it."""
    parent = int(os.environ.get(PARENT, 0)) if int(os.environ.get("LOCAL_RANK", 0)) else 0
    if parent:
        watch(lambda: None if os.getppid() == parent else "rank 0 of this run has ended")
