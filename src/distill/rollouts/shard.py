"""One shard of a rollout store: a Parquet file with its plan, number and checksum as metadata."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from decode.errors import UserError
from distill.utils.atomic_files import sha256
from distill.utils.redact import printable
from drafters.checkpoint.atomic import publish

COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("finish_reason", pa.string()),
        ("ids", pa.string()),
        ("weight", pa.float32()),
    ]
)
SHOWN = 200  # characters of a foreign text in a message
Row = dict[str, Any]


def write_shard(path: Path, rows: Sequence[Row], key: str, shard: int) -> None:
    """Write rows atomically.

    Args:
        path: path of the file.
        rows: rows with the columns of `COLUMNS`.
        key: key of the plan.
        shard: number of the shard.
    """
    table = pa.Table.from_pylist(list(rows), schema=COLUMNS)
    with publish(path) as temporary:
        pq.write_table(table.replace_schema_metadata(_mark(table, key, shard)), temporary)


def lists(column: pa.ChunkedArray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield chunks of a list column without copies: (n + 1,) offsets into (m,) values."""
    for chunk in column.chunks:
        yield chunk.offsets.to_numpy().astype(np.int64), chunk.values.to_numpy()


def read_rows(path: Path, vocab_size: int) -> pa.Table:
    """Read a shard, which may come from anywhere; rows that no such target wrote are refused.

    Args:
        path: file of the shard.
        vocab_size: V of the target.

    Raises:
        UserError: no shard; or the first row with a token outside the vocabulary or a mask of another length.
    """
    try:
        table = pq.read_table(path, columns=COLUMNS.names).cast(COLUMNS)
        (ids, lengths), (_, masked) = flat(table["tokens"]), flat(table["loss_mask"])
    except (OSError, pa.ArrowException, ValueError) as error:
        raise UserError(f"{path}: no shard of rollouts ({' '.join(str(error).split())[:SHOWN]})") from None
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if (uneven := np.flatnonzero(lengths != masked)).size:
        row = int(uneven[0])
        fault = f"{lengths[row]} tokens, and a loss mask of {masked[row]}"
    elif outside.size:
        row = int(np.searchsorted(np.cumsum(lengths), outside[0], side="right"))
        fault = f"token {ids[outside[0]]}, and the target has {vocab_size}"
    else:
        return table
    name = printable(repr(table["id"][row].as_py()))[:SHOWN]
    raise UserError(f"{path}: row {name} has {fault}; delete the file to have it made again")


def flat(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """All values of a list column, and the lengths of the lists.

    Raises:
        ValueError: a value is missing.
    """
    rows: Any = column.combine_chunks()
    values, lengths = rows.flatten(), rows.value_lengths()
    if values.null_count or lengths.null_count:
        raise ValueError("a value is missing")
    return values.to_numpy(), lengths.to_numpy()


def is_whole(path: Path, key: str, shard: int) -> bool:
    """Whether a file is this shard of this plan with unchanged rows."""
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError):
        return False
    return table.schema.metadata == {k.encode(): v.encode() for k, v in _mark(table, key, shard).items()}


def plan_key(path: Path) -> str | None:
    """Key of a shard's plan; None if the file is no shard."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowException, OSError):
        return None
    return metadata.get(b"plan", b"").decode(errors="replace")


def _mark(table: pa.Table, key: str, shard: int) -> dict[str, str]:
    text = json.dumps(table.to_pylist(), sort_keys=True)
    return {"plan": key, "shard": str(shard), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def count(path: Path) -> dict[str, Any]:
    """Counts and hash of a shard, for the manifest."""
    table = pq.read_table(path, columns=["loss_mask", "finish_reason", "ids"])
    masks = [mask for _, mask in lists(table["loss_mask"])]
    answer_tokens = sum(int(mask.sum()) for mask in masks)
    return {
        "file": path.name,
        "rows": table.num_rows,
        "prompt_tokens": sum(map(len, masks)) - answer_tokens,
        "answer_tokens": answer_tokens,
        "finish_reason": dict(Counter(table["finish_reason"].to_pylist())),
        "ids": dict(Counter(table["ids"].to_pylist())),
        "sha256": sha256(path),
    }
