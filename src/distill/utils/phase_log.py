"""Duration and amount of work of each phase of a run: phases.json in the run's folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from distill.utils.atomic_files import read_json, write_json
from distill.utils.progress import first_rank, rank_and_world

FILE = "phases.json"
STARTING = "starting_seconds"  # amount of a phase: those of its seconds in which an engine started


@dataclass(frozen=True)
class Phase:
    """A phase that one start of a run completed.

    Attributes:
        name: prompts | rollouts | taps | training | checkpoints.
        seconds: wall time.
        processes: number of processes that shared the work.
        amounts: amounts of work: tokens, rows, bytes, steps, ...
    """

    name: str
    seconds: float
    processes: int = 1
    amounts: dict[str, float] = field(default_factory=dict)


class PhaseLog:
    """Appends phases to a run's file, on rank 0.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, seconds: float, **amounts: float) -> None:
        """Append a phase."""
        if first_rank():
            phase = Phase(name, seconds, rank_and_world()[1], amounts)
            phases = [*read_phases(self.folder), phase]
            write_json(self.folder / FILE, {"phases": [asdict(one) for one in phases]})

    @contextmanager
    def time(self, name: str) -> Iterator[dict[str, float]]:
        """Time a block and append its phase with the block's amounts; not if these are 0 or it raises."""
        amounts: dict[str, float] = {}
        begun = time.perf_counter()
        yield amounts
        if any(amounts.values()):
            self.add(name, time.perf_counter() - begun, **amounts)


def read_phases(folder: Path) -> list[Phase]:
    """Read the phases of a run, in the order of their ends.

    Raises:
        UserError: a damaged file.
    """
    found = read_json(folder / FILE, "remove it; the run continues without", phases=list)
    return [Phase(**one) for one in found["phases"]] if found else []
