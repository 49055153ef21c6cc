"""Cells and tables of Markdown, from text of anybody's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def cell(value: Any) -> str:
    """Text on one line with markup characters escaped, for table cells."""
    text = " ".join(str(value).split())
    return "".join(f"\\{c}" if c in "|<>[]" else c for c in text)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; the first row is its head."""
    lines = [f"| {' | '.join(map(cell, row))} |" for row in rows]
    return [lines[0], f"|{'---|' * len(rows[0])}", *lines[1:], ""]
