"""What several tests of training look at: numbers that were logged, and calls."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from workbench import final, leftovers, same, tau

from distill.utils.run_folder import checkpoints

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


@pytest.fixture(scope="session")
def assert_same_run() -> Callable[[Path, Path], None]:
    """That a run of six steps, with a save point every two, ended like another, with nothing left over."""

    def check(folder: Path, straight: Path) -> None:
        assert same(final(folder), final(straight))
        assert [p.name for p in checkpoints(folder)] == ["2", "4", "6"]
        for checkpoint in checkpoints(folder):
            assert tau(checkpoint) == tau(straight / "checkpoints" / checkpoint.name)
            assert (checkpoint / "trainer").exists() == (checkpoint.name != "2")
        assert (folder / "checkpoints" / "last").readlink() == Path("6")
        assert (folder / "checkpoints" / "best").exists()
        assert not leftovers(folder)

    return check
