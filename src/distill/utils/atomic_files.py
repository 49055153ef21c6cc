"""JSON and text files, written atomically; what killed writers left; checksums."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from decode.errors import UserError
from drafters.checkpoint.atomic import publish


def clean(folder: Path) -> None:
    """Remove what killed writers left below a folder that nobody writes to now."""
    for path in list(folder.rglob("*.tmp")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def put(path: Path, text: str) -> None:
    """Publish text where somebody asked for it.

    Raises:
        UserError: there is no such folder.
    """
    if not path.parent.is_dir() or path.is_dir():
        raise UserError(f"{path}: no file can be there; make its folder, or name another file")
    with publish(path) as temporary:
        # Half a surrogate pair, which JSON can hold, is no text.
        temporary.write_text(text, encoding="utf-8", errors="replace", newline="\n")


def write_json(path: Path, value: Any) -> None:
    """Publish `value` as indented JSON."""
    with publish(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def read_json(path: Path) -> Any:
    """What is published there; None where nothing is, or another process has just taken it away."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
