"""Search for sublayers of a target that draft well at a share of its cost (SWIFT, arXiv:2410.06916)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from decode.errors import UserError
from decode.model.fused_forward import Fused, Parts
from decode.model.target import Target
from decode.transfer import RowInts
from drafters.base import Progress, Text

LETTERS = "-amb"  # used parts of a layer: none, attention, MLP, both
TEXTS = 16  # rollouts for counting agreement
PLACES = 64  # maximum per rollout
EVALUATIONS = 200
Chosen = frozenset[int]  # sublayers: 2 i is the attention of layer i, 2 i + 1 its MLP


def parts_of(word: str) -> list[Parts]:
    """Sublayers from one letter per layer, see `LETTERS`."""
    return [Parts(letter in "ab", letter in "mb") for letter in word]


def word_of(chosen: Chosen, layers: int) -> str:
    """The inverse of `parts_of`."""
    return "".join(LETTERS[(2 * i in chosen) + 2 * (2 * i + 1 in chosen)] for i in range(layers))


class Costs:
    """Multiply-adds per token with weights; attention over keys is ignored, as it depends on the text.

    Args:
        fused: the target's layers.
        target: provides the head.
    """

    def __init__(self, fused: Fused, target: Target) -> None:
        self.head, self.sublayers = target.head.weight.numel(), list[int]()
        for layer in fused.layers:
            pairs = (layer.qkv, layer.out), (layer.gate_up, layer.down)
            self.sublayers += [sum(part.weight.numel() for part in pair) for pair in pairs]
        self.whole = self.head + sum(self.sublayers)

    def share(self, chosen: Iterable[int]) -> float:
        """Cost of sublayers and head as a share of the whole target's."""
        return (self.head + sum(self.sublayers[i] for i in chosen)) / self.whole

    def filled(self, chosen: Chosen, order: Iterable[int], share: float) -> Chosen:
        """Add sublayers in this order as long as the cost stays within a share."""
        for i in order:
            if self.share(chosen | {i}) <= share:
                chosen |= {i}
        return chosen


class Agreement:
    """Share of positions where a part of the target has the same most likely token as the whole.

    Each text is read once and kept in the cache. Each position gets a scratch slot after the text, which
    sees itself and the target's keys of all earlier positions. So one pass computes the first pass of a
    draft at all positions.

    Args:
        target: its cache is replaced.
        texts: compared at evenly spaced positions before supervised tokens.

    Raises:
        UserError: there are no such positions.
    """

    def __init__(self, target: Target, texts: Iterable[Text]) -> None:
        used = list(islice((text for text in texts if np.any(text.loss_mask[1:])), TEXTS))
        if not used:
            raise UserError(
                "drafter.sublayers: the search needs answers; set drafter.sublayers or drafter.layers"
            )
        spots = [_evenly_spaced(np.flatnonzero(text.loss_mask[1:])) for text in used]
        lengths, width = RowInts([len(text.tokens) for text in used]), max(map(len, spots))
        tokens = np.zeros((len(used), max(lengths)), np.int64)
        place, real = (np.zeros((len(used), width), kind) for kind in (np.int64, bool))
        for row, (text, spot) in enumerate(zip(used, spots, strict=True)):
            tokens[row, : len(text.tokens)] = text.tokens
            place[row, : len(spot)], real[row, : len(spot)] = spot, True
        device = target.device
        text, self._places = torch.from_numpy(tokens).to(device), torch.from_numpy(place).to(device)
        self._target, self._real = target, torch.from_numpy(real).to(device)  # (B, n)
        target.start(len(used), max(lengths) + width)
        target.read_text(text)
        target.keep(lengths)
        target.cache.store.begin(width)
        self._tokens = text.gather(1, self._places)
        self._mask = self._visible(lengths.on(device))
        self.places = int(self._real.sum())
        self._expected = self._likeliest(None)

    def _visible(self, lengths: Tensor) -> Tensor:
        """(B, 1, n, width) additive mask."""
        store, count, dtype = self._target.cache.store, self._places.shape[1], self._target.dtype
        slot = torch.arange(store.width, device=lengths.device)
        own = (lengths[:, None] + torch.arange(count, device=lengths.device))[..., None]  # (B, n, 1)
        visible = (slot < self._places[..., None]).scatter(2, own, value=True)
        mask = torch.zeros(visible.shape, dtype=dtype, device=lengths.device)
        return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]

    def _likeliest(self, parts: Sequence[Parts] | None) -> Tensor:
        """(B, n) most probable tokens."""
        target = self._target
        assert target.fused is not None
        store = target.cache.store
        last = target.fused(self._places, self._mask, store, {}, parts, input_ids=self._tokens)
        return torch.stack([target.head(row).argmax(-1) for row in last])  # logits of one text at a time

    def __call__(self, word: str) -> float:
        """Agreement of a word's sublayers."""
        return float((self._likeliest(parts_of(word)) == self._expected)[self._real].double().mean())


