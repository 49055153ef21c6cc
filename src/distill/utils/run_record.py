"""The options that a run works with, chosen ones included: `options`, `chosen` and `packages` in run.json.

A command line leaves options open: null, or `auto`. What the run decides about them is recorded here, once.
Report, recipe, model card and W&B read this record. It is data: it is shown, and never composed, interpolated
or instantiated.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from decode.errors import UserError
from distill.utils.atomic_files import read_json, write_json
from distill.utils.progress import first_rank, say
from distill.utils.redact import without_secrets
from distill.utils.run_folder import RECORD, name_new

OPEN = (None, "auto")  # values of options that are left to the run
WRITTEN = ("options", "chosen", "packages")  # what a run adds to its run.json
OLDER = "its run.json has no options: a run of an older version"


@dataclass(frozen=True)
class ResolvedOptions:
    """Options of a run, with values for those that it decides by itself.

    Attributes:
        values: resolved configuration without secrets, nested by group.
        chosen: dotted names of the options that the run chose, and by what.
    """

    values: dict[str, Any]
    chosen: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any], chosen: Mapping[str, str]) -> Self:
        """Of a resolved configuration; keys become text, as JSON has them."""
        return cls(_with_text_keys(values), dict(chosen))

    def choose(self, by: str, values: Mapping[str, Any]) -> Self:
        """Fill in options that are open; given ones, and those of other groups' choices, stay.

        Args:
            by: what decides the values.
            values: dotted names of options, and the values that the run uses; open ones decide nothing.
        """
        made, chosen = copy.deepcopy(self.values), dict(self.chosen)
        for name, value in values.items():
            *groups, key = name.split(".")
            part: Any = made
            for group in groups:
                part = part.get(group) if isinstance(part, dict) else None
            if isinstance(part, dict) and key in part and part[key] in OPEN and value not in OPEN:
                part[key], chosen[name] = value, by
        return type(self)(made, chosen)

    def as_text(self) -> str:
        """The options as YAML; chosen ones have a comment."""
        return "".join(f"{line}\n" for line in _lines(self.values, "", 0, self.chosen))


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(part) for key, part in value.items()}
    return [_with_text_keys(part) for part in value] if isinstance(value, list | tuple) else value


def _lines(part: Mapping[str, Any], name: str, depth: int, chosen: Mapping[str, str]) -> Iterator[str]:
    for key, value in part.items():
        path, indent = f"{name}.{key}" if name else str(key), "  " * depth
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from _lines(value, path, depth + 1, chosen)
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
            text = text.removesuffix("...\n").strip()
            by = f"  # chosen by {chosen[path]}" if path in chosen else ""
            yield f"{indent}{key}: {text}{by}"


class RunRecord:
    """Collects what a run chooses, and keeps run.json up to date on rank 0.

    Args:
        folder: folder of the run.
        options: its options, with what was chosen so far.
        packages: `package==version` of drafter and objective where they are of other packages.
    """

    def __init__(
        self, folder: Path, options: ResolvedOptions, packages: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self.options, self.packages, self._begun = folder, options, dict(packages or {}), False

    def choose(self, by: str, values: Mapping[str, Any]) -> None:
        """Record values that the run chose; see `ResolvedOptions.choose`."""
        before, self.options = self.options, self.options.choose(by, values)
        if self._begun and self.options != before:
            self._write()

    def begin(self) -> None:
        """Write the options, and from here on each choice; name the folder of a new run, and choices that
        differ from an earlier start's.

        Called when nothing can be refused any more, so that a command with a mistake leaves no file.
        """
        self._begun = True
        if not first_rank():
            return
        name_new(self.folder)
        try:
            earlier = read_options(self.folder)
        except UserError:
            earlier = None
        for name in sorted(self.options.chosen.keys() & (earlier.chosen if earlier else {})):
            assert earlier
            if (before := _select(earlier.values, name)) != (now := _select(self.options.values, name)):
                say(f"resume: {name}={now} is chosen here, and {name}={before} was when this run began")
        self._write()

    def _write(self) -> None:
        if first_rank():
            path = self.folder / RECORD
            known = read_json(path, "") or {} if path.is_file() else {}
            record = {"options": self.options.values, "chosen": self.options.chosen}
            write_json(path, known | record | ({"packages": self.packages} if self.packages else {}))


def _select(values: Mapping[str, Any], name: str) -> Any:
    part: Any = values
    for key in name.split("."):
        part = part.get(key) if isinstance(part, dict) else None
    return part


def read_options(folder: Path) -> ResolvedOptions | None:
    """The options of a run, without secrets; None if the folder has none, as of older versions.

    Raises:
        UserError: a damaged run.json.
    """
    found = read_json(folder / RECORD, "continue the run, which writes it again, or remove it") or {}
    options, chosen = found.get("options"), found.get("chosen")
    if not isinstance(options, dict) or not isinstance(chosen, dict):
        return None
    return ResolvedOptions(without_secrets(options), {str(name): str(by) for name, by in chosen.items()})


def read_packages(folder: Path) -> dict[str, str]:
    """Packages of a run's drafter and objective, of those that are not foredraft's own.

    Raises:
        UserError: a damaged run.json.
    """
    found = (read_json(folder / RECORD, "") or {}).get("packages")
    return {str(name): str(package) for name, package in found.items()} if isinstance(found, dict) else {}


def identity(folder: Path) -> dict[str, Any] | None:
    """What tells a run from others: run.json without what the run adds; None if it has no such entries."""
    found = read_json(folder / RECORD, "") or {}
    return {name: value for name, value in found.items() if name not in WRITTEN} or None
