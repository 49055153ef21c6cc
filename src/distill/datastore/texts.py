"""Texts of a datastore: a file or a folder of records, documents or code."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from decode.errors import UserError
from distill.prompts.chat_template import Chat
from distill.prompts.records.fields import Fields
from distill.prompts.records.forms import ANSWERS, FORMS, IDS, SYSTEMS, parse, to_prompt
from distill.prompts.records.readers import Record, read_file

RECORDS = (".jsonl", ".parquet")  # also .json with a list; every other file is one text
ASKED = (*FORMS, *ANSWERS, *SYSTEMS)  # a record with one of these is a conversation
MAX_BYTES = 10_000_000  # maximum bytes of a record
PIECE = 100_000  # characters tokenised as one text, up to the end of a line


@dataclass(slots=True)
class Texts:
    """Texts of a file, or of all files below a folder except hidden ones.

    A record with only a `text` is that text; others are conversations, rendered by the target's chat
    template. Unusable records are omitted, and files from their first invalid UTF-8 byte.

    Args:
        source: file or folder.
        chat: chat of the target.

    Attributes:
        left_out: omitted parts with reasons, after reading.
        unread: unread fields -> number of records that have them.

    Raises:
        UserError: no such file or folder, or no files.
    """

    source: Path
    chat: Chat
    left_out: list[str] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if not self.source.exists():
            raise UserError(f"drafter.store={self.source}: no such file or folder")
        if not self.files():
            raise UserError(f"drafter.store={self.source}: no files in it")

    def files(self) -> list[Path]:
        """The files, sorted by name."""
        if self.source.is_file():
            return [self.source]
        below = (path for path in self.source.rglob("*") if path.is_file())
        return sorted(p for p in below if not any(n[0] == "." for n in p.relative_to(self.source).parts))

    def key(self) -> str:
        """Hash of names and contents of the files, and of the chat's fingerprint."""
        found = hashlib.sha256(f"{self.chat.template} {self.chat.fingerprint()}".encode())
        for path in self.files():
            found.update(f"\n{path.name} ".encode())
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        return found.hexdigest()[:32]

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        """Yield pieces of the texts, each with whether a text ends with it."""
        self.left_out.clear()
        self.unread.clear()
        for path in self.files():
            if path.suffix in RECORDS or (path.suffix == ".json" and _is_list(path)):
                for record in read_file(path, {}, MAX_BYTES):
                    try:
                        yield self._text(record), True
                    except UserError as error:
                        self.left_out.append(f"{path}:{record.line}: {error}")
            else:
                yield from self._pieces(path)

    def _text(self, record: Record) -> str:
        if record.fault:
            raise UserError(record.fault)
        value = parse(record.value) if isinstance(record.value, bytes) else record.value
        if isinstance(value, dict) and [k for k in ASKED if value.get(k) not in (None, "")] == ["text"]:
            if not isinstance(value["text"], str):
                raise UserError("'text' must be a text")
            self.unread.update(Fields(value, ignored=("text", *IDS)).unread())
            return value["text"]
        unread = set(record.skipped)
        prompt = to_prompt(value, "", columnar=record.columnar, unread=unread)
        self.unread.update(unread)
        if self.chat.template == "none":
            return "\n".join(str(message["content"]) for message in prompt.messages)
        return self.chat.text(prompt.messages, prompt.tools)

    def _pieces(self, path: Path) -> Iterator[tuple[str, bool]]:
        """Yield pieces of a file that end with a line."""
        begun = False
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                while piece := file.read(PIECE):
                    begun = True
                    yield piece + file.readline(PIECE), False
        except UnicodeDecodeError as error:
            self.left_out.append(f"{path}: not UTF-8 ({error.reason})")
        if begun:
            yield "", True


def _is_list(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
