"""Read and validate a file or dataset of prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from decode.errors import UserError
from distill.prompts.prompt import Prompt
from distill.prompts.records.fields import describe_unread
from distill.prompts.records.forms import FIELDS, parse, to_prompt
from distill.prompts.records.readers import Record, read_dataset, read_file
from distill.utils.paths import bundled


class Rejected(NamedTuple):
    """A malformed record; line 0 if unknown."""

    file: str
    line: int
    reason: str
    raw: str

    def __str__(self) -> str:
        return f"{self.file}{f':{self.line}' if self.line else ''}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Source:
    """A file (`path`) or dataset (`dataset`) of prompts.

    Attributes:
        path: see `read_file`.
        dataset: with `name`, `split`, `revision` and `files`; see `read_dataset`.
        columns: with `answers`; see `to_prompt`.
        max_bytes: longer records count as malformed.
        weight: share among several sources.
    """

    path: str | None = None
    dataset: str | None = None
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    files: str | list[str] | None = None
    columns: Mapping[str, str] | None = None
    answers: str = "keep"
    max_bytes: int = 1_000_000
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.path and not self.dataset:
            raise UserError("prompts: give prompts.path, prompts.dataset or prompts.sources")
        if self.answers not in ("keep", "drop"):
            raise UserError(f"prompts.answers={self.answers}: choose keep or drop")
        if not isinstance(self.columns or {}, dict):
            raise UserError(f"prompts.columns={self.columns}: must be like {{prompt: question}}")
        for key, column in (self.columns or {}).items():
            if key not in FIELDS or not isinstance(column, str):
                raise UserError(
                    f"prompts.columns={self.columns}: no {key}: {column}; fields are {', '.join(FIELDS)}"
                )
        for name in ("path", "dataset", "name", "split", "revision"):
            if not isinstance(getattr(self, name), str | None):
                raise UserError(f"prompts: {name}={getattr(self, name)} must be a text")
        if not isinstance(self.max_bytes, int) or self.max_bytes < 1:
            raise UserError(f"prompts.max_bytes={self.max_bytes}: must be at least 1")
        number = isinstance(self.weight, int | float) and not isinstance(self.weight, bool)
        if not number or not 0 < self.weight < 1e300:
            raise UserError(f"prompts.sources: {self.label} has weight {self.weight}; it must be above 0")

    @property
    def label(self) -> str:
        """Name in messages."""
        if self.path:
            return str(self.path)
        return "/".join(filter(None, (self.dataset, self.name or self._file, self.split)))

    @property
    def short(self) -> str:
        """Name in prompt ids of a mixture."""
        if file := self.path or self._file:
            return Path(file).stem
        return str(self.name or self.dataset).rpartition("/")[2]

    @property
    def _file(self) -> str:
        """Name of the one file or URL that a format (`dataset=json`) reads; "" if there is another name.

        Without folders and query, which may have a key.
        """
        if self.name or "/" in str(self.dataset) or not isinstance(self.files, str):
            return ""
        return urlsplit(self.files).path.rpartition("/")[2]

    def read(self, strict: bool) -> Reading:
        """Read all prompts.

        Args:
            strict: raise on malformed records; otherwise they are skipped and listed.

        Raises:
            UserError: no such source, a malformed record (`strict`), or no valid prompt.
        """
        reading = Reading(self)
        for record in self._records():
            reading.records += 1
            reading.lost += record.lost
            reason, unread = record.fault, set(record.skipped)
            try:
                prompt = None if reason else self._prompt(record, unread)
            except UserError as error:
                prompt, reason = None, str(error)
            if prompt:
                reading.prompts.append(prompt)
                reading.unread.update(unread)
                continue
            rejected = Rejected(self.label, record.line, reason, record.start)
            if strict:
                raise UserError(str(rejected))
            reading.rejected.append(rejected)
        if reading.rejected and not reading.prompts:
            raise UserError(f"{reading.rejected[0]}; {self.label} has no usable prompts")
        if not reading.prompts:
            raise UserError(f"{self.label}: no prompts in it; give one JSON record a line")
        return reading

    def _records(self) -> Iterator[Record]:
        columns = dict(self.columns or {})
        if self.path:
            return read_file(Path(bundled(self.path)), columns, self.max_bytes)
        where = str(bundled(str(self.dataset)))
        return read_dataset(where, self.name, self.split, self.revision, self.files, columns)

    def _prompt(self, record: Record, unread: set[str]) -> Prompt:
        value = parse(record.value) if isinstance(record.value, bytes) else record.value
        number, columnar = str(record.line), record.columnar
        prompt = to_prompt(value, number, self.answers, self.columns, columnar=columnar, unread=unread)
        if sum(len(m["content"]) for m in prompt.messages) > self.max_bytes:
            raise UserError(f"longer than {self.max_bytes:,} characters (prompts.max_bytes)")
        prompt.file, prompt.line = self.label, record.line
        return prompt


@dataclass(slots=True)
class Reading:
    """Result of reading a source.

    Attributes:
        source: the source.
        records: number of records, including malformed ones.
        lost: estimated number of records after a fault that ends reading.
        prompts: valid prompts; after mixing, the used ones.
        rejected: malformed records.
        duplicates: number of prompts dropped as duplicates.
        unread: unread fields -> number of records that have them.
    """

    source: Source
    records: int = 0
    prompts: list[Prompt] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    duplicates: int = 0
    lost: int = 0
    unread: Counter[str] = field(default_factory=Counter)

    def unread_line(self) -> str:
        """Describe unread fields in one line; empty if there are none."""
        if not self.unread:
            return ""
        what = describe_unread(self.unread)
        return f"{self.source.label}: {what}; prompts.columns={{prompt: ...}} maps fields"


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a file of prompts without malformed records.

    Raises:
        UserError: no such file, no prompts, or a malformed record (with file and line number).
    """
    return Source(path=str(path)).read(strict=True).prompts


def to_sources(options: Mapping[str, Any]) -> list[Source]:
    """The sources of a `prompts` group: a single one, or its list `sources`.

    Raises:
        UserError: both are given, or a malformed entry of the list.
    """
    fields = [f for f in Source.__dataclass_fields__ if f in options]
    shared = {name: options[name] for name in fields if options[name] is not None}
    entries = options.get("sources")
    if not entries:
        return [Source(**shared)] if shared.get("path") or shared.get("dataset") else []
    if shared.get("path") or shared.get("dataset"):
        raise UserError("prompts: give prompts.path, prompts.dataset or prompts.sources, one of them")
    names = list(Source.__dataclass_fields__)
    sources = []
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, dict) or any(name not in names for name in entry):
            raise UserError(f"prompts.sources: {entry}: an entry is an object of {', '.join(names)}")
        sources.append(Source(**{"max_bytes": shared["max_bytes"], "answers": shared["answers"]} | entry))
    return sources
