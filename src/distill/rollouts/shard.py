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

from distill.utils.atomic_files import sha256
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
