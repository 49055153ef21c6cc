"""Scripts in the environment of an engine, which must not see foredraft."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def ask_script(python: Path, script: Path, *words: Any, variables: Mapping[str, str] | None = None) -> Any:
    """What a script prints last, as JSON; words that are no paths are given as JSON.

    Args:
        python: interpreter of the environment.
        script: to run.
        words: arguments.
        variables: environment variables beyond those of this process.
    """
    given = [word if isinstance(word, str | Path) else json.dumps(word) for word in words]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, script, *given],
        capture_output=True,
        text=True,
        check=False,
        env=environment | dict(variables or {}),
    )
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
