"""Reduced draft vocabularies (FR-Spec, arXiv:2502.14856), and sampling distributions over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from decode.errors import UserError
from decode.model.head import Head
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.sampling import Sampler

LARGE = 2**14  # tokens


class Vocabulary(NamedTuple):
    """A reduced draft vocabulary.

    Attributes:
        ids: (V',) the target's id of every draft id, ascending, so that ties break as in the target.
        size: V of the target.
    """

    ids: Tensor
    size: int

    @classmethod
    def of(cls, head: Head, target: Target) -> Self | None:
        """Of a head's logits; None: the target's vocabulary."""
        return None if head.d2t is None else cls(head.d2t, target.vocab_size)


class TokenCounts(NamedTuple):
    """How often the target wrote each token, for the choice of a draft vocabulary.

    Attributes:
        counts: (V,) of every token.
        first: tokens that are included however rare they are: those that end an answer.
    """

    counts: Tensor
    first: Sequence[int]

    @classmethod
    def of(cls, texts: Iterable[tuple[Sequence[int], Sequence[int]]], target: Target) -> Self:
        """Count the tokens of texts whose mask is 1."""
        counts = torch.zeros(target.vocab_size, dtype=torch.long)
        for tokens, mask in texts:
            written = torch.tensor(tokens)[torch.tensor(mask, dtype=torch.bool)]
            counts += torch.bincount(written, minlength=len(counts))
        return cls(counts, stop_tokens(target))

    def most_frequent(self, size: int) -> Tensor:
        """(V',) ids, ascending."""
        return most_frequent(self.counts, size, self.first)

    def share(self, ids: Tensor) -> str:
        """Which share of the counted tokens is among (V',) ids, for users."""
        share = float(self.counts[ids].sum() / self.counts.sum().clamp_min(1))
        return f"of {len(self.counts)} tokens make {share:.2%} of the answers"


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


def draft_vocab_size(setting: int | str | None, vocab_size: int) -> int | None:
    """Size of a draft vocabulary as users write it; None: the target's vocabulary.

    Args:
        setting: a number of tokens; `auto`: a quarter of the target's, at most 32000, where it has
            `LARGE` or more, whose head is a large part of a draft; None: all.
        vocab_size: V of the target.

    Raises:
        UserError: neither of these.
    """
    if setting == "auto":
        setting = min(vocab_size // 4, 32000) if vocab_size >= LARGE else None
    if setting is not None and (not isinstance(setting, int) or isinstance(setting, bool) or setting < 1):
        raise UserError(f"drafter.draft_vocab_size={setting}: give a number of tokens, auto or null")
    return setting if setting is not None and setting < vocab_size else None


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
