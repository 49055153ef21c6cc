"""A script of the user's that scores answers, or steps of them: exact match, a reward model, anything."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from decode.errors import UserError
from distill.prompts.prompt import Prompt
from distill.utils.redact import printable

SHOWN = 100  # characters of what a script wrote, in messages


class ScriptJudge:
    """A script that is started once, reads records from stdin and writes a score for each to stdout.

    A record is a JSON object on a line; a score is a number on a line, flushed. A script in Python is run by
    this interpreter, any other file by itself. What it writes to stderr is shown. To be used as a context
    manager, several times if need be.

    Args:
        script: path.
        option: that named it, for messages.

    Raises:
        UserError: no such file.
    """

    def __init__(self, script: str, option: str) -> None:
        self.path, self.named = Path(script).expanduser(), f"{option}={script}"
        self._process: subprocess.Popen[str] | None = None
        if not self.path.is_file():
            raise UserError(f"{self.named}: no such file; give a script that scores answers (docs/lossy.md)")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            with process:  # closes its pipes and waits
                pass

    def __call__(self, record: Mapping[str, Any]) -> float:
        """The score of a record.

        Raises:
            UserError: the script cannot be run, has ended, or writes anything but a finite number.
        """
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(record) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = process.wait()
            raise UserError(f"{self.named}: the script ended (exit code {code}); its own message is above")
        try:
            score = float(line)
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            text = printable(line.strip()[:SHOWN])
            raise UserError(f"{self.named}: it has to write a number on a line, and wrote {text!r}")
        return score

    def _start(self) -> subprocess.Popen[str]:
        path = self.path.resolve()
        command = [sys.executable, str(path)] if path.suffix == ".py" else [str(path)]
        try:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise UserError(f"{self.named}: it cannot be run ({error.strerror})") from None


def judge_record(prompt: Prompt, answer: str) -> dict[str, Any]:
    """What a judge is told of an answer; `reference` is null where the prompt's record has no answer."""
    return {
        "id": prompt.id,
        "category": prompt.category,
        "messages": list(prompt.messages),
        "answer": answer,
        "reference": prompt.reference or None,
    }
