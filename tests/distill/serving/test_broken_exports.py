"""Which mistake explains the rounds that an engine took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distill.serving.broken_exports import CHANCE, Seen


def replayed(rounds: list[float]) -> Any:
    return SimpleNamespace(counts=SimpleNamespace(rounds=rounds))


@pytest.mark.parametrize(
    ("own", "spoilt", "chance"),
    [
        ([20.0] * 12, [25.0] * 12, 2**-12),  # each answer as with the mistake
        ([20.0] * 12, [26.0] * 12, 2**-12),  # nearer to it, if not equal
        ([20.0] * 6 + [25.0] * 6, [25.0] * 6 + [20.0] * 6, 1.0),  # as many one way as the other
        ([25.0] * 12, [25.0] * 12, 1.0),
        ([20.0] * 3 + [25.0] * 9, [25.0] * 12, 2**-3),  # answers that both explain tell nothing
    ],
)
def test_the_mistake_whose_rounds_are_nearer_is_likely(own, spoilt, chance):
    found = Seen([0.5], [0.1], [25] * 12).chance(replayed(own), replayed(spoilt))
    assert found == pytest.approx(chance)
    assert (found < CHANCE) == (chance == 2**-12), "a dozen answers are enough"
