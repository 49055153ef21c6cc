"""Reduced draft vocabularies (FR-Spec, arXiv:2502.14856), and sampling distributions over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from decode.errors import UserError
from decode.kernels.int8_linear import round_rows
from decode.kernels.packed_linear import Linear
from decode.model.head import Head, HeadRows
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.sampling import Sampler

LARGE = 2**14  # tokens of the smallest target that `auto` reduces
MAX_TOKENS = 32000  # most tokens that `auto` chooses, as in EAGLE-3
MAX_COVERAGE_LOSS = 0.02  # coverage that `auto` gives up relative to its ceiling
MIN_TOKENS = 2048  # fewest tokens that `auto` chooses: new answers have tokens that these lack
STEP = 256  # tokens
CHUNK = 4096  # texts counted at a time
FOLDS = 10  # of the cross-validation that estimates coverage
SCORED = 0.999  # minimum share of the answers' tokens that training scores


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
        """The vocabulary of a head's logits; None: the target's."""
        return None if head.d2t is None else cls(head.d2t, target.vocab_size)


class TokenCounts(NamedTuple):
    """How often the target wrote each token, for the choice of a draft vocabulary.

    Attributes:
        folds: (F, V) counts in each fold of the answers.
        first: tokens that end an answer; always included.
    """

    folds: Tensor
    first: Sequence[int]

    @classmethod
    def of(
        cls, texts: Iterable[tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]], target: Target
    ) -> Self:
        """Count the tokens of texts where the mask is 1."""
        size = FOLDS * target.vocab_size
        counts = np.zeros(size, np.int64)
        rest = enumerate(texts)
        while part := list(islice(rest, CHUNK)):
            places = [
                np.asarray(tokens)[np.asarray(mask, bool)] + number % FOLDS * target.vocab_size
                for number, (tokens, mask) in part
            ]
            counts += np.bincount(np.concatenate(places), minlength=size)
        return cls(torch.from_numpy(counts).view(FOLDS, -1), stop_tokens(target))

    @property
    def counts(self) -> Tensor:
        """(V,) counts in all answers."""
        return self.folds.sum(0)

    def most_frequent(self, size: int) -> Tensor:
        """(V',) ids of the most frequent tokens, ascending."""
        return by_frequency(self.counts, self.first)[:size].sort().values

    def coverage(self) -> Tensor:
        """(V,) estimated coverage of new answers by the 1, 2, ... most frequent tokens.

        Cross-validated over answers: tokens are ranked on all folds but one and counted on that one. The
        Good-Turing estimate would be too high, since an answer repeats its rare tokens.
        """
        counts, covered = self.counts, torch.zeros(self.folds.shape[1], dtype=torch.long)
        for fold in self.folds:
            covered += fold[by_frequency(counts - fold, self.first)].cumsum(0)
        return covered.double() / counts.sum().clamp_min(1)

    def enough(self, least: int) -> tuple[int, float]:
        """Size of an `auto` draft vocabulary, and its estimated coverage.

        The smallest multiple of `STEP`, at least `least`, with a coverage at most `MAX_COVERAGE_LOSS` below
        the `ceiling`'s. With few answers the vocabulary is larger, since they say little of rare tokens.
        """
        coverage, most = self.coverage(), ceiling(self.folds.shape[1])
        wanted, sizes = coverage[most - 1] - MAX_COVERAGE_LOSS, [*range(STEP, most, STEP), most]
        size = next(size for size in sizes if size >= min(least, most) and coverage[size - 1] >= wanted)
        return size, float(coverage[size - 1])

    def scored(self, least: int) -> Tensor | None:
        """(V_t,) ids of the tokens that training scores, ascending; None: all, if half are not enough.

        The product with a whole head takes most of a training step, and most tokens never occur in answers.

        Args:
            least: minimum V_t, the draft vocabulary.
        """
        counts = self.counts
        order = by_frequency(counts, self.first)
        written = counts[order].cumsum(0)
        enough = int((written < SCORED * written[-1]).sum()) + 1
        size = max(least, -(-enough // STEP) * STEP)
        return order[:size].sort().values if size <= len(order) // 2 else None

    def covered(self, ids: Tensor) -> float:
        """Share of the counted tokens that is among (V',) ids."""
        return float(self.counts[ids].sum() / self.counts.sum().clamp_min(1))

    def share(self, ids: Tensor) -> str:
        """`covered`, as text for users."""
        return f"of {len(self.counts)} tokens make {self.covered(ids):.2%} of the answers"


def by_frequency(counts: Tensor, first: Sequence[int]) -> Tensor:
    """(V,) ids sorted by (V,) counts, the most frequent first, after the tokens `first`.

    Ties are in the order of ids: tokenizers give frequent tokens the smaller ids.
    """
    rank = counts.clone()
    rank[list(first)] = int(counts.max()) + 1
    return rank.sort(descending=True, stable=True).indices


def ceiling(vocab_size: int) -> int:
    """Maximum size of an `auto` vocabulary for a target with V tokens: V / 4, at most `MAX_TOKENS`."""
    return min(vocab_size // 4, MAX_TOKENS)


def draft_vocab_size(setting: int | str | None, vocab_size: int) -> int | None:
    """Size of a draft vocabulary from its option; None: the target's vocabulary.

    Args:
        setting: a number of tokens; `auto`: the `ceiling`, until `fit` chooses the size, for a target with
            `LARGE` tokens or more, else all; None: all.
        vocab_size: V of the target.

    Raises:
        UserError: another value.
    """
    if setting == "auto":
        setting = ceiling(vocab_size) if vocab_size >= LARGE else None
    if setting is not None and (not isinstance(setting, int) or isinstance(setting, bool) or setting < 1):
        raise UserError(f"drafter.draft_vocab_size={setting}: give a number of tokens, auto or null")
    return setting if setting is not None and setting < vocab_size else None


def unused_token(target: Target) -> int:
    """A token that does not occur in text: the padding token, or else the last id.

    In most models the last ids are reserved or padding. Special tokens are skipped, and tokens with a zero
    embedding, since these cannot serve as a mask.
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

    Where softmax gives NaN (logits with NaN or +inf, or all -inf), a row is 0, so nothing is drawn from it.
    """
    probs = warp.probs(logits).nan_to_num_(nan=0.0)
    if vocabulary is None:
        return probs
    return probs.new_zeros(len(probs), vocabulary.size).index_copy_(1, vocabulary.ids, probs)


class DraftVocabulary(nn.Module):
    """Base of drafters: the tokens that it may propose, and its output head over them.

    Args:
        draft_vocab_size: V', number of tokens that it may propose (FR-Spec, arXiv:2502.14856); None: all.
            Training scores these and other tokens that the target writes; distributions in evaluation mode
            are over these.

    Attributes:
        d2t: (V',) ids of a reduced draft vocabulary, ascending; -1 until `fit` has chosen them.
        scored: (V_t,) ids of the tokens that training scores, ascending; None: all.
        int8: whether its weights are rounded to int8.
        sizes_vocabulary: whether `fit` also chooses the size of the draft vocabulary.

    Raises:
        UserError: a size below 1.
    """

    int8 = False
    sizes_vocabulary = False
    settings: dict[str, Any]
    d2t: Tensor | None
    scored: Tensor | None

    def __init__(self, draft_vocab_size: int | None = None) -> None:
        super().__init__()
        if draft_vocab_size is not None and draft_vocab_size < 1:
            raise UserError(f"drafter.draft_vocab_size={draft_vocab_size}: give at least 1")
        self.register_buffer("d2t", None if draft_vocab_size is None else torch.full((draft_vocab_size,), -1))
        self.register_buffer("scored", None, persistent=False)
        self._head_rows = HeadRows()

    def output_head(self, head: Head) -> Head:
        """The head over the draft vocabulary, rounded if the drafter is; in training over `scored`.

        A trainable head keeps all rows.
        """
        if not self.training:
            return self._head_rows.of(head, self.d2t, self.int8)
        return head if head.weight.requires_grad else self._head_rows.of(head, self.scored)

    def round_to_int8(self) -> None:
        """Round the weights of all products to int8, and in decoding also the output head.

        `unroll` reads the rounded weights, too. The checkpoint of a loaded drafter does not change.

        Raises:
            UserError: it has no such weights.
        """
        layers = [module for module in self.modules() if isinstance(module, Linear)]
        if not layers:
            raise UserError("score.quantize=int8: this drafter has no layers to round; leave it none")
        for layer in layers:
            round_rows(layer.weight)
        for module in self.modules():
            if isinstance(module, DraftVocabulary):
                module.int8 = True

    @torch.no_grad()
    def choose_tokens(self, counts: TokenCounts, target: Target) -> str:
        """Choose the draft vocabulary and other sets of tokens that depend on the counts; see `fit`."""
        del target
        assert self.d2t is not None
        new = ""
        if self.sizes_vocabulary:
            size, coverage = counts.enough(self.fewest_tokens)
            self.resize_vocabulary(size)
            new = f", and about {coverage:.2%} of new ones"
        self.d2t.copy_(counts.most_frequent(len(self.d2t)))
        self.choose_scored(counts)
        return f"{len(self.d2t)} {counts.share(self.d2t.cpu())}{new}"

    def choose_scored(self, counts: TokenCounts) -> None:
        """Choose the tokens that training scores: frequent ones, and the draft vocabulary."""
        assert self.d2t is not None
        scored = counts.scored(len(self.d2t))
        self.scored = None if scored is None else torch.cat([scored.to(self.d2t), self.d2t]).unique()

    @property
    def fewest_tokens(self) -> int:
        """Minimum size of a draft vocabulary that `fit` chooses."""
        return MIN_TOKENS

    def resize_vocabulary(self, size: int) -> None:
        """Give the draft vocabulary another size, before its tokens are chosen or loaded."""
        assert self.d2t is not None
        self.d2t = self.d2t.new_full((size,), -1)
        self.settings["draft_vocab_size"] = size
