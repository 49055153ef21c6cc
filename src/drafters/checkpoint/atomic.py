"""Atomic writes: temporary name, fsync, rename. A reader never sees half a file or folder."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

LITTLE = 2**20  # bytes that are left of a full disk
TORCH_WRITER = "inline_container"  # in errors of torch.save
OS_ERROR = re.compile(r"\(os error (\d+)\)")  # as Rust's standard library writes them


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file or folder that could not be written, for every writer.

    Raises:
        OSError: from the block, with this name where it had none (pyarrow's have none), and for errors of the
            system that safetensors and torch raise as others.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except (SafetensorError, RuntimeError) as error:
        if (code := _code(error, path)) is None:
            raise
        raise OSError(code, os.strerror(code), str(path)) from error


def _code(error: Exception, path: Path) -> int | None:
    """The system's number of a failed write; None for other errors."""
    if number := OS_ERROR.search(str(error)):
        return int(number[1])
    if TORCH_WRITER not in str(error):
        return errno.EIO if isinstance(error, SafetensorError) and "I/O error" in str(error) else None
    # torch does not say what was wrong.
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return errno.EFBIG
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    return errno.ENOSPC if shutil.disk_usage(folder).free < LITTLE else errno.EIO


@contextmanager
def publish(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, for a file or a folder; on success sync it and rename it.

    Raises:
        OSError: from the block; see `writing`.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            yield temporary
            rename_into_place(temporary, path)
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
