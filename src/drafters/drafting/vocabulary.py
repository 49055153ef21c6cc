"""A draft vocabulary smaller than the target's, and the laws that tokens are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.sampling import Sampler


class Vocabulary(NamedTuple):
    """A reduced draft vocabulary.

    Attributes:
        ids: (V',) the target's id of every draft id, ascending: ties stay in order.
        size: V of the target.
    """

    ids: Tensor
    size: int


def most_frequent(counts: Tensor, size: int, first: Sequence[int]) -> Tensor:
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


def unused_token(target: Target) -> int:
    """A token that no text holds, as far as a model can tell: its padding, or else its last id.

    Last ids are reserved or fill up the table in most models. Passed over are tokens with a meaning,
    and those whose embedding is 0, which would be nothing to begin a mask with.
    """
    padding = getattr(target.config, "pad_token_id", None)
    special = {*stop_tokens(target), getattr(target.config, "bos_token_id", None), None}
    candidates = [padding, *reversed(range(target.vocab_size))]
    return next(
        token for token in candidates if token not in special and token_embedding(target, token).any()
    )


def token_embedding(target: Target, token: int) -> Tensor:
    """(1, D) what the target reads of a token."""
    return target.embed(torch.tensor([token], device=target.device)).detach()


def target_ids(token: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    """The target's ids of draft ids."""
    return token if vocabulary is None else vocabulary.ids[token]


def probs_of(logits: Tensor, warp: Sampler, vocabulary: Vocabulary | None) -> Tensor:
    """(R, V) or (R, V') logits -> (R, V) probabilities; a row of zeros where logits are NaN or +inf, or
    all are -inf: nothing can be drawn from it, and no rule meets the NaN that softmax makes of it.
    (At temperature 0 a row is the one token that `argmax` gives.)
    """
    probs = warp.law(logits).nan_to_num_(nan=0.0)
    if vocabulary is None:
        return probs
    return probs.new_zeros(len(probs), vocabulary.size).index_copy_(1, vocabulary.ids, probs)
