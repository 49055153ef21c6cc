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

LARGE = 2**14  # tokens
CEILING = 32000  # tokens that `auto` chooses at most; EAGLE-3's number
SPARED = 0.02  # share of new answers that `auto` gives up against its ceiling; docs/drafters.md has a table
FEWEST = 2048  # tokens, however few the answers have: others may be written later
STEP = 256  # tokens
CHUNK = 4096  # texts that are counted together
FOLDS = 10  # of the answers, for the estimate of that share
SCORED = 0.999  # share of the answers that the tokens which training scores make


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
        folds: (F, V) of every token, in each F-th of the answers.
        first: tokens that are included however rare they are: those that end an answer.
    """

    folds: Tensor
    first: Sequence[int]

    @classmethod
    def of(
        cls, texts: Iterable[tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]], target: Target
    ) -> Self:
        """Count the tokens of texts whose mask is 1."""
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
        """(V,) of every token, in all answers."""
        return self.folds.sum(0)

    def most_frequent(self, size: int) -> Tensor:
        """(V',) ids, ascending."""
        return by_frequency(self.counts, self.first)[:size].sort().values

    def coverage(self) -> Tensor:
        """(V,) estimated share of new answers that is among the 1, 2, ... most frequent tokens.

        By cross-validation over answers: each F-th is covered by what the others wrote most. An answer
        repeats its rare tokens, so that the tokens which occur once (Good and Turing's estimate) would
        promise too much: 0.7 % of new answers unseen where it is 3.6 %.
        """
        counts, covered = self.counts, torch.zeros(self.folds.shape[1], dtype=torch.long)
        for fold in self.folds:
            covered += fold[by_frequency(counts - fold, self.first)].cumsum(0)
        return covered.double() / counts.sum().clamp_min(1)

    def enough(self, least: int) -> tuple[int, float]:
        """Size of the draft vocabulary that `auto` means, and its estimated coverage.

        The smallest multiple of `STEP`, at least `least`, whose estimated coverage is `SPARED` below the
        the `ceiling`, or better. Few answers say little of the rare tokens and have a larger vocabulary.
        """
        coverage, most = self.coverage(), ceiling(self.folds.shape[1])
        wanted, sizes = coverage[most - 1] - SPARED, [*range(STEP, most, STEP), most]
        size = next(size for size in sizes if size >= min(least, most) and coverage[size - 1] >= wanted)
        return size, float(coverage[size - 1])

    def scored(self, least: int) -> Tensor | None:
        """(V_t,) ids of the tokens that training scores, ascending; None: all, where half would not do.

        A product with a whole head is most of a training step, and most of its rows are of tokens that no
        answer has.

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
        """The same, for users."""
        return f"of {len(self.counts)} tokens make {self.covered(ids):.2%} of the answers"


def by_frequency(counts: Tensor, first: Sequence[int]) -> Tensor:
    """(V,) ids by their (V,) counts, the highest first, after those that are included however rare they are.

    Equals are in the order of ids: tokenizers number what is frequent before what is rare.
    """
    rank = counts.clone()
    rank[list(first)] = int(counts.max()) + 1
    return rank.sort(descending=True, stable=True).indices


def ceiling(vocab_size: int) -> int:
    """Maximum size that `auto` means for a target with V tokens: a quarter, at most `CEILING`."""
    return min(vocab_size // 4, CEILING)


def draft_vocab_size(setting: int | str | None, vocab_size: int) -> int | None:
    """Size of a draft vocabulary as users write it; None: the target's vocabulary.

    Args:
        setting: a number of tokens; `auto`: the `ceiling` of a target that has `LARGE` tokens or more, whose
            head is a large part of a draft, until `fit` knows how many are enough; None: all.
        vocab_size: V of the target.

    Raises:
        UserError: neither of these.
    """
    if setting == "auto":
        setting = ceiling(vocab_size) if vocab_size >= LARGE else None
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


class DraftVocabulary(nn.Module):
    """The part of a drafter that knows which tokens it may propose, and reads a head over these.

    Args:
        draft_vocab_size: V', number of tokens that it may propose (FR-Spec, arXiv:2502.14856); None: all.
            It is trained over these and the other tokens that the target writes, and in evaluation mode its
            distributions are over these tokens.

    Attributes:
        d2t: (V',) ids of a reduced draft vocabulary, ascending; -1 until `fit` has chosen them.
        scored: (V_t,) ids of the tokens that training scores, ascending; None: all.
        int8: whether its weights are rounded to int8.
        sizes_vocabulary: `fit` chooses the size of the draft vocabulary, too, in place of `draft_vocab_size`.

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
        """A head over the draft vocabulary, rounded if the drafter is; in training over `scored`.

        A head that trains keeps its rows.
        """
        if not self.training:
            return self._head_rows.of(head, self.d2t, self.int8)
        return head if head.weight.requires_grad else self._head_rows.of(head, self.scored)

    def round_to_int8(self) -> None:
        """Round the weights of all products to int8, and in decoding also the output head.

        Training and decoding face stay one model. For a loaded drafter: its checkpoint stays as it is.

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
        """Choose the draft vocabulary, and what else follows from the counts; see `fit`."""
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
        """Choose the tokens that training scores: what the answers call for, and the draft vocabulary."""
        assert self.d2t is not None
        scored = counts.scored(len(self.d2t))
        self.scored = None if scored is None else torch.cat([scored.to(self.d2t), self.d2t]).unique()

    @property
    def fewest_tokens(self) -> int:
        """Minimum size of a draft vocabulary that `fit` chooses."""
        return FEWEST

    def resize_vocabulary(self, size: int) -> None:
        """Give the draft vocabulary another size, before its tokens are chosen or loaded."""
        assert self.d2t is not None
        self.d2t = self.d2t.new_full((size,), -1)
        self.settings["draft_vocab_size"] = size
