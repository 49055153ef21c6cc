"""Fit a table of results to the width of a terminal, by leaving out columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

# Left out in this order; the columns that match together. What a comparison is about stays.
OPTIONAL = (
    *("KV/token", "parameters", "ms/round", "draft", "trained", "s_5", "s_4", "s_3", "s_2", "s_1"),
    *("tau vs .*", "speedup vs .*", "audit"),
)
GAP = 2  # columns between two cells


class Fitted(NamedTuple):
    """What remains of a table.

    Attributes:
        head: names of the columns.
        lines: their cells.
        left_out: names of the columns that do not fit.
    """

    head: list[str]
    lines: list[list[str]]
    left_out: list[str]


def fitted(
    head: Sequence[str], lines: Sequence[Sequence[str]], width: int, shorter: Callable[[str], str]
) -> Fitted:
    """Leave out columns until the table fits, or no optional one is left.

    Args:
        head: names of the columns.
        lines: their cells.
        width: columns of the terminal.
        shorter: a shorter form of a cell of the column `decode`, taken before columns are left out.
    """
    kept, rows = list(range(len(head))), [list(line) for line in lines]
    if "decode" in head and _width(head, rows, kept) > width:
        for row in rows:
            row[head.index("decode")] = shorter(row[head.index("decode")])
    for name in OPTIONAL:
        if _width(head, rows, kept) <= width:
            break
        kept = [i for i in kept if not re.fullmatch(name, head[i])]
    left_out = [name for i, name in enumerate(head) if i not in kept]
    return Fitted([head[i] for i in kept], [[row[i] for i in kept] for row in rows], left_out)


def _width(head: Sequence[str], lines: Sequence[Sequence[str]], columns: Sequence[int]) -> int:
    """Columns of the table, as `grid` prints it."""
    widths = [max(len(row[i]) for row in [head, *lines]) for i in columns]
    return sum(widths) + GAP * (len(widths) - 1)
