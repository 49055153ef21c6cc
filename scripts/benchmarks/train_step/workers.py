"""Processes that run training steps when told to, and their turns on one core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.errors import UserError

HERE = Path(__file__).resolve().parent
LAST_WORDS = 2000  # bytes of what a worker wrote before it ended


@dataclass(frozen=True, slots=True)
class Contender:
    """One case in one environment.

    Attributes:
        name: in the table.
        builder: a file as `worker` wants it.
        case: what its `build` is given.
        work: what one step does, in the unit of the rate.
        python: of another environment, whose modules are its own; None: this one.
    """

    name: str
    builder: Path
    case: Mapping[str, Any]
    work: float
    python: str | None = None


class Worker:
    """A running `worker`; use as a context manager.

    Raises:
        UserError: it cannot be started, or ends before it is told to.
    """

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the worker runs)
        command = [contender.python or sys.executable, str(HERE / "worker.py"), str(contender.builder)]
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        environment["OMP_NUM_THREADS"] = "1"
        if contender.python is None:
            environment["PYTHONPATH"] = str(HERE.parents[2] / "src")
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self._errors, env=environment, text=True
            )
        except OSError as error:
            self._errors.close()
            raise UserError(f"{command[0]}: {error.strerror}; it should be a python") from None
        if hasattr(os, "sched_setaffinity"):  # everybody on the same core
            os.sched_setaffinity(self._process.pid, {max(os.sched_getaffinity(0))})

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *unused: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        """Send one line, and wait for the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(what), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            self._process.wait()
            size = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, size - LAST_WORDS))
            words = self._errors.read().decode(errors="replace").split("\n")
            last = next((line for line in reversed(words) if line.strip()), "without a word")
            raise UserError(f"{self.contender.name}: its process ended: {last.strip()}") from None


@contextmanager
def working(contenders: Sequence[Contender]) -> Iterator[list[tuple[Worker, dict[str, Any]]]]:
    """Start everybody, one after the other; yields each with what it said when it was ready."""
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(contender)) for contender in contenders]
        yield [(worker, worker.ask(worker.contender.case)) for worker in workers]


def rates(
    workers: Sequence[Worker], steps: int, repeats: int, advanced: Callable[[], Any]
) -> dict[str, list[float]]:
    """Work per CPU second of every contender in every repeat; the first place goes round."""
    found: dict[str, list[float]] = {worker.contender.name: [] for worker in workers}
    for repeat in range(repeats):
        for place in range(len(workers)):
            worker = workers[(place + repeat) % len(workers)]
            seconds = worker.ask({"steps": steps})["cpu_seconds"]
            found[worker.contender.name].append(steps * worker.contender.work / seconds)
        advanced()
    return found
