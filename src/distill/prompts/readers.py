"""Stream records of a file or a Hugging Face dataset, with their line numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from decode.errors import UserError
from distill.prompts.records import FIELDS

SPACE = re.compile(r"\s*")
SHOWN_CHARS = 500  # characters of a malformed record that are shown


class Record(NamedTuple):
    """A raw record.

    Attributes:
        line: of the file, or row of the table, from 1.
        value: an unparsed line of JSON (bytes), or a parsed value.
        fault: why it cannot be used; empty if it can.
    """

    line: int
    value: Any
    fault: str = ""

    @property
    def start(self) -> str:
        """First characters of the value, for messages."""
        if isinstance(self.value, bytes):
            return self.value[:SHOWN_CHARS].rstrip(b"\r\n").decode(errors="backslashreplace")
        return json.dumps(self.value, default=str)[:SHOWN_CHARS]


def read_file(path: Path, columns: Collection[str], max_bytes: int) -> Iterator[Record]:
    """Records of a .json list, a .parquet table or lines of a .txt; other files are read as JSON lines.

    A table has its `columns` read besides FIELDS. Records longer than `max_bytes` are faults, and lines
    longer than that are not loaded into memory.

    Raises:
        UserError: no such file, or not a Parquet file despite its name.
    """
    if path.is_dir():
        raise UserError(f"prompts={path}: a folder; prompts.dataset={path} reads one, or name a file in it")
    if not path.is_file():
        raise UserError(
            f"prompts={path}: no such file; give a JSONL file, one of conf/prompts, or a dataset of the Hub "
            "(owner/name)"
        )
    if path.suffix == ".parquet":
        yield from _table(path, columns)
    elif path.suffix == ".json":
        yield from _list(path, max_bytes)
    elif path.suffix == ".txt":
        yield from _texts(path, max_bytes)
    else:
        yield from _lines(path, max_bytes)


def _lines(path: Path, max_bytes: int) -> Iterator[Record]:
    number = 0
    with path.open("rb") as file:
        while line := file.readline(max_bytes + 1):
            number += 1
            if len(line) > max_bytes and not line.endswith(b"\n"):
                rest = file.readline(max_bytes)
                while rest and not rest.endswith(b"\n"):
                    rest = file.readline(max_bytes)
                yield Record(number, line, _too_long(max_bytes))
            elif line.strip():
                yield Record(number, line)


def _too_long(max_bytes: int) -> str:
    return f"longer than {max_bytes:,} bytes (prompts.max_bytes)"


def _texts(path: Path, max_bytes: int) -> Iterator[Record]:
    for record in _lines(path, max_bytes):
        if record.fault:
            yield record
            continue
        try:
            yield record._replace(value={"text": record.value.decode("utf-8-sig").strip()})
        except UnicodeDecodeError as error:
            yield record._replace(fault=f"not UTF-8 ({error.reason} at byte {error.start})")


def _list(path: Path, max_bytes: int) -> Iterator[Record]:
    """Elements of a JSON list; reading stops at an element that is not JSON."""
    # Invalid UTF-8 becomes lone surrogates, and then a fault of the record that contains it.
    text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
    place = _skip(text, 0)
    if text[place : place + 1] != "[":
        yield from _lines(path, max_bytes)
        return
    decode = json.JSONDecoder().raw_decode
    line, counted, place = 1, 0, _skip(text, place + 1)
    closed = text[place : place + 1] == "]"
    while not closed:
        line, counted = line + text.count("\n", counted, place), place
        try:
            value, end = decode(text, place)
            behind = _skip(text, end)
            if text[behind : behind + 1] not in (",", "]"):
                raise json.JSONDecodeError("expected , or ]", text, behind)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deep"
            raw = text[place : place + SHOWN_CHARS].encode(errors="surrogateescape")
            yield Record(line, raw, f"not JSON ({reason}); nothing behind it was read")
            return
        yield Record(line, value, _fault(text[place:end], max_bytes))
        closed = text[behind] == "]"
        place = _skip(text, behind + 1)


def _skip(text: str, place: int) -> int:
    match = SPACE.match(text, place)
    assert match, "a pattern that matches the empty string did not match"
    return match.end()


def _fault(raw: str, max_bytes: int) -> str:
    try:
        return _too_long(max_bytes) if len(raw.encode()) > max_bytes else ""
    except UnicodeEncodeError:
        return "not UTF-8"


def _table(path: Path, columns: Collection[str]) -> Iterator[Record]:
    try:
        file = pq.ParquetFile(path)
        names = _columns(file.schema_arrow.names, columns, str(path))
        row = 0
        for batch in file.iter_batches(columns=names):
            for i in range(batch.num_rows):
                row += 1
                try:
                    yield Record(row, batch.slice(i, 1).to_pylist()[0])
                except UnicodeDecodeError:
                    yield Record(row, None, "not UTF-8")
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as Parquet ({_first_line(error)})") from None


def read_dataset(
    dataset: str,
    name: str | None,
    split: str,
    revision: str | None,
    files: str | list[str] | None,
    columns: Collection[str],
) -> Iterator[Record]:
    """Rows of a dataset of the Hub or of a folder; dataset scripts are never run.

    Args:
        dataset: hub id or folder, or the name of a format (json, parquet, ...) with `files`.
        name: of the configuration.
        split: of the dataset.
        revision: branch, tag or commit on the Hub.
        files: data files or URLs.
        columns: read besides FIELDS.

    Raises:
        UserError: the dataset cannot be loaded.
    """
    try:
        loaded: Any = datasets.load_dataset(dataset, name, data_files=files, split=split, revision=revision)
    except Exception as error:  # hub, network, files and builders raise many types
        line = _first_line(error)
        raise UserError(f"prompts.dataset={dataset}: {line}; prompts.path= reads a file instead") from None
    rows = loaded.select_columns(_columns(loaded.column_names, columns, f"prompts.dataset={dataset}"))
    for row, value in enumerate(rows, 1):
        yield Record(row, value)


def _columns(names: Collection[str], columns: Collection[str], where: str) -> list[str]:
    """Names of the columns to read; others, such as images, are skipped."""
    missing = [name for name in columns if name not in names]
    selected = [name for name in names if name in FIELDS or name in columns]
    if missing or not selected:
        problem = f"no column {missing[0]!r}" if missing else "no column that says what is asked"
        raise UserError(
            f"{where}: {problem}; it has {', '.join(names)}; name them as in prompts.columns={{prompt: ...}}"
        )
    return selected


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
