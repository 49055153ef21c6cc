"""Stream records of a file or a Hugging Face dataset, with their line numbers."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from decode.errors import UserError
from distill.prompts.records.fields import JsonReader
from distill.prompts.records.forms import FIELDS, FORMS, WEIGHTS

SPACE = re.compile(r"\s*")
SHOWN_CHARS = 500  # characters shown of a malformed record
SHOWN_NAMES = 20  # maximum number of columns in a message
PARQUET = b"PAR1"
OPENERS: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
    b"\x28\xb5\x2f\xfd": lambda path: io.BufferedReader(pa.input_stream(str(path), compression="zstd")),
}
# First bytes of binary files -> advice.
FOREIGN = {
    b"PK\x03\x04": "a zip archive or a workbook; unpack it, or save it as CSV",
    b"7z\xbc\xaf": "a 7z archive; unpack it",
    b"ARROW1": "an Arrow file; prompts.path=null prompts.dataset=arrow prompts.files={path} reads it",
    b"\xff\xfe": "a text in UTF-16; save it as UTF-8",
    b"\xfe\xff": "a text in UTF-16; save it as UTF-8",
    b"SQLite": "a database; save its table as CSV",
}
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException)


class Record(NamedTuple):
    """A raw record.

    Attributes:
        line: line of the file, or row of the table, from 1.
        value: an unparsed line of JSON (bytes), or a parsed value.
        fault: why it cannot be used; empty if it can.
        skipped: names of unread columns of its table.
        columnar: it is a row of a table, with nulls for absent keys.
        lost: estimated number of later records that its fault makes unreadable.
    """

    line: int
    value: Any
    fault: str = ""
    skipped: Collection[str] = ()
    columnar: bool = False
    lost: int = 0

    @property
    def start(self) -> str:
        """First characters of the value, for messages."""
        if isinstance(self.value, bytes):
            return self.value[:SHOWN_CHARS].rstrip(b"\r\n").decode(errors="backslashreplace")
        return json.dumps(self.value, default=str)[:SHOWN_CHARS]


def read_file(path: Path, columns: Mapping[str, str], max_bytes: int) -> Iterator[Record]:
    """Yield records of JSON lines, a JSON list or an object with one, CSV, TSV, Parquet, or lines of a .txt.

    Detects compression (gzip, bzip2, xz, zstd) from the content. Of a table, `columns` (field -> name) and
    FIELDS are read. Records longer than `max_bytes` are faults; longer lines are not loaded into memory.

    Raises:
        UserError: no such file, an unsupported type, or a damaged file.
    """
    if path.is_dir():
        raise UserError(f"prompts={path}: a folder; prompts.dataset={path} reads one, or name a file in it")
    if not path.is_file():
        raise UserError(
            f"prompts={path}: no such file; give a JSONL file, one of conf/prompts, or a dataset of the Hub "
            "(owner/name)"
        )
    try:
        with path.open("rb") as file:
            start = file.read(8)
        for magic, what in FOREIGN.items():
            if start.startswith(magic):
                raise UserError(f"prompts={path}: {what.format(path=path)}")
        if start.startswith(PARQUET) or path.suffix == ".parquet":
            yield from _table(path, columns)
        else:
            yield from _texts_of(path, start, columns, max_bytes)
    except DAMAGED as error:
        raise UserError(f"prompts={path}: cannot be read to its end ({_first_line(error)})") from None


def _texts_of(path: Path, start: bytes, columns: Mapping[str, str], max_bytes: int) -> Iterator[Record]:
    """Records of a text file, compressed or not."""
    opener = next((opener for magic, opener in OPENERS.items() if start.startswith(magic)), None)
    plain = path.with_suffix("") if opener and len(path.suffixes) > 1 else path
    with opener(path) if opener else path.open("rb") as file:
        beginning = file.peek(512)
        if beginning[257:262] == b"ustar":
            raise UserError(f"prompts={path}: a tar archive; unpack it")
        first = beginning.removeprefix(b"\xef\xbb\xbf").lstrip()
        if plain.suffix == ".txt":
            yield from _texts(file, max_bytes)
        elif plain.suffix in (".csv", ".tsv", ".tab"):
            yield from _cells(file, path, plain.suffix, columns, max_bytes)
        elif first.startswith(b"["):
            yield from _list(_text(file), max_bytes)
        elif first.startswith(b"{") and (plain.suffix == ".json" or first[1:].lstrip(b" \t\r")[:1] == b"\n"):
            yield from _object(file, path, columns, max_bytes)
        else:
            yield from _lines(file, max_bytes)


def _bounded(file: io.BufferedReader | io.BytesIO, max_bytes: int) -> Iterator[tuple[bytes, str]]:
    """Yield lines of a file, and why one is incomplete."""
    while line := file.readline(max_bytes + 1):
        fault = ""
        if len(line) > max_bytes and not line.endswith(b"\n"):
            fault = _too_long(max_bytes)
            rest = file.readline(max_bytes)
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(max_bytes)
        yield line, fault


def _lines(file: io.BufferedReader | io.BytesIO, max_bytes: int) -> Iterator[Record]:
    for number, (line, fault) in enumerate(_bounded(file, max_bytes), 1):
        if fault or line.strip():
            yield Record(number, line, fault)


def _too_long(max_bytes: int) -> str:
    return f"longer than {max_bytes:,} bytes (prompts.max_bytes)"


def _texts(file: io.BufferedReader, max_bytes: int) -> Iterator[Record]:
    for record in _lines(file, max_bytes):
        if record.fault:
            yield record
            continue
        try:
            yield record._replace(value={"text": record.value.decode("utf-8-sig").strip()})
        except UnicodeDecodeError as error:
            yield record._replace(fault=f"not UTF-8 ({error.reason} at byte {error.start})")


def _cells(
    file: io.BufferedReader, path: Path, suffix: str, columns: Mapping[str, str], max_bytes: int
) -> Iterator[Record]:
    """Yield rows of a text table, with column names in the first row."""

    def lines() -> Iterator[str]:
        for number, (line, fault) in enumerate(_bounded(file, max_bytes), 1):
            if fault:  # it may end inside a cell, so later rows are unreadable
                raise UserError(f"prompts={path}:{number}: a line {fault}")
            yield line.decode("utf-8", "surrogateescape")

    csv.field_size_limit(max(max_bytes, csv.field_size_limit()))
    texts = lines()
    try:
        first = next(texts, "").removeprefix("\ufeff")
        known = {*FIELDS, *columns.values()}
        candidates = ",;\t|" if suffix == ".csv" else "\t"
        split = {mark: next(csv.reader([first], delimiter=mark, strict=True), []) for mark in candidates}
    except csv.Error as error:
        raise UserError(f"prompts={path}: its first line has no names of columns ({error})") from None
    mark = max(candidates, key=lambda mark: len(known.intersection(split[mark])))
    names = split[mark]
    _columns(names, [*columns.values()], f"prompts={path}")
    numbers = {columns.get(name, name) for name in WEIGHTS}
    rows, end = csv.reader(texts, delimiter=mark, strict=True), 0
    while True:
        number = end + 2  # from 1, after the names
        try:
            if (row := next(rows, None)) is None:
                return
        except csv.Error as error:
            lost = rows.line_num - end - 1  # lines swallowed by an unclosed quote
            end = rows.line_num
            yield Record(number, b"", f"not {suffix[1:].upper()} ({error})", lost=lost)
            continue
        end = rows.line_num
        if row:
            yield _row(number, names, row, numbers, max_bytes)


def _row(number: int, names: list[str], row: list[str], numbers: Collection[str], max_bytes: int) -> Record:
    if len(row) != len(names):
        return Record(number, row, f"{len(row)} cells, and there are {len(names)} names of columns")
    value = {name: _number(cell) if name in numbers else cell for name, cell in zip(names, row, strict=True)}
    return Record(number, value, _fault("".join(row), max_bytes))


def _number(cell: str) -> float | str | None:
    try:
        return float(cell) if cell.strip() else None
    except ValueError:
        return cell


def _text(file: io.BufferedReader) -> str:
    # Invalid UTF-8 becomes lone surrogates, a fault of the record that contains them.
    return file.read().decode("utf-8-sig", "surrogateescape")


def _list(text: str, max_bytes: int) -> Iterator[Record]:
    """Yield elements of a JSON list; stops at an element that is not JSON."""
    reader, number = JsonReader(), 0
    line, counted, place = 1, 0, _skip(text, _skip(text, 0) + 1)
    closed = text[place : place + 1] == "]"
    while not closed:
        line, counted = line + text.count("\n", counted, place), place
        try:
            value, end = reader.read_from(text, place)
            behind = _skip(text, end)
            if text[behind : behind + 1] not in (",", "]"):
                raise json.JSONDecodeError("expected , or ]", text, behind)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deep"
            raw = text[place : place + SHOWN_CHARS].encode(errors="surrogateescape")
            lost = number * (len(text) - place) // place  # assumes records of equal length
            yield Record(line, raw, f"not JSON ({reason}); nothing after it was read", lost=lost)
            return
        number += 1
        yield Record(line, value, reader.fault or _fault(text[place:end], max_bytes))
        closed = text[behind] == "]"
        place = _skip(text, behind + 1)


def _object(
    file: io.BufferedReader, path: Path, columns: Mapping[str, str], max_bytes: int
) -> Iterator[Record]:
    """Yield the records in a JSON object's list, or the object itself; if more follows, JSON lines."""
    first = file.readline(max_bytes + 1)
    if first.endswith(b"\n") and _is_json(first) and file.peek(1):
        yield Record(1, first)
        yield from (record._replace(line=record.line + 1) for record in _lines(file, max_bytes))
        return
    text, reader = first + file.read(), JsonReader()
    try:
        value = reader.read(text.decode("utf-8-sig", "surrogateescape"))
    except (ValueError, RecursionError):
        yield from _lines(io.BytesIO(text), max_bytes)
        return
    if any(name in value for name in (*FORMS, *(column.partition(".")[0] for column in columns.values()))):
        yield Record(1, value, reader.fault)
        return
    if reader.fault:
        raise UserError(f"prompts={path}: {reader.fault}")
    lists = {k: v for k, v in value.items() if isinstance(v, list) and v and isinstance(v[0], dict)}
    if len(lists) != 1:
        raise UserError(
            f"prompts={path}: an object with {_some([*value])}, and no single list of records; give a list"
        )
    (name, listed), *_ = lists.items()
    others = tuple(key for key in value if key != name)
    for number, element in enumerate(_passages(listed), 1):
        raw = json.dumps(element, ensure_ascii=False)
        yield Record(number, element, _fault(raw, max_bytes), others if number == 1 else ())


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return False
    return True


