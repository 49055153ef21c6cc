"""Intervals by drawing prompts again."""

import numpy as np

from decode.bootstrap import interval


def test_what_is_alike_is_drawn_together():
    values, ones = [0.0] * 10 + [1.0] * 10, np.ones(20)
    alone = interval(values, ones)
    together = interval(values, ones, [0] * 10 + [1] * 10)
    assert 0.2 < alone[0] < 0.5 < alone[1] < 0.8
    assert together == (0.0, 1.0), "a text or the other, or both"


def test_a_draw_without_a_round_counts_as_none():
    assert interval([4.0, 0.0], [2, 0]) == (0.0, 2.0)
