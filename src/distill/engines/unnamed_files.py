"""Files of hidden states that no answer named."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distill.engines.http import RetryPolicy
from distill.utils.progress import say

KEPT = "kept-{}.safetensors"  # states of answers, named by a hash of their tokens


class UnnamedFiles:
    """Files that no answer names: the engine wrote them for requests that timed out and were repeated.

    They are removed when no request is running. The folder is locked during this object's life, so that
    processes do not remove each other's files. Earlier files are kept.

    Attributes:
        size: bytes of the remaining files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.size = folder, 0
        self.removed = self.lost = self.under_way = 0
        self.turn = threading.Lock()
        self.before, self.lock = set[str](), None
        with suppress(OSError):  # a missing folder is reported when a file is missed
            self.before = {path.name for path in folder.iterdir()}
            self.lock = _Descriptor(folder)
            fcntl.flock(self.lock, fcntl.LOCK_SH)

    @contextmanager
    def asking(self, retry: RetryPolicy) -> Iterator[None]:
        """Context in which requests run; `retry` counts their failures; the last exit removes files."""
        failures = retry.failures
        with self.turn:
            self.under_way += 1
        try:
            yield
        finally:
            with self.turn:
                self.under_way -= 1
                self.lost += retry.failures - failures
                if not self.under_way:
                    self._remove()

    def end(self, seconds: float) -> None:
        """Wait for files that an engine may still write, and print how many were removed."""
        until = time.monotonic() + seconds
        with self.turn:
            self._remove()
            while self.removed < self.lost and time.monotonic() < until:
                time.sleep(0.05)
                self._remove()
            if self.removed:
                say(f"{self.folder}: {self.removed} files of hidden states that no answer named were removed")
            self.removed = self.lost = 0

    def _remove(self) -> None:
        with suppress(OSError):
            kept = KEPT.format("*")
            left = [p for p in self.folder.iterdir() if p.name not in self.before and not p.match(kept)]
            if not left or not self.lock:
                self.size = 0
                return
            if not self._only_one(self.lock):
                self.size = sum(path.stat().st_size for path in left)
                return
            for path in left:
                path.unlink(missing_ok=True)
                self.removed += path.suffix != ".lock"
            fcntl.flock(self.lock, fcntl.LOCK_SH)
            self.size = 0

    @staticmethod
    def _only_one(lock: _Descriptor) -> bool:
        """Whether this is the only process that uses the engine; if so, the lock becomes exclusive."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
            return False
        return True


class _Descriptor:
    """An open folder, closed with this object."""

    def __init__(self, folder: Path) -> None:
        self._number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def fileno(self) -> int:
        """For `fcntl`."""
        return self._number

    def __del__(self) -> None:
        if hasattr(self, "_number"):
            os.close(self._number)
