"""Run the steps that there is time for, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from decode.errors import UserError
from distill.utils.atomic_files import parse_json
from distill.utils.paths import ROOT
from distill.utils.progress import say
from gpu_queue.results import Conditions, Result, unfinished, write
from gpu_queue.step import LIMIT, Step

KEPT = 400  # characters of a failed command's last line


def run(
    steps: Sequence[Step], out: Path, here: Conditions, minutes: float | None, again: bool = False
) -> dict[str, int]:
    """Run the steps without a result; those that failed before come last.

    Args:
        steps: in order of value.
        out: folder of the results.
        here: conditions of the results.
        minutes: that all may take; a step with a longer estimate than what is left is left out. None: no
            limit.
        again: run steps that are done, too.

    Returns:
        Number of steps by outcome: `measured`, `failed`, `left out` and `done before`.
    """
    out.mkdir(parents=True, exist_ok=True)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    waiting = list(steps) if again else unfinished(steps, out, here)
    counts = {"measured": 0, "failed": 0, "left out": 0, "done before": len(steps) - len(waiting)}
    for step in waiting:
        left = LIMIT if end is None else min(LIMIT, (end - time.monotonic()) / 60)
        if left < step.minutes:
            say(f"{step.name}: left out; of about {step.minutes:g} minutes {max(left, 0):.1f} are left")
            counts["left out"] += 1
            continue
        say(f"{step.name}: {step.shows}")
        result = measure(step, here, left)
        write(result, out)
        say(f"{step.name}: {result.failed or 'measured'} ({result.seconds:.0f} s)")
        counts["failed" if result.failed else "measured"] += 1
    return counts


def measure(step: Step, here: Conditions, minutes: float) -> Result:
    """Run one step and read what it wrote; after `minutes` it is stopped and has failed."""
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        file = Path(folder) / f"{step.name}.json"
        words, begin = step.command(str(file), here.tiny), time.monotonic()
        failed = _execute([sys.executable, *words], 60 * minutes)
        measured: dict[str, Any] = {}
        try:
            measured = parse_json(file.read_bytes())
        except (OSError, ValueError) as error:
            failed = failed or f"it wrote no result: {error}"
        return Result(
            step=step.name,
            group=step.group,
            shows=step.shows,
            command=step.command(f"{step.name}.json", here.tiny),
            commit=here.commit,
            hardware=here.hardware,
            tiny=here.tiny,
            torch=torch.__version__,
            seconds=time.monotonic() - begin,
            failed=failed,
            measured=measured,
        )


def _execute(command: Sequence[str], seconds: float) -> str:
    """Why a command failed; "": it did not. Its output is shown, with its errors."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, cwd=ROOT, stderr=errors, process_group=0)
        with _ending(process):
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    sys.stderr.write(text)
    if code is None:
        return f"stopped after {seconds:.0f} s"
    if not code:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"exit code {code}: {lines[-1][:KEPT] if lines else 'without a message'}"


@contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the process and those that it started when the block ends, also by a signal to this one."""

    def stop(number: int, frame: object) -> None:
        del frame
        raise KeyboardInterrupt(f"signal {number}")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def chosen(steps: Sequence[Step], names: Sequence[str]) -> list[Step]:
    """Steps by name or group, in the order of the queue; all without names.

    Raises:
        UserError: no such step.
    """
    known = {step.name for step in steps} | {step.group for step in steps}
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"{unknown[0]}: no such step or group; `list` shows all")
    return [step for step in steps if not names or step.name in names or step.group in names]
