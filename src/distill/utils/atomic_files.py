"""Atomic writes of JSON and text files, removal of temporary files, checksums."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from decode.errors import UserError
from drafters.checkpoint.atomic import publish

PIECE = 1 << 20  # bytes per write


def clean(folder: Path, deep: bool = True) -> None:
    """Remove temporary files of killed writers from a folder that no process writes to.

    Args:
        folder: folder of the files.
        deep: also clean the folders below it.
    """
    for path in list(folder.rglob("*.tmp") if deep else folder.glob("*.tmp")):
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
        raise UserError(f"{path}: cannot be written; create its folder, or name another file")
    with publish(path) as temporary:
        # Replace lone surrogates, which JSON can contain and UTF-8 cannot.
        temporary.write_text(text, encoding="utf-8", errors="replace", newline="\n")


def reserve(path: Path, size: int) -> None:
    """Create a file of `size` bytes with allocated disk space, to be mapped and written to.

    Without allocation, writing to a mapped file on a full disk ends the process by SIGBUS.

    Raises:
        OSError: not enough space; has the name of the file.
    """
    with path.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise OSError(error.errno, error.strerror, str(path)) from None
            for start in range(0, size, PIECE):  # some network file systems cannot allocate
                file.write(bytes(min(PIECE, size - start)))


def write_json(path: Path, value: Any) -> None:
    """Write `value` atomically as indented JSON."""
    with publish(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def read_json(path: Path, advice: str, **kinds: type | tuple[type, ...]) -> dict[str, Any] | None:
    """Read a JSON file of a run; None if it does not exist or was just removed.

    Args:
        path: path of the file.
        advice: advice about a damaged file, for the error.
        **kinds: types of required keys.

    Raises:
        UserError: a truncated file, no object, or missing keys; a pipe or folder.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would block
            raise ValueError("no file")
        return parse_json(path.read_text(), **kinds)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); {advice}") from None


def parse_json(text: str | bytes, **kinds: type | tuple[type, ...]) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: truncated, no object, or without these keys of these types.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("no JSON") from None
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    for key, kind in kinds.items():
        if not isinstance(value.get(key), kind):
            raise ValueError(f"no {key}")
    return value


def sha256(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
