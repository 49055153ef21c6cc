"""Atomic writes: temporary name, fsync, rename. A reader never sees half a file or folder."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

OS_ERROR = re.compile(r"\(os error (\d+)\)")  # as Rust's standard library writes them


@contextmanager
def publish(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, for a file or a folder; on success sync it and rename it.

    Raises:
        OSError: from the block, with the name of the file where it had none (pyarrow's have none), and for
            safetensors' errors of the system, which are of another class.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        rename_into_place(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except SafetensorError as error:
        if number := OS_ERROR.search(str(error)):
            code = int(number[1])
            raise OSError(code, os.strerror(code), str(path)) from error
        raise
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def rename_into_place(temporary: Path, final: Path) -> None:
    """Give a file or a folder its final name, in a way that survives a crash."""
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    temporary.replace(final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
