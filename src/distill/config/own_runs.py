"""Record of the options that a user gave to runs on this machine: hashes, kept outside of run folders.

A run folder can be copied, so it does not show who started the run. Options that the user gave here are
trusted when a run folder records the same options.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LIST = Path("foredraft") / "runs"  # in the user's state folder; one SHA-256 per line


def remember(options: Sequence[str]) -> None:
    """Record the options of a new run; if recording fails, later commands ask for the options."""
    with suppress(OSError):
        if are_own(options):
            return
        path = _list()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, f"{_hash(options)}\n".encode())
        finally:
            os.close(descriptor)


def are_own(options: Sequence[str]) -> bool:
    """Whether these options were given to a run on this machine."""
    try:
        path = _list()
        mine = path.stat().st_uid == os.getuid() and not path.stat().st_mode & 0o022
        return mine and _hash(options) in path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return False


def _list() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / LIST


def _hash(options: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(options)).encode()).hexdigest()
