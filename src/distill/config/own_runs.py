"""Which options a user gave to runs on this machine: hashes of them, kept outside of all run folders.

A run's folder says nothing about whose it is, since it can be copied. What a user typed here once may be
taken again; a record of the very same options asks for nothing else, wherever it lies.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LIST = Path("foredraft") / "runs"  # below the user's folder of states: a SHA-256 a line


def remember(options: Sequence[str]) -> None:
    """Note the options of a run that begins; where that cannot be kept, commands about it will ask."""
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
    """Whether these were given to a run here."""
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
