"""Numbers of rows are the same on the host and on the device, whatever is computed with them."""

from __future__ import annotations

import pytest
import torch
from device_traffic import CUDA, UPLOAD, Traffic

from decode.transfer import RowInts, Settled

CPU = torch.device("cpu")


@pytest.mark.parametrize("known", [False, True], ids=["host only", "both"])
def test_both_copies_agree(known):
    def row_ints(*values):
        return RowInts(values, torch.tensor(values) if known else None)

    one, other = row_ints(4, 0, 7), row_ints(1, 2, 3)
    for found, expected in (
        (one.plus(other), [5, 2, 10]),
        (one.plus([1, 1, 1]), [5, 1, 8]),
        (one.plus(-1), [3, -1, 6]),
        (one.select([2, 0]), [7, 4]),
        (one.select(row_ints(1)), [0]),
        (RowInts.of(one), [4, 0, 7]),
    ):
        assert found == found.on(CPU).tolist() == expected


def test_sums_and_selections_of_known_numbers_upload_nothing():
    with Traffic() as traffic:
        counted = []
        traffic.count = counted.append
        lengths, rows = RowInts([0, 0]), RowInts([1])
        lengths.on(CUDA)
        rows.on(CUDA)
        assert counted == [UPLOAD] * 2
        accepted = torch.ones(2, dtype=torch.long, device=CUDA)
        settled = Settled([1, 1], accepted, [[5], [6]], [3, 4])
        for values in (lengths.plus(settled), settled.select(rows), lengths.select(rows).plus(1)):
            values.on(CUDA)
        assert counted == [UPLOAD] * 2


def test_settled_tokens_follow_their_rows():
    settled = Settled([1, 2, 1], None, [[5], [6, 7], [8]], [3, 4, 0]).select([2, 1])
    assert (settled, settled.texts, settled.draft_lengths) == ([1, 2], [[8], [6, 7]], [0, 4])
    assert Settled([1, 2], None, [[5], [6, 7]], ()).select([1]).draft_lengths == ()
