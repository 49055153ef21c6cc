"""Two scorecards against each other."""

import numpy as np
import pytest
from cards import card_of, row_of
from compared import FAST, SLOW, TOKENS, row, timing

from distill.scoring.paired import (
    FEWEST,
    Estimate,
    speedup,
    speedup_ratio,
    tau_difference,
    why_incomparable,
)


def timed(value, columns, **more):
    """A row that was measured by batch."""
    return row_of(row(FAST, speedup=value, timing=columns, **more))


def noisy(speed, seed, batches=40):
    """A row whose batches differ in length and in speed, on a machine whose mood both decoders share."""
    random = np.random.default_rng(seed)
    tokens = random.integers(30, 90, batches)
    plain = 0.01 * tokens * random.uniform(0.5, 2.0, batches)  # the machine's mood
    mine = plain / speed * random.normal(1, 0.05, batches)
    columns = {"tokens": tokens, "seconds": mine, "plain_tokens": tokens, "plain_seconds": plain}
    value = plain.sum() / mine.sum()
    return timed(float(value), {name: column.tolist() for name, column in columns.items()})


def test_speedup_intervals_cover_19_of_20():
    """And is narrow: the machine's mood, a factor of four, is in both times."""
    found = [speedup(noisy(1.3, seed)).interval for seed in range(60)]
    assert 51 <= sum(low <= 1.3 <= high for low, high in found) <= 60
    assert found[0][1] - found[0][0] < 0.08


def test_equal_drafters_are_as_fast_as_each_other():
    one = noisy(1.3, 1)
    assert speedup_ratio(one, one) == Estimate(1.0, (1.0, 1.0))
    low, high = speedup_ratio(one, noisy(1.0, 1)).interval
    assert low == pytest.approx(1.3) == high, "the same noise in both"


def test_too_few_batches_have_no_interval():
    few = timing(1.5, 1.5, 1.5, 1.5, 1.5)
    assert speedup(timed(1.5, few)).interval is not None
    few = {name: column[: FEWEST - 1] for name, column in few.items()}
    one = timed(1.5, few)
    assert speedup(one) == speedup_ratio(one, timed(1.0, few)) == Estimate(1.5, None)
    short = {"tokens": TOKENS[: FEWEST - 1]}
    pair = row(FAST[: FEWEST - 1], **short), row(SLOW[: FEWEST - 1], **short)
    difference = tau_difference(*map(row_of, pair))
    assert difference.interval is None


def test_scores_of_other_answers_or_dtypes_are_incomparable():
    columns = timing(1.5, 1.5, 1.5, 1.5, 1.5)
    one = timed(1.5, columns)
    other = timed(1.5, columns | {"plain_tokens": [30, 40, 50, 60, 71]})
    card = card_of()
    assert why_incomparable(card, one, card, one) == ""
    assert why_incomparable(card, one, card, other) == "other answers"
    float32, bfloat16 = card_of(dtype="float32"), card_of(dtype="bfloat16")
    assert why_incomparable(float32, one, bfloat16, one) == "other dtype"
