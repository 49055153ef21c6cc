"""The number of the CPU's threads: as many as there are cores that other programs leave.

Where another program takes a core, each barrier waits for a thread that does not run, and rollouts take
several times as long. `scripts/lab/benchmark.py waiting` measures this.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median_low

import torch

from distill.utils.progress import say
from distill.utils.thread_spinning import COUNTS

EVERY, SAMPLES, PAUSE = 5.0, 5, 0.004  # seconds between counts; samples of one, and seconds between these
STAT = Path("/proc/stat")
_counted: dict[str, float] = {}


def fit_threads() -> None:
    """Use as many threads as there are cores that other programs leave; call it between passes.

    Does nothing if the user chose a number, or where the system does not say how many threads run.
    Programs are counted again after `EVERY` seconds.
    """
    now = time.monotonic()
    if now < _counted.get("next", 0.0) or any(name in os.environ for name in COUNTS):
        return
    if (others := busy_others()) is None:
        return
    _counted["next"] = now + EVERY
    most = int(_counted.setdefault("most", torch.get_num_threads()))
    count = max(1, min(most, len(os.sched_getaffinity(0)) - others))
    if count == torch.get_num_threads():
        return
    torch.set_num_threads(count)
    if "said" not in _counted:
        _counted["said"] = now
        say(
            f"threads: {count} of {most}, because other programs are busy; follows them, unless you set "
            f"{COUNTS[0]}"
        )


def busy_others() -> int | None:
    """Number of threads that run or could run, without the caller's; None if the system does not say.

    Reading takes a few milliseconds, in which this thread sleeps.
    """
    counts = []
    for _ in range(SAMPLES):
        time.sleep(PAUSE)
        try:
            lines = STAT.read_text().splitlines()
        except OSError:  # not Linux
            return None
        running = [line.split()[1] for line in lines if line.startswith("procs_running")]
        if not running:
            return None
        counts.append(max(0, int(running[0]) - 1))  # the caller runs while it reads
    return median_low(counts)
