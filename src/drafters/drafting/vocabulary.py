"""Reduced draft vocabularies, and sampling distributions over them."""

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
        ids: (V',) the target's id of every draft id, ascending, so that ties break as in the target.
        size: V of the target.
    """

    ids: Tensor
    size: int


def most_frequent(counts: Tensor, size: int, first: Sequence[int]) -> Tensor:
    """A draft vocabulary of the most frequent tokens.

    Args:
        counts: (V,) of every token.
        size: V' of the vocabulary.
        first: tokens that are included however rare they are.

    Returns:
        (V',) ids, ascending.
    """
    rank = counts.clone()
    rank[list(first)] = int(counts.max()) + 1
    return rank.sort(descending=True, stable=True).indices[:size].sort().values


def unused_token(target: Target) -> int:
    """A token that does not occur in text: the padding token, or else the last id.

    In most models the last ids are reserved or padding of the table. Special tokens are skipped, and
    tokens with a zero embedding, which cannot serve as a mask.
    """
    padding = getattr(target.config, "pad_token_id", None)
    special = {*stop_tokens(target), getattr(target.config, "bos_token_id", None), None}
    candidates = [padding, *reversed(range(target.vocab_size))]
    return next(
        token for token in candidates if token not in special and token_embedding(target, token).any()
    )


def token_embedding(target: Target, token: int) -> Tensor:
    """(1, D) the target's embedding of a token."""
    return target.embed(torch.tensor([token], device=target.device)).detach()


def target_ids(token: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    """Map draft ids to the target's ids."""
    return token if vocabulary is None else vocabulary.ids[token]


def probs_of(logits: Tensor, warp: Sampler, vocabulary: Vocabulary | None) -> Tensor:
    """(R, V) or (R, V') logits -> (R, V) probabilities; one-hot at temperature 0.

    A row is zero, so that nothing is drawn from it, where softmax gives NaN: logits with NaN or +inf, or
    all -inf.
    """
    probs = warp.probs(logits).nan_to_num_(nan=0.0)
    if vocabulary is None:
        return probs
    return probs.new_zeros(len(probs), vocabulary.size).index_copy_(1, vocabulary.ids, probs)
