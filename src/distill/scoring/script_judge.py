"""User scripts that score answers or steps of answers: exact match, a reward model, or any other."""

from __future__ import annotations

import json
import math
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from decode.errors import UserError
from distill.prompts.prompt import Prompt
from distill.utils.redact import printable

SHOWN = 100  # characters of a script's output shown in messages
PIECE = 1 << 12  # bytes that a ready pipe accepts
LONGEST = 1 << 10  # maximum bytes of a line with a score
GRACE = 2.0  # seconds for a script to exit after its input ends


class ScriptJudge:
    """Runs a script that reads records from stdin and writes a score for each to stdout.

    A record is a JSON object on a line; a score is a number on a line, flushed. Python scripts run in this
    interpreter; other files are executed. The script's stderr is shown. Use as a context manager; it is
    reusable.

    Args:
        script: path of the script.
        option: option that names it, for messages.
        timeout: option that sets `seconds`, for messages.
        seconds: time limit of one score.

    Raises:
        UserError: no such file; at the end, a script that wrote more than one line per record.
    """

    def __init__(
        self, script: str, option: str, timeout: str = "judge.timeout", seconds: float = 600.0
    ) -> None:
        self.path, self.named = Path(script).expanduser(), f"{option}={script}"
        self.timeout, self.seconds = timeout, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._written = b""  # output of the script, not parsed yet
        self._failed = False
        if not self.path.is_file():
            raise UserError(f"{self.named}: no such file; give a script that scores answers (docs/lossy.md)")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if kind is None and not self._failed:
                self._drain(process)
        finally:
            self._written = b""
            process.kill()
            for end in (process.stdin, process.stdout):
                pipe(end).close()
            process.wait()

    def __call__(self, record: Mapping[str, Any]) -> float:
        """Score a record.

        Raises:
            UserError: the script cannot be run, has ended, takes too long, or writes no finite number.
        """
        process = self._process = self._process or self._start()
        self._failed = True
        self._exchange(process, json.dumps(record).encode() + b"\n")
        line, _, self._written = self._written.partition(b"\n")
        try:
            score = float(line)
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise self._wrong(line)
        self._check_silent()
        self._failed = False
        return score

    def _exchange(self, process: subprocess.Popen[bytes], record: bytes) -> None:
        """Send a record, and read until the script has written a line."""
        until = time.monotonic() + self.seconds
        with selectors.DefaultSelector() as ready:
            ready.register(pipe(process.stdout), selectors.EVENT_READ)
            ready.register(pipe(process.stdin), selectors.EVENT_WRITE)
            while record or b"\n" not in self._written:
                events = ready.select(max(until - time.monotonic(), 0.0))
                if not events and time.monotonic() >= until:
                    raise UserError(
                        f"{self.named}: no score within {self.timeout}={self.seconds:g} s; a script reads a "
                        "record and flushes its number"
                    )
                for key, _ in events:
                    if key.fileobj is not process.stdin:
                        self._read(process)
                        continue
                    self._check_silent()  # before the script has read the record
                    try:
                        record = record[os.write(key.fd, record[:PIECE]) :]
                    except BrokenPipeError:  # reported when its output ends
                        record = b""
                    if not record:
                        ready.unregister(key.fileobj)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        piece = os.read(pipe(process.stdout).fileno(), PIECE)
        if not piece:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(GRACE)
                raise UserError(
                    f"{self.named}: the script ended (exit code {code}); its own message is above"
                )
            raise UserError(f"{self.named}: the script closed its output; it must write a number on a line")
        self._written += piece
        if len(self._written) > LONGEST:
            raise self._wrong(self._written)

    def _check_silent(self) -> None:
        """Check that the script wrote only the score; more output would count for the next record."""
        if self._written.strip():
            line = self._written.strip().splitlines()[0]
            raise UserError(
                f"{self.named}: it must write one line for a record, and wrote more: {_shown(line)}"
            )
        self._written = b""

    def _drain(self, process: subprocess.Popen[bytes]) -> None:
        """Close the input, and read remaining output until the script exits or time is up."""
        pipe(process.stdin).close()
        until = time.monotonic() + GRACE
        with selectors.DefaultSelector() as ready:
            ready.register(pipe(process.stdout), selectors.EVENT_READ)
            while ready.select(max(until - time.monotonic(), 0.0)):
                piece = os.read(pipe(process.stdout).fileno(), PIECE)
                self._written += piece
                self._check_silent()
                if not piece:
                    break

    def _wrong(self, line: bytes) -> UserError:
        return UserError(f"{self.named}: it must write a number on a line, and wrote {_shown(line)}")

    def _start(self) -> subprocess.Popen[bytes]:
        path = self.path.resolve()
        command = [sys.executable, str(path)] if path.suffix == ".py" else [str(path)]
        self._written = b""
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        except OSError as error:
            raise UserError(f"{self.named}: it cannot be run ({error.strerror})") from None
        os.set_blocking(pipe(process.stdin).fileno(), False)
        return process


def pipe(end: IO[bytes] | None) -> IO[bytes]:
    """The pipe of a process that was started with pipes."""
    assert end is not None
    return end


def _shown(line: bytes) -> str:
    return repr(printable(line.strip()[:SHOWN].decode(errors="replace")))


def judge_record(prompt: Prompt, answer: str) -> dict[str, Any]:
    """Record for a judge; `reference` is null if the prompt's record has no answer."""
    return {
        "id": prompt.id,
        "category": prompt.category,
        "messages": list(prompt.messages),
        "answer": answer,
        "reference": prompt.reference or None,
    }
