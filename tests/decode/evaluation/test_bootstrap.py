"""Intervals by drawing prompts again."""

import numpy as np
import pytest

from decode.evaluation.bootstrap import central_interval, interval, ratio, resampled_sums


def test_prompts_of_a_group_are_drawn_together():
    values, ones = [0.0] * 10 + [1.0] * 10, np.ones(20)
    alone = interval(values, ones)
    together = interval(values, ones, [0] * 10 + [1] * 10)
    assert 0.2 < alone[0] < 0.5 < alone[1] < 0.8
    assert together == (0.0, 1.0), "a text or the other, or both"


def test_sample_without_rounds_counts_as_zero():
    assert interval([4.0, 0.0], [2, 0]) == (0.0, 2.0)


def test_columns_are_drawn_together():
    easy = np.arange(20.0)
    mine, other, rounds = resampled_sums([easy + 1, easy, np.ones(20)]).T
    assert np.allclose(mine - other, rounds)
    assert (rounds == 20).all()
    assert mine.std() > 10
    assert central_interval(ratio(mine, rounds)) == pytest.approx(interval(easy + 1, np.ones(20)))


def test_interval_holds_the_truth_in_nineteen_of_twenty_samples():
    random = np.random.default_rng(3)
    inside = 0
    for _ in range(60):
        bottom = random.integers(5, 15, 48)
        top = 2 * bottom + random.normal(0, 3, 48)
        low, high = interval(top, bottom)
        inside += low <= 2 <= high
    assert 52 <= inside <= 59
