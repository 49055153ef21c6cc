"""Drafters and objectives of installed packages, which declare them as entry points.

A package is imported only when one of its names is used, so a broken one stops no other command.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from decode.errors import UserError

GROUPS = {"drafter": "foredraft.drafters", "objective": "foredraft.objectives"}


@dataclass(frozen=True)
class Installed:
    """A name that packages declare.

    Attributes:
        kind: drafter | objective.
        name: as in `drafter=<name>`.
        entries: its entry points; several where packages disagree.
    """

    kind: str
    name: str
    entries: tuple[EntryPoint, ...]

    @property
    def packages(self) -> str:
        """Names and versions of the packages that declare it."""
        found = [entry.dist for entry in self.entries]
        return " and ".join(f"{dist.name} {dist.version}" if dist else "a package" for dist in found)

    @property
    def entry(self) -> EntryPoint:
        """Its entry point, if there is only one."""
        return self.entries[0]

    @property
    def path(self) -> str:
        """Dotted path of its class or function."""
        return f"{self.entry.module}.{self.entry.attr}"

    def check(self, built_in: bool) -> None:
        """Check that the name means one thing.

        Args:
            built_in: foredraft has this name too.

        Raises:
            UserError: several packages have the name, or foredraft has, or it is no name.
        """
        if not self.name.isidentifier():
            raise self.error("the name of an entry point has letters, digits and _ only")
        if built_in or len(self.entries) > 1:
            who = "foredraft has one of this name" if built_in else "they declare the same name"
            raise self.error(f"{who}; rename the entry point, or uninstall the package")
        if not self.entry.attr:
            raise self.error(f"its entry point is {self.entry.value}; write module:name")

    def error(self, reason: str) -> UserError:
        """A mistake of the package."""
        return UserError(f"{self.kind}={self.name} of {self.packages}: {' '.join(reason.split())}")

    def load(self) -> Any:
        """Import the class or function.

        Raises:
            UserError: its module cannot be imported, or does not define it.
        """
        try:
            value = self.entry.load()
        except Exception as error:  # code of others
            raise self.error(f"cannot be imported ({type(error).__name__}: {error})") from None
        return value

    def folder(self) -> Path:
        """Folder of its module, found without an import.

        Raises:
            UserError: there is no such module.
        """
        name, *rest = self.entry.module.split(".")
        try:
            spec = find_spec(name)
            for part in rest:
                name, places = f"{name}.{part}", spec and spec.submodule_search_locations
                spec = PathFinder.find_spec(name, [*places]) if places else None
        except (ImportError, ValueError, AttributeError):
            spec = None
        if spec is None or spec.origin is None:
            raise self.error(f"there is no module {self.entry.module}; install the package again")
        return Path(spec.origin).parent


def installed(kind: str) -> Mapping[str, Installed]:
    """Names that installed packages declare.

    Args:
        kind: drafter | objective.
    """
    return _found(kind, tuple(sys.path))


@cache
def _found(kind: str, path: tuple[str, ...]) -> Mapping[str, Installed]:
    del path  # a key of the cache: where packages are found
    names: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUPS[kind]):
        names.setdefault(entry.name, []).append(entry)
    return {name: Installed(kind, name, tuple(entries)) for name, entries in sorted(names.items())}