def _evenly_spaced(places: np.ndarray) -> np.ndarray:
    """At most `PLACES` evenly spaced elements."""
    return places[:: -(-len(places) // PLACES)]


class Found(NamedTuple):
    """Result of a search.

    Attributes:
        word: the best sublayers, see `parts_of`.
        text: description in one line.
    """

    word: str
    text: str


@torch.inference_mode()
def search(target: Target, texts: Iterable[Text], share: float, progress: Progress | None = None) -> Found:
    """Find sublayers whose pass costs at most a share of the target's and agrees with it most often.

    It starts from the best of three: the longest early exit, evenly spaced whole layers, and the sublayers
    that reduce agreement most when they are removed. Then it replaces a random sublayer by random others
    that fit into the share, and keeps improvements. It is deterministic for the same texts.

    Args:
        target: with a fused pass; its cache is replaced.
        texts: rollouts; the first `TEXTS` are used.
        share: of the target's multiply-adds, head included.
        progress: see `Drafter.fit`.

    Raises:
        UserError: the head and one sublayer cost more, or there is no text.
    """
    assert target.fused is not None
    layers, costs = len(target.layers), Costs(target.fused, target)
    every = range(2 * layers)
    if not costs.filled(frozenset(), every, share):
        least = costs.share([min(every, key=costs.sublayers.__getitem__)])
        raise UserError(
            f"drafter.cost={share}: the head and one sublayer cost {least:.2f}; give at least that"
        )
    agreement, scores = Agreement(target, texts), dict[Chosen, float]()

    def score(chosen: Chosen) -> float:
        if chosen not in scores:
            scores[chosen] = agreement(word_of(chosen, layers))
            if progress:
                progress(len(scores), EVALUATIONS)
        return scores[chosen]

    early, spaced = _whole_layers(costs, layers, share)
    starts = [early, spaced]
    if 2 * len(every) <= EVALUATIONS:
        without = {i: score(frozenset(every) - {i}) for i in every}
        starts.append(costs.filled(frozenset(), sorted(every, key=without.__getitem__), share))
    best, rng = max(starts, key=score), random.Random(0)
    for _ in range(10 * EVALUATIONS):
        if len(scores) == EVALUATIONS:
            break
        left = [i for i in every if i not in best]
        other = costs.filled(best - {rng.choice(sorted(best))}, rng.sample(left, len(left)), share)
        best = max(best, other, key=score)  # ties keep the current best
    target.start(1, 1)  # frees the cache
    words = [f"{word_of(one, layers)} {score(one):.1%}" for one in (best, early, spaced)]
    return Found(
        word_of(best, layers),
        f"sublayers {words[0]} of the target's likeliest tokens at {costs.share(best):.2f} of its cost "
        f"({len(scores)} tried on {agreement.places:,} places; early exit {words[1]}, evenly spaced "
        f"{words[2]})",
    )


def _whole_layers(costs: Costs, layers: int, share: float) -> tuple[Chosen, Chosen]:
    """As many first layers, and as many evenly spaced layers, as fit into the share.

    Further sublayers fill the rest of the share.
    """
    pair = [frozenset((2 * i, 2 * i + 1)) for i in range(layers)]
    count = max(n for n in range(layers + 1) if not n or costs.share(frozenset().union(*pair[:n])) <= share)
    used = [round(i * (layers - 1) / max(count - 1, 1)) for i in range(count)]
    whole = [frozenset[int]().union(*(pair[i] for i in chosen)) for chosen in (range(count), used)]
    early, spaced = (costs.filled(chosen, range(2 * layers), share) for chosen in whole)
    return early, spaced