def _passages(listed: list[Any]) -> Iterator[Any]:
    """Flatten SQuAD's files (passages in articles, questions in passages); other records are unchanged."""
    for element in listed:
        passages = element.get("paragraphs") if isinstance(element, dict) else None
        if isinstance(passages, list) and all(isinstance(p, dict) and "qas" in p for p in passages):
            rest = {k: v for k, v in element.items() if k != "paragraphs"}
            for passage in passages:
                about = {k: v for k, v in passage.items() if k != "qas"}
                yield from (rest | about | question for question in passage["qas"])
        else:
            yield element


def _skip(text: str, place: int) -> int:
    match = SPACE.match(text, place)
    assert match, "a pattern that matches the empty string did not match"
    return match.end()


def _fault(raw: str, max_bytes: int) -> str:
    try:
        return _too_long(max_bytes) if len(raw.encode()) > max_bytes else ""
    except UnicodeEncodeError:
        return "not UTF-8"


def _table(path: Path, columns: Mapping[str, str]) -> Iterator[Record]:
    try:
        file = pq.ParquetFile(path)
        names, skipped = _columns(file.schema_arrow.names, [*columns.values()], f"prompts={path}")
        row = 0
        for batch in file.iter_batches(columns=names):
            for i in range(batch.num_rows):
                row += 1
                try:
                    yield Record(row, batch.slice(i, 1).to_pylist()[0], "", skipped, True)
                except UnicodeDecodeError:
                    yield Record(row, None, "not UTF-8")
                except ValueError:  # pyarrow's error for duplicate keys
                    yield Record(row, None, "an object in it has two fields of one name")
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as Parquet ({_first_line(error)})") from None


