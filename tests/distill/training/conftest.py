"""What several tests of training look at: numbers that were logged, and calls."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Logged = Callable[[Path, str], dict[int, float]]


@pytest.fixture(scope="session")
def logged() -> Logged:
    """(run folder, metric) -> its values in the CSV files, by step."""

    def read(folder: Path, name: str) -> dict[int, float]:
        found = {}
        for file in folder.glob("csv/**/metrics.csv"):
            with file.open() as lines:
                rows = [row for row in csv.DictReader(lines) if row.get(name)]
            found |= {int(row["step"]): float(row[name]) for row in rows}
        return found

    return read


@pytest.fixture
def spy(monkeypatch) -> Callable[[Any, str], list[tuple]]:
    """(owner, method) -> its calls from now on: their arguments and their result."""

    def watch(owner: Any, name: str) -> list[tuple]:
        call, seen = getattr(owner, name), []

        def noted(*args, **options):
            found = call(*args, **options)
            seen.append((args, found))
            return found

        monkeypatch.setattr(owner, name, noted)
        return seen

    return watch
