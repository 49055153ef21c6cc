"""Functions with which a run writes its report; the caller of the run provides them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def _nothing(folder: Path) -> None:
    del folder


@dataclass(frozen=True)
class Reports:
    """Functions of a run's folder; by default, nothing is written.

    Attributes:
        page: writes report.html.
        table: prints the scores at the end.
    """

    page: Callable[[Path], object] = _nothing
    table: Callable[[Path], object] = _nothing


NO_REPORTS = Reports()
