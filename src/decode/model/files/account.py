"""Accounts of files: what a model was made from, what need not be read, and what nothing read."""

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
    """What was read of one kind of file, and what was not.

    Every name of the file ends in one place: counted in `read`, or listed with a reason in one of the
    others. A reason is a phrase that follows "these are", as in "biases that the class has no place for".

    Attributes:
        kind: of file, as users know it: `weights`, `config.json`, `tokenizer`, `GGUF`.
        read: counts by what was counted, as in {"tensors": 75}.
        harmless: reason -> names that change nothing.
        unread: reason -> names that nothing read and that may change nothing; one line tells of them.
        refused: reason -> names that nothing read and that make it another model.
    """

    kind: str
    read: dict[str, int] = field(default_factory=dict)
    harmless: dict[str, list[str]] = field(default_factory=dict)
    unread: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)

    def count(self, what: str, number: int) -> None:
        """Add to what was read."""
        self.read[what] = self.read.get(what, 0) + number

    def ignore(self, reason: str, names: Iterable[str]) -> None:
        """List names that change nothing, and why."""
        _add(self.harmless, reason, names)

    def remark(self, reason: str, names: Iterable[str]) -> None:
        """List names that nothing read and that may change nothing."""
        _add(self.unread, reason, names)

    def refuse(self, reason: str, names: Iterable[str]) -> None:
        """List names that nothing read and that make it another model."""
        _add(self.refused, reason, names)

    def check(self, name: str) -> None:
        """Refuse the file if it holds another model than the one that was made.

        Args:
            name: of the option and its value, as in `target=folder`.

        Raises:
            UserError: a name is in `refused`; one line with the first reason, its first name and the count.
        """
        for reason, names in self.refused.items():
            raise UserError(f"{name}: {self.kind}: {_counted(names)}: {reason}")

    def remarks(self) -> list[str]:
        """A line for every reason in `unread`."""
        return [f"{self.kind}: {_counted(names)}: {reason}" for reason, names in self.unread.items()]

    def lines(self) -> list[str]:
        """The whole account for a reader, a line for each reason."""
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
        """Plain values, for a file in the folder of the model; see `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Account:
        """The account that `as_json` wrote."""
        return cls(**values)


def _add(found: dict[str, list[str]], reason: str, names: Iterable[str]) -> None:
    if names := list(names):
        found.setdefault(reason, []).extend(names)


def _counted(names: list[str]) -> str:
    """The first name and how many more there are; names come from files of strangers."""
    first = "".join(c if c.isprintable() else "?" for c in names[0])[:SHOWN]
    return f"{first} and {len(names) - 1:,} more" if len(names) > 1 else first


@lru_cache(maxsize=1024)
def say_once(line: str) -> None:
    """Print a remark to stderr, once in a process: files are looked at for every part that reads them."""
    first = all(os.environ.get(name, "0") in ("", "0") for name in ("RANK", "LOCAL_RANK"))
    if first:  # of several processes that read the same files
        print(line, file=sys.stderr, flush=True)


def tell(account: Account, name: str) -> None:
    """Refuse what an account refuses, and say once what else was left unread.

    Args:
        account: of a file.
        name: of the option and its value, as in `target=folder`.

    Raises:
        UserError: see `Account.check`.
    """
    account.check(name)
    if not silent.get():
        for line in account.remarks():
            say_once(f"{name}: {line}")


@contextmanager
def no_remarks() -> Iterator[None]:
    """Print no remarks, where whole accounts are printed."""
    token = silent.set(True)
    try:
        yield
    finally:
        silent.reset(token)
