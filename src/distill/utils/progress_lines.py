"""Lines of progress where no terminal shows bars: in a log file, in a notebook, in CI.

A line is written when something moves, at most one in `every` seconds for the whole process. A thread writes
the line of a task that does not move for that time, so that a log shows that the process is alive. It sleeps
until then, and ends with the last task.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from contextlib import suppress
from typing import NamedTuple, Protocol

from decode.errors import UserError
from distill.utils.redact import hidden, printable

VARIABLE = "FOREDRAFT_PROGRESS_SECONDS"
SECONDS = 30.0
log = logging.getLogger("foredraft")


class State(NamedTuple):
    """State of a task.

    Attributes:
        what: name of the task.
        n: units done.
        total: units in all; 0: unknown.
        unit: unit of both; empty: nothing is counted.
        initial: units that were done when the task began.
        seconds: since then.
        worked: of these, without the time of tasks inside it.
        note: more to show, such as a loss.
    """

    what: str
    n: int
    total: int
    unit: str
    initial: int
    seconds: float
    worked: float
    note: str

    def line(self) -> str:
        """One line, as in `rollouts 412/1,200 answers, 3.1 a second, 4 min left`."""
        if not self.unit:
            return f"{self.what}, since {duration(self.seconds)}"
        name = self.what + ":" * self.what[-1].isdigit()
        unit = f" {self.unit}" * (self.unit != self.what)
        words = [f"{name} {self.n:,}{f'/{self.total:,}' if self.total else ''}{unit}"]
        done = self.n - self.initial
        if done > 0 and self.worked > 0:
            rate = done / self.worked
            words.append(f"{rate:,.1f} a second" if rate >= 0.95 else f"{duration(1 / rate)} each")
            if self.total > self.n:  # the tasks inside occur in the remaining work too
                words.append(f"{duration((self.total - self.n) * self.seconds / done)} left")
        return ", ".join([*words, *filter(None, [self.note])])


class Task(Protocol):
    """What has a state."""

    def state(self) -> State:
        """Return the state."""
        ...


class Lines:
    """The tasks of a process, and the clock of their lines."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all tasks: in a forked child, which has no thread of its parent."""
        self._tasks: list[Task] = []  # the innermost is last
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._last = time.monotonic()

    def add(self, task: Task) -> None:
        """Show a task until it is removed.

        Raises:
            UserError: see `every`.
        """
        self._every = every()
        with self._lock:
            if not self._tasks and self._every:
                self._ended = threading.Event()
                threading.Thread(target=self._watch, args=(self._ended,), daemon=True).start()
            self._tasks.append(task)
        self.moved(task)

    def remove(self, task: Task) -> None:
        """Show a task no longer; the thread ends with the last one."""
        with self._lock:
            if task in self._tasks:
                self._tasks.remove(task)
            if not self._tasks:
                self._ended.set()

    def moved(self, task: Task) -> None:
        """Write the task's line, if it is time for one; a forked child writes none of its parent's tasks."""
        if time.monotonic() - self._last >= self._every and task in self._tasks:
            with self._lock:
                self._write(task)

    def _write(self, task: Task) -> None:
        write(task.state().line())
        self._last = time.monotonic()

    def _watch(self, ended: threading.Event) -> None:
        """Write the line of the innermost task where nothing moves."""
        # One second more: a task that moves writes its own line.
        while not ended.wait(max(0.0, self._last + self._every - time.monotonic()) + 1):
            with self._lock, suppress(OSError, ValueError):  # a closed stream: the program ends
                if self._tasks and time.monotonic() - self._last >= self._every:
                    self._write(self._tasks[-1])


def every() -> float:
    """Seconds between two lines.

    Raises:
        UserError: the environment variable is no number of seconds.
    """
    text = os.environ.get(VARIABLE) or str(SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise UserError(f"{VARIABLE}={text}: give the seconds between two lines of progress, such as 30")
    return seconds


def write(text: str) -> None:
    """Write a line to the logger `foredraft` if a handler takes it, else to stderr; without secrets."""
    text = printable(hidden(text))
    if log.isEnabledFor(logging.INFO) and _handled():
        log.info("%s", text)
        return
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _handled() -> bool:
    """Whether a handler of the logger or of its parents takes such a line."""
    logger: logging.Logger | None = log
    while logger:
        if any(handler.level <= logging.INFO for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def clock(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """Format seconds in words, as in 3.4 s, 90 s, 4 min, 2 h 10 min."""
    if seconds < 119.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
