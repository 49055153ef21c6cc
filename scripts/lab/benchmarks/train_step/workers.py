"""Worker processes that run training steps in turn on one core."""

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
LAST_BYTES = 2000  # of a failed worker's stderr that are searched for a message


@dataclass(frozen=True, slots=True)
class Contender:
    """One case in one environment.

    Attributes:
        name: in the table.
        builder: file with a function `build`; see `worker`.
        case: argument of `build`.
        work: of one step, in the unit of the rate.
        python: interpreter of another environment; None: this one.
    """

    name: str
    builder: Path
    case: Mapping[str, Any]
    work: float
    python: str | None = None


class Worker:
    """A running worker process; a context manager.

    Raises:
        UserError: it cannot be started, or ends early.
    """

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the worker runs)
        command = [contender.python or sys.executable, str(HERE / "worker.py"), str(contender.builder)]
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        environment["OMP_NUM_THREADS"] = "1"
        if contender.python is None:
            environment["PYTHONPATH"] = str(HERE.parents[3] / "src")
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self._errors, env=environment, text=True
            )
        except OSError as error:
            self._errors.close()
            raise UserError(f"{command[0]}: {error.strerror}; it should be a python") from None
        if hasattr(os, "sched_setaffinity"):  # all workers on the same core
            os.sched_setaffinity(self._process.pid, {max(os.sched_getaffinity(0))})

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *unused: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request as a line of JSON, and wait for the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            self._process.wait()
            size = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, size - LAST_BYTES))
            lines = self._errors.read().decode(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "without a message")
            raise UserError(f"{self.contender.name}: its process ended: {last.strip()}") from None


@contextmanager
def started_workers(contenders: Sequence[Contender]) -> Iterator[list[tuple[Worker, dict[str, Any]]]]:
    """Start the workers one after another; yields each with its first answer."""
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(contender)) for contender in contenders]
        yield [(worker, worker.ask(worker.contender.case)) for worker in workers]


def rates(
    workers: Sequence[Worker], steps: int, repeats: int, advanced: Callable[[], Any]
) -> dict[str, list[float]]:
    """Work per CPU second of every contender in every repeat, rotating who goes first."""
    results: dict[str, list[float]] = {worker.contender.name: [] for worker in workers}
    for repeat in range(repeats):
        for place in range(len(workers)):
            worker = workers[(place + repeat) % len(workers)]
            seconds = worker.ask({"steps": steps})["cpu_seconds"]
            results[worker.contender.name].append(steps * worker.contender.work / seconds)
        advanced()
    return results
