"""Atomic writes: temporary name, fsync, rename. Readers never see a partial file or folder."""

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

LITTLE = 2**20  # a disk with fewer free bytes counts as full
TORCH_WRITER = "inline_container"  # marks errors of torch.save
OS_ERROR = re.compile(r"\(os error (\d+)\)")  # format of Rust's standard library


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make failed writes in the block raise an OSError that names the file or folder.

    Raises:
        OSError: from the block, with `path` if it had no name (as pyarrow's), or converted from an error of
            safetensors or torch that the system caused.
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
    """Errno of a failed write; None for other errors."""
    if number := OS_ERROR.search(str(error)):
        return int(number[1])
    if TORCH_WRITER not in str(error):
        return errno.EIO if isinstance(error, SafetensorError) and "I/O error" in str(error) else None
    # torch does not report the cause.
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return errno.EFBIG
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    return errno.ENOSPC if shutil.disk_usage(folder).free < LITTLE else errno.EIO


@contextmanager
def publish(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path` for a file or folder; on success sync and rename it.

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
    """Sync a file or folder to disk and rename it, so that it survives a crash."""
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
