"""Two scorecards against each other."""

import numpy as np
import pytest
from compared import FAST, SLOW, TOKENS, row, timed

from distill.scoring.paired import FEWEST, Estimate, comparable, faster, less, speedup


def noisy(speed, seed, batches=40):
    """A row whose batches differ in length and in speed, on a machine whose mood both decoders share."""
    random = np.random.default_rng(seed)
    tokens = random.integers(30, 90, batches)
    plain = 0.01 * tokens * random.uniform(0.5, 2.0, batches)  # the machine's mood
    mine = plain / speed * random.normal(1, 0.05, batches)
    columns = {"tokens": tokens, "seconds": mine, "plain_tokens": tokens, "plain_seconds": plain}
    value = plain.sum() / mine.sum()
    return {"speedup": value, "timed": {name: list(column) for name, column in columns.items()}}


def test_a_mood_that_both_share_is_in_no_interval():
    found = speedup(noisy(1.3, 0))
    low, high = found.interval
    assert low < found.value < high
    assert high - low < 0.08, "plain decoding alone varies by a factor of four"


def test_the_interval_of_a_speedup_holds_it_nineteen_times_of_twenty():
    found = [speedup(noisy(1.3, seed)).interval for seed in range(60)]
    assert 51 <= sum(low <= 1.3 <= high for low, high in found) <= 60


def test_equal_drafters_are_as_fast_as_each_other():
    one = noisy(1.3, 1)
    assert faster(one, one) == Estimate(1.0, (1.0, 1.0))
    low, high = faster(one, one | noisy(1.0, 1)).interval
    assert low == pytest.approx(1.3) == high, "the same noise in both"


def test_too_few_have_no_interval():
    few = timed(1.5, 1.5, 1.5, 1.5, 1.5)
    assert speedup({"speedup": 1.5, "timed": few}).interval is not None
    few = {name: column[: FEWEST - 1] for name, column in few.items()}
    one = {"speedup": 1.5, "timed": few}
    assert speedup(one) == faster(one, {"speedup": 1.0, "timed": few}) == Estimate(1.5, None)
    short = {"tokens": TOKENS[: FEWEST - 1]}
    found = less(row(FAST[: FEWEST - 1], **short), row(SLOW[: FEWEST - 1], **short))
    assert found is not None
    assert found.interval is None
    assert found.text("{:+.1f}").count("+") == 1


def test_texts_of_other_lengths_are_other_answers():
    one = {"temperature": 0.0, "timed": timed(1.5, 1.5, 1.5, 1.5, 1.5)}
    other = {"temperature": 0.0, "timed": one["timed"] | {"plain_tokens": [30, 40, 50, 60, 71]}}
    assert comparable({}, one, {}, one) == ""
    assert comparable({}, one, {}, other) == "other answers"
    assert comparable({"dtype": "float32"}, one, {"dtype": "bfloat16"}, one) == "other dtype"