def read_dataset(
    dataset: str,
    name: str | None,
    split: str,
    revision: str | None,
    files: str | list[str] | None,
    columns: Mapping[str, str],
) -> Iterator[Record]:
    """Yield rows of a dataset of the Hub or of a folder; dataset scripts are never run.

    Args:
        dataset: hub id or folder, or the name of a format (json, parquet, ...) with `files`.
        name: name of the configuration.
        split: split of the dataset.
        revision: branch, tag or commit on the Hub.
        files: data files or URLs.
        columns: field -> name of a column to read in addition to FIELDS.

    Raises:
        UserError: the dataset cannot be loaded.
    """
    try:
        loaded: Any = datasets.load_dataset(dataset, name, data_files=files, split=split, revision=revision)
    except Exception as error:  # hub, network, files and builders raise many types
        line = _first_line(error)
        raise UserError(f"prompts.dataset={dataset}: {line}; prompts.path= reads a file instead") from None
    where = f"prompts.dataset={dataset}"
    names, skipped = _columns(loaded.column_names, [*columns.values()], where)
    for row, value in enumerate(loaded.select_columns(names), 1):
        yield Record(row, value, "", skipped, True)


def _columns(names: Collection[str], columns: Collection[str], where: str) -> tuple[list[str], list[str]]:
    """Names of the columns to read, and of other columns, such as images."""
    tops = {column: column if column in names else column.partition(".")[0] for column in columns}
    missing = [column for column, top in tops.items() if top not in names]
    selected = [name for name in names if name in FIELDS or name in tops.values()]
    if missing or not selected:
        problem = f"no column {missing[0]!r}" if missing else "no column with a question"
        raise UserError(
            f"{where}: {problem}; it has {_some(names)}; name them as in prompts.columns={{prompt: ...}}"
        )
    if len(set(names)) < len(names):
        raise UserError(f"{where}: two columns have one name; it has {_some(names)}")
    return selected, [name for name in names if name not in selected]


def _some(names: Collection[str]) -> str:
    """The first of these names, as one line."""
    shown = [" ".join(str(name).split())[:80] for name in [*names][:SHOWN_NAMES]]
    return ", ".join([*shown, *(["..."] if len(names) > SHOWN_NAMES else [])])


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
