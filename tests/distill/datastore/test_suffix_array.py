"""Places sorted in pieces, against Python's own sort."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.datastore.suffix_array import sort_places

FEW = st.lists(st.integers(0, 2), max_size=60)  # so that many places are tied


def filled(tokens, kind, depth) -> np.ndarray:
    return np.array([*tokens, *[np.iinfo(kind).max] * depth]).astype(kind)


def by_hand(text, size, depth) -> list[int]:
    tokens = text.tolist()
    return sorted(range(size), key=lambda place: (tokens[place : place + depth], place))


@pytest.mark.parametrize("kind", [">u2", ">u4"])
@given(texts=st.one_of(FEW, st.lists(st.integers(0, 300), max_size=60)), bucket=st.integers(1, 70))
def test_places_are_sorted_by_the_tokens_behind_them(kind, texts, bucket):
    text, order = filled(texts, kind, 4), np.full(len(texts), 7, np.uint32)
    counts = list(sort_places(text, order, 4, bucket))
    assert sum(counts) == len(texts)
    assert order.tolist() == by_hand(text, len(texts), 4)


def test_repetitions_beyond_the_depth_are_sorted_by_place():
    text, order = filled([1, 2, 3] * 50, ">u2", 16), np.zeros(150, np.uint32)
    assert sum(sort_places(text, order, 16, 40)) == 150
    assert order.tolist() == by_hand(text, 150, 16)
