"""Counts of what follows n-grams, against a counter that goes through the texts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.draft import PAD
from drafters.families.ngram_counts import KEPT, Following, NgramCounts, hashes

ORDERS = (1, 2, 3, 5)


def joined(rollouts) -> np.ndarray:
    return np.array([token for rollout in rollouts for token in [*rollout, PAD]], np.int32)


def looked_up(counts, ngram) -> Following | None:
    (value,) = hashes(ngram, [len(ngram)])
    return counts.after(len(ngram), value)


# -- against a counter that goes through the texts -------------------------------------------------

alphabets = st.sampled_from([(0, 1), (0, 1, 2), (7, 255, 256, 70_000, 200_000)])
few = alphabets.flatmap(lambda letters: st.lists(st.lists(st.sampled_from(letters), max_size=12), max_size=6))
many = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3 * KEPT)).map(list), max_size=6 * KEPT)


def counted(rollouts) -> dict[tuple[int, ...], Counter]:
    """N-gram -> how often tokens followed it."""
    found: dict[tuple[int, ...], Counter] = {}
    for rollout in rollouts:
        for n in ORDERS:
            for end in range(n, len(rollout)):
                found.setdefault(tuple(rollout[end - n : end]), Counter())[rollout[end]] += 1
    return found


@given(few | many)
def test_counts_are_those_of_the_texts(rollouts):
    counts, want = NgramCounts(joined(rollouts), ORDERS), counted(rollouts)
    for ngram, followed in want.items():
        found = looked_up(counts, ngram)
        assert found is not None
        assert found.total == followed.total()
        assert found.distinct == len(followed)
        assert len(found.tokens) == len(found.counts) == len(set(found.tokens)) == min(len(followed), KEPT)
        assert [followed[token] for token in found.tokens] == list(found.counts)
        assert list(found.counts) == sorted(followed.values(), reverse=True)[:KEPT]
        assert all(isinstance(number, int) for part in found[:2] for number in part)


@given(few, st.lists(st.sampled_from([PAD, 0, 1, 7, 255]), min_size=1, max_size=5).map(tuple))
def test_an_ngram_that_nothing_followed_is_unknown(rollouts, ngram):
    """At the end of a text, or across two of them, or nowhere."""
    if len(ngram) in ORDERS:
        found = looked_up(NgramCounts(joined(rollouts), ORDERS), ngram)
        assert (found is None) == (ngram not in counted(rollouts))


@given(st.lists(st.integers(0, 200_000), max_size=7))
def test_the_hash_of_an_ngram_is_that_of_the_last_tokens_of_a_longer_text(text):
    fits = [n for n in ORDERS if n <= len(text)]
    assert hashes(text, ORDERS) == [hashes(text[-n:], [n])[0] for n in fits]
    assert all(0 <= value < 2**64 for value in hashes(text, ORDERS))


# -- by hand ---------------------------------------------------------------------------------------


def test_the_most_frequent_come_first_and_no_text_runs_into_the_next():
    counts = NgramCounts(joined([[1, 2, 3], [1, 2, 4], [9, 2, 4], [4, 1]]), [1, 2])
    assert looked_up(counts, (2,)) == ([4, 3], [2, 1], 3, 2)
    assert looked_up(counts, (1, 2)) == ([3, 4], [1, 1], 2, 2)
    assert looked_up(counts, (3,)) is None
    assert looked_up(counts, (2, 4)) is None
    assert looked_up(counts, (3, PAD)) is None
    assert looked_up(counts, (PAD, 1)) is None


def test_totals_count_the_tokens_that_are_not_kept_too():
    rollouts = [[0, token] for token in range(1, KEPT + 6)] + [[0, KEPT + 5]]
    found = looked_up(NgramCounts(joined(rollouts), [1]), (0,))
    assert found is not None
    assert list(found.tokens) == [KEPT + 5, *range(1, KEPT)]
    assert (found.total, found.distinct) == (KEPT + 6, KEPT + 5)


@pytest.mark.parametrize("rollouts", [[], [[]], [[], [1], []], [[1, 2]]], ids=str)
def test_texts_that_are_too_short_have_nothing(rollouts):
    counts = NgramCounts(joined(rollouts), [2, 8])
    for n in (2, 8):
        assert looked_up(counts, (1,) * n) is None


def test_tokens_in_another_order_are_another_ngram():
    ngrams = [(1, 2), (2, 1), (200_000, 0), (0, 200_000), (0, 0), (0,), (0, 0, 0)]
    assert len({hashes(ngram, [len(ngram)])[0] for ngram in ngrams}) == len(ngrams)
