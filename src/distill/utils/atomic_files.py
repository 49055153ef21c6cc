"""Atomic writes of JSON and text files, removal of temporary files, checksums."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from decode.errors import UserError
from drafters.checkpoint.atomic import publish


def clean(folder: Path) -> None:
    """Remove temporary files of killed writers below a folder; nobody may be writing there."""
    for path in list(folder.rglob("*.tmp")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def put(path: Path, text: str) -> None:
    """Write text atomically to a path that a user named.

    Raises:
        UserError: no such folder, or the path is a folder.
    """
    if not path.parent.is_dir() or path.is_dir():
        raise UserError(f"{path}: no file can be there; make its folder, or name another file")
    with publish(path) as temporary:
        # Replace lone surrogates, which JSON can contain and UTF-8 cannot.
        temporary.write_text(text, encoding="utf-8", errors="replace", newline="\n")


def write_json(path: Path, value: Any) -> None:
    """Write `value` atomically as indented JSON."""
    with publish(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def read_json(path: Path) -> Any:
    """Content of a JSON file; None if there is none, or it was just removed."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def sha256(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
