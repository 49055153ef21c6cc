"""Which rows an objective compares: planned on the host, copied to the device at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.transfer import upload_together
from drafters.base import DraftStep

RowIndex = slice | Tensor  # selects rows: a slice is a view, a tensor copies
LEAST_ROWS = 128  # chunks of a short batch have this many rows, or twice, four times as many, ...


class Part(NamedTuple):
    """Rows of one step that are compared with a chunk's rows of the target.

    Attributes:
        step: index of the step.
        rows: its rows.
        place: (M,) their rows in the chunk.
    """

    step: int
    rows: slice
    place: RowIndex


class Chunk(NamedTuple):
    """Rows of the target, with what is compared with them."""

    target: RowIndex
    parts: list[Part]


class RowPlan:
    """Rows of the target in chunks, and the table of anchors by depths.

    Depth j at anchor a is compared with row a + j of the target. A row of the target is in one chunk, however
    many depths are compared with it.

    Args:
        steps: depths and anchors ascending.
        most: rows of a chunk.
        device: of the rows.

    Attributes:
        size: rows of a chunk: `most`, or fewer if there are fewer rows.
        drafts: indices of the drafted steps.
        anchors: rows of the table: anchors with a drafted step.
    """

    def __init__(self, steps: Sequence[DraftStep], most: int, device: torch.device) -> None:
        self.drafts = [i for i, step in enumerate(steps) if step.depth and not step.training_only]
        anchors = [step.anchor.cpu() for step in steps]
        compared = [anchor + step.depth for anchor, step in zip(anchors, steps, strict=True)]
        positions = torch.cat(compared).unique()  # (N,) ascending, like those of each step
        self.size = min(most, _rounded(len(positions)))
        hosts: dict[Any, Tensor] = {}
        if self.drafts:
            known = torch.cat([anchors[i] for i in self.drafts]).unique()
            hosts |= {("table", i): torch.searchsorted(known, anchors[i]) for i in self.drafts}
            self.anchors = len(known)
        chunks = list(_chunks(positions, compared, self.size))
        indices = {("target", n): rows for n, (rows, _) in enumerate(chunks)}
        indices |= {("part", n, i): place for n, (_, parts) in enumerate(chunks) for i, _, place in parts}
        sent = upload_together(hosts | {k: v for k, v in indices.items() if isinstance(v, Tensor)}, device)
        self._table = [sent["table", i] for i in self.drafts]
        self.chunks = [
            Chunk(
                sent.get(("target", n), rows),
                [part._replace(place=sent.get(("part", n, part.step), part.place)) for part in parts],
            )
            for n, (rows, parts) in enumerate(chunks)
        ]

    def table(self, values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(M,) values of each drafted step -> (A, K) by anchor, 0 where missing, and (A, K) bool: present."""
        table = values[0].new_zeros(self.anchors, len(values))
        present = torch.zeros_like(table, dtype=torch.bool)
        for k, (place, column) in enumerate(zip(self._table, values, strict=True)):
            table[place, k], present[place, k] = column, True
        return table, present

    def columns(self, table: Tensor) -> list[Tensor]:
        """(A, K) -> (M,) of each drafted step."""
        return [table[place, k] for k, place in enumerate(self._table)]


def _chunks(
    positions: Tensor, compared: Sequence[Tensor], size: int
) -> Iterator[tuple[RowIndex, list[Part]]]:
    """Chunks whose indices are on the host."""
    places = [torch.searchsorted(positions, rows) for rows in compared]
    starts = range(0, len(positions), size)
    # cuts[i][n] : cuts[i][n + 1] are the rows of step i that fall into chunk n.
    bounds = torch.tensor([*starts, len(positions)])
    cuts = [torch.searchsorted(place, bounds).tolist() for place in places]
    for n, start in enumerate(starts):
        parts = [
            Part(i, slice(*cut[n : n + 2]), _as_slice(place[slice(*cut[n : n + 2])] - start))
            for i, (place, cut) in enumerate(zip(places, cuts, strict=True))
            if cut[n] < cut[n + 1]
        ]
        yield _as_slice(positions[start : start + size]), parts


def _as_slice(rows: Tensor) -> RowIndex:
    """(N,) ascending indices; a slice if they are contiguous."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def _rounded(count: int) -> int:
    """At least `count`, one of few numbers, since a compiled pass is made for each number of rows."""
    size = LEAST_ROWS
    while size < count:
        size *= 2
    return size
