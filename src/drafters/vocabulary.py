"""A draft vocabulary smaller than the target's, and the laws that tokens are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from decode.sampling import Sampler


class Vocabulary(NamedTuple):
    """A reduced draft vocabulary.

    Attributes:
        ids: (V',) the target's id of every draft id, ascending: ties stay in order.
        size: V of the target.
    """

    ids: Tensor
    size: int


def frequent(counts: Tensor, size: int, first: Sequence[int]) -> Tensor:
    """A draft vocabulary: these tokens, then those that were counted most often.

    Args:
        counts: (V,) of every token.
        size: V' of the vocabulary.
        first: tokens that are in it however rare.

    Returns:
        (V',) ids, ascending.
    """
    rank = counts.clone()
    rank[list(first)] = int(counts.max()) + 1
    return rank.sort(descending=True, stable=True).indices[:size].sort().values


def names(token: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    """The target's ids of draft ids."""
    return token if vocabulary is None else vocabulary.ids[token]


def law_of(logits: Tensor, warp: Sampler, vocabulary: Vocabulary | None) -> Tensor:
    """(R, V) or (R, V') logits -> (R, V) law."""
    law = warp.law(logits)
    if vocabulary is None:
        return law
    return law.new_zeros(len(law), vocabulary.size).index_copy_(1, vocabulary.ids, law)
