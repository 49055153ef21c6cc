"""Accounts of a model's files: which entries were read, and why others were not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from decode.errors import UserError

silent: ContextVar[bool] = ContextVar("silent", default=False)
SHOWN = 60  # characters of a name in a line


@dataclass
class Account:
    """Read and unread names of one kind of file.

    Every name is either counted in `read` or listed with a reason in one of the other fields. A reason
    is a phrase that follows "these are", such as "biases that the class has no place for".

    Attributes:
        kind: of file, as shown to users: `weights`, `config.json`, `tokenizer`, `GGUF`.
        read: counts by unit, such as {"tensors": 75}.
        harmless: reason -> names that change nothing.
        unread: reason -> unread names that may change nothing; each reason is printed as one line.
        refused: reason -> unread names without which the result is another model.
    """

    kind: str
    read: dict[str, int] = field(default_factory=dict)
    harmless: dict[str, list[str]] = field(default_factory=dict)
    unread: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)

    def count(self, what: str, number: int) -> None:
        """Add to the counts of read names."""
        self.read[what] = self.read.get(what, 0) + number

    def ignore(self, reason: str, names: Iterable[str]) -> None:
        """Add names that change nothing."""
        _add(self.harmless, reason, names)

    def remark(self, reason: str, names: Iterable[str]) -> None:
        """Add unread names that may change nothing."""
        _add(self.unread, reason, names)

    def refuse(self, reason: str, names: Iterable[str]) -> None:
        """Add unread names without which the result is another model."""
        _add(self.refused, reason, names)

    def check(self, name: str) -> None:
        """Refuse the file if it holds another model than the loaded one.

        Args:
            name: option and value for the error, such as `target=folder`.

        Raises:
            UserError: `refused` is not empty; one line with the first reason, its first name and the count.
        """
        for reason, names in self.refused.items():
            raise UserError(f"{name}: {self.kind}: {_counted(names)}: {reason}")

    def remarks(self) -> list[str]:
        """One line for each reason in `unread`."""
        return [f"{self.kind}: {_counted(names)}: {reason}" for reason, names in self.unread.items()]

    def lines(self) -> list[str]:
        """The whole account for printing, one line for each reason."""
        counts = [f"{n:,} {what.removesuffix('s') if n == 1 else what}" for what, n in self.read.items()]
        read = ", ".join(counts) or "nothing"
        lists = (("harmless", self.harmless), ("not read", self.unread), ("refused", self.refused))
        return [
            f"{self.kind}: {read} read",
            *(
                f"  {word}: {_counted(names)}: {reason}"
                for word, found in lists
                for reason, names in found.items()
            ),
        ]

    def as_json(self) -> dict[str, Any]:
        """JSON values for a file in the model's folder; see `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Account:
        """Restore an account from `as_json`."""
        return cls(**values)


def _add(found: dict[str, list[str]], reason: str, names: Iterable[str]) -> None:
    if names := list(names):
        found.setdefault(reason, []).extend(names)


def _counted(names: list[str]) -> str:
    """The printable first name and the number of others; names come from untrusted files."""
    first = "".join(c if c.isprintable() else "?" for c in names[0])[:SHOWN]
    return f"{first} and {len(names) - 1:,} more" if len(names) > 1 else first


@lru_cache(maxsize=1024)
def say_once(line: str) -> None:
    """Print a remark to stderr once per process, because several parts read the same files."""
    first = all(os.environ.get(name, "0") in ("", "0") for name in ("RANK", "LOCAL_RANK"))
    if first:  # rank 0; all ranks read the same files
        print(line, file=sys.stderr, flush=True)


def report(account: Account, name: str) -> None:
    """Refuse a file if its account does; otherwise print each remark once.

    Args:
        account: of a file.
        name: option and value, such as `target=folder`.

    Raises:
        UserError: see `Account.check`.
    """
    account.check(name)
    if not silent.get():
        for line in account.remarks():
            say_once(f"{name}: {line}")


@contextmanager
def no_remarks() -> Iterator[None]:
    """Suppress remarks while whole accounts are printed."""
    token = silent.set(True)
    try:
        yield
    finally:
        silent.reset(token)
