"""End a rank without training progress, from a thread, since a hanging collective blocks signals."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from typing_extensions import override

from distill.distributed.ranks import resume_hint

POLL = 1.0  # seconds between checks


class Watchdog(L.Callback):
    """Ends this process if, during training, it neither steps nor does declared work for some minutes.

    Each rank watches itself: the hanging rank and those that wait for it print a line and exit with code 1.
    The process group's timeout is no replacement. It raises only in waiting ranks, and would also end ranks
    that wait while rank 0 scores for hours.

    Args:
        minutes: allowed minutes without progress; 0: no limit.
        folder: folder of the run.
    """

    def __init__(self, minutes: float, folder: Path) -> None:
        self.minutes, self.folder = minutes, folder
        self._beats = 0  # progress counter, which the thread compares with its last value
        self._working = 0  # number of declared works in progress
        self._ended = threading.Event()
        self._where = "before the first step"

    @contextmanager
    def working(self) -> Iterator[None]:
        """Declare work that is no step and may take hours (a save point, rollouts), or waiting for it.

        Every rank declares it, including those that only wait for rank 0.
        """
        self._working += 1
        try:
            yield
        finally:
            self._beats += 1
            self._working -= 1

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.minutes:
            main = threading.get_ident()
            threading.Thread(
                target=self._watch, args=(trainer.global_rank, main), daemon=True, name="watchdog"
            ).start()

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._beats += 1
        self._where = f"in step {trainer.global_step + 1}"

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._beats += 1
        self._where = f"after step {trainer.global_step}"

    def end(self) -> None:
        """Stop watching: the fit is over."""
        self._ended.set()

    def _watch(self, rank: int, main: int) -> None:
        limit = 60.0 * self.minutes
        poll = min(POLL, limit / 10)
        idle, seen = 0.0, self._beats
        # Counts checks instead of time, so that a suspended process does not count as hanging.
        while not self._ended.wait(poll):
            idle += poll
            if self._working or self._beats != seen:
                idle, seen = 0.0, self._beats
            if idle >= limit:
                self._exit(rank, main)

    def _exit(self, rank: int, main: int) -> None:
        # private API: the standard library has no public way to see another thread's position.
        frame = sys._current_frames().get(main)
        place = ""
        if frame is not None:
            last = traceback.extract_stack(frame)[-1]
            place = f", at {last.name} ({Path(last.filename).name}:{last.lineno})"
        print(
            f"error: rank {rank} has made no progress for {self.minutes:g} minutes {self._where}{place}; "
            f"{resume_hint(self.folder)}; timeout_minutes= gives more time",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
