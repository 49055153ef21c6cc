"""End a rank whose training makes no progress, from a thread: a hanging collective takes no signal."""

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

POLL = 1.0  # seconds between two looks at the progress


class Watchdog(L.Callback):
    """Ends this process if, while it trains, it neither steps nor does declared work for some minutes.

    Each rank watches itself: the one that hangs and those that wait for it end with a line of their own
    and exit code 1. The timeout of the process group could not do this. It raises in the ranks that wait,
    not in the one that hangs, and it would also end those that wait while rank 0 scores for hours.

    Args:
        minutes: without progress; 0: forever.
        folder: of the run.
    """

    def __init__(self, minutes: float, folder: Path) -> None:
        self.minutes, self.folder = minutes, folder
        self._beats = 0  # counts progress; the thread compares it with what it saw before
        self._working = 0  # declared works that are under way
        self._ended = threading.Event()
        self._where = "before the first step"

    @contextmanager
    def working(self) -> Iterator[None]:
        """Declare work that is no step and may take hours (a save point, rollouts), or a wait for it.

        Every rank declares it, also those that only wait for rank 0: it watches itself.
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
        # Looks are counted, not the clock: a process that was suspended has not hung.
        while not self._ended.wait(poll):
            idle += poll
            if self._working or self._beats != seen:
                idle, seen = 0.0, self._beats
            if idle >= limit:
                self._exit(rank, main)

    def _exit(self, rank: int, main: int) -> None:
        # private API: the standard library has no other way to see where another thread is.
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
