"""A last line when a signal ends a run outside of training, which stops by itself (`graceful_shutdown`).

A handler of Python runs only between two of its instructions, and a process may be within a matrix product
or wait for other ranks. So a thread reads the numbers of signals, which the interpreter writes into a pipe.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STDERR = 2


@contextmanager
def closing_line(folder: Path) -> Iterator[None]:
    """Within the block, SIGTERM and SIGUSR1 end the process at once, as by default, after a line.

    Where another handler is set, such as that of training, it does what it does.

    Args:
        folder: of the run, which the same command continues.
    """
    ours = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread() or not ours:  # required by Python
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in ours:
        signal.signal(number, _noted)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watching = threading.Thread(target=_watch, args=(reading, folder), daemon=True)
    watching.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        for number in ours:
            if signal.getsignal(number) is _noted:
                signal.signal(number, signal.SIG_DFL)
        os.close(writing)  # ends the thread
        watching.join()
        os.close(reading)


def _noted(number: int, frame: FrameType | None) -> None:
    """A handler, so that the interpreter writes the signal into the pipe."""
    del number, frame


def _watch(reading: int, folder: Path) -> None:
    while read := os.read(reading, 1):
        number = read[0]
        if number in SIGNALS and signal.getsignal(number) is _noted:
            name = signal.Signals(number).name
            line = f"stopped by {name}: what is finished is kept; the same command continues in {folder}\n"
            os.write(STDERR, line.encode())  # a stream may be locked by the thread that was interrupted
            os._exit(128 + number)  # as by default: without cleaning up, so a blocked process ends too
