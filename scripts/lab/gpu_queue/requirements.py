"""Print what an environment lacks: python -m gpu_queue.requirements pyproject.toml."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement


def lacking(requirements: list[str]) -> list[str]:
    """A line for each requirement that the environment does not meet, also of packages that it has."""
    lines: dict[str, str] = {}
    waiting, seen = [(text, "foredraft") for text in requirements], set[str]()
    while waiting:
        text, who = waiting.pop(0)
        one = Requirement(text)
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(one.name)
        except PackageNotFoundError:
            lines.setdefault(one.name, f"{one.name}: is missing, {who} requires it")
            continue
        if not one.specifier.contains(found, prereleases=True):
            lines[f"{one.name} {who}"] = f"{one.name}: is {found}, {who} requires {one.specifier}"
        if one.name not in seen:
            seen.add(one.name)
            waiting += [(text, one.name) for text in requires(one.name) or ()]
    return list(lines.values())


if __name__ == "__main__":
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    for line in lacking(project["dependencies"]):
        print(line, file=sys.stderr)
