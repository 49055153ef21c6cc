"""Rows of a store as one memory-mapped Arrow file: a copy of its shards, checked when opened."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from decode.errors import UserError
from distill.rollouts.shard import COLUMNS, lists
from distill.rollouts.store import RolloutStore
from distill.utils.atomic_files import sha256
from distill.utils.progress import say
from drafters.checkpoint.atomic import publish

CHUNK = 1000  # rows of a record batch; lookups search a batch


def open_rows(store: RolloutStore) -> datasets.Dataset:
    """Open the rows of a complete store, in order, from a copy with a recorded hash.

    Processes that need the same copy wait for the one that makes it. A changed copy is made again.

    Raises:
        UserError: the store has no rows.
    """
    shards = [store.path(i) for i, s in enumerate(store.manifest()["shards"]) if s["rows"]]
    if not shards:
        raise UserError(f"{store.folder}: no rows; the target gave no prompt an answer")
    path = store.cache / f"rows-{store.content()[:12]}.arrow"
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path, fcntl.LOCK_SH):
        whole = _is_whole(path)
    if not whole:
        with _locked(path, fcntl.LOCK_EX):
            if not _is_whole(path):  # not made by another process meanwhile
                if path.exists():
                    say(f"{path}: sha256 differs from the recorded one; made again from the shards")
                _write(path, shards)
    return datasets.Dataset.from_file(str(path))


def list_batches(rows: datasets.Dataset, column: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield record batches of a list column, mapped from the file: see `lists`.

    Args:
        rows: all rows of a store, no selection.
        column: `tokens` or `loss_mask`.
    """
    return lists(rows.data.column(column))


@contextmanager
def _locked(path: Path, operation: int) -> Iterator[None]:
    with (path.parent / "rows.lock").open("a") as lock:
        fcntl.flock(lock, operation)
        yield


def _sums(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _is_whole(path: Path) -> bool:
    try:
        state = path.stat()
        recorded = _sums(path).read_text().split()
    except (FileNotFoundError, UnicodeDecodeError):
        return False
    return recorded[:1] == [_sha256(path, state.st_mtime_ns, state.st_size)]


@cache
def _sha256(path: Path, changed: int, size: int) -> str:
    """Hash of a file, cached in the process by the file's time and size."""
    del changed, size
    return sha256(path)


def _write(path: Path, shards: list[Path]) -> None:
    shutil.rmtree(path.parent / "cache", ignore_errors=True)  # of older versions
    for old in path.parent.glob("rows-*.arrow*"):  # of other rows, or left by a killed writer
        old.unlink(missing_ok=True)
    with publish(path) as temporary:
        with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_stream(file, COLUMNS) as writer:
            for shard in shards:
                table = pq.read_table(shard, columns=COLUMNS.names)
                writer.write_table(table.cast(COLUMNS), max_chunksize=CHUNK)
        with publish(_sums(path)) as sums:
            sums.write_text(f"{sha256(temporary)}  {path.name}\n")
