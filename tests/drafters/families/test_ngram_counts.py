"""Counts of what follows n-grams, against a counter that goes through the texts."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from decode.draft import PAD
from drafters.drafting.ngram_counts import KEPT, Following, NgramCounts, hashes

ORDERS = (1, 2, 3, 5)

alphabets = st.sampled_from([(0, 1), (0, 1, 2), (7, 255, 256, 70_000, 200_000)])
few = alphabets.flatmap(lambda letters: st.lists(st.lists(st.sampled_from(letters), max_size=12), max_size=6))
many = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3 * KEPT)).map(list), max_size=6 * KEPT)


def counts_of(rollouts) -> NgramCounts:
    return NgramCounts(np.array([t for rollout in rollouts for t in [*rollout, PAD]], np.int32), ORDERS)


def looked_up(counts, ngram) -> Following | None:
    (value,) = hashes(ngram, [len(ngram)])
    return counts.after(len(ngram), value)


def counted(rollouts) -> dict[tuple[int, ...], Counter]:
    """N-gram -> how often tokens followed it."""
    found: dict[tuple[int, ...], Counter] = {}
    for rollout in rollouts:
        for n in ORDERS:
            for end in range(n, len(rollout)):
                found.setdefault(tuple(rollout[end - n : end]), Counter())[rollout[end]] += 1
    return found


@given(few | many)
@example([[0, token] for token in range(1, KEPT + 6)] + [[0, KEPT + 5]])  # more than are kept
@example([[], [1], [1, 2]])
def test_counts_are_those_of_the_texts(rollouts):
    counts = counts_of(rollouts)
    for ngram, followed in counted(rollouts).items():
        found = looked_up(counts, ngram)
        assert found is not None
        assert (found.total, found.distinct) == (followed.total(), len(followed))
        ranked = sorted(followed.items(), key=lambda item: (-item[1], item[0]))[:KEPT]
        assert list(zip(found.tokens, found.counts, strict=True)) == ranked
        assert all(isinstance(number, int) for part in found[:2] for number in part)


@given(few, st.lists(st.sampled_from([PAD, 0, 1, 7, 255]), min_size=1, max_size=5).map(tuple))
@example([[1, 2, 3], [2, 4]], (3,))
@example([[1, 2, 3], [2, 4]], (PAD, 2))
@example([[], [1], []], (1, 1))
def test_an_ngram_that_nothing_followed_is_unknown(rollouts, ngram):
    """At the end of a text, or across two of them, or nowhere."""
    if len(ngram) in ORDERS:
        found = looked_up(counts_of(rollouts), ngram)
        assert (found is None) == (ngram not in counted(rollouts))


@given(st.lists(st.integers(0, 200_000), max_size=7))
def test_the_hash_of_an_ngram_is_that_of_the_last_tokens_of_a_longer_text(text):
    fits = [n for n in ORDERS if n <= len(text)]
    assert hashes(text, ORDERS) == [hashes(text[-n:], [n])[0] for n in fits]
    assert all(0 <= value < 2**64 for value in hashes(text, ORDERS))


def test_tokens_in_another_order_are_another_ngram():
    ngrams = [(1, 2), (2, 1), (200_000, 0), (0, 200_000), (0, 0), (0,), (0, 0, 0)]
    assert len({hashes(ngram, [len(ngram)])[0] for ngram in ngrams}) == len(ngrams)
