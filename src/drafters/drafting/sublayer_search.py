"""Search for sublayers of a target that draft well at a share of its cost, as in SWIFT (arXiv:2410.06916)."""

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

LETTERS = "-amb"  # of a layer: nothing of it, its attention, its MLP, both
TEXTS = 16  # rollouts that agreement is counted on
PLACES = 64  # at most, of each
EVALUATIONS = 200
Chosen = frozenset[int]  # sublayers: 2 i is the attention of layer i, 2 i + 1 its MLP


def parts_of(word: str) -> list[Parts]:
    """Sublayers from one letter a layer."""
    return [Parts(letter in "ab", letter in "mb") for letter in word]


def word_of(chosen: Chosen, layers: int) -> str:
    """The inverse of `parts_of`."""
    return "".join(LETTERS[(2 * i in chosen) + 2 * (2 * i + 1 in chosen)] for i in range(layers))


class Costs:
    """Multiply-adds of a token: of its products with weights, since those with keys depend on the text.

    Args:
        fused: the target's layers.
        target: whose head follows them.
    """

    def __init__(self, fused: Fused, target: Target) -> None:
        self.head, self.sublayers = target.head.weight.numel(), list[int]()
        for layer in fused.layers:
            pairs = (layer.qkv, layer.out), (layer.gate_up, layer.down)
            self.sublayers += [sum(part.weight.numel() for part in pair) for pair in pairs]
        self.whole = self.head + sum(self.sublayers)

    def share(self, chosen: Iterable[int]) -> float:
        """Of the whole target's, head included."""
        return (self.head + sum(self.sublayers[i] for i in chosen)) / self.whole

    def filled(self, chosen: Chosen, order: Iterable[int], share: float) -> Chosen:
        """With further sublayers in this order, those that a share of the cost has room for."""
        for i in order:
            if self.share(chosen | {i}) <= share:
                chosen |= {i}
        return chosen


class Agreement:
    """Share of places where a part of the target expects the same token as the whole does.

    Each text is read once and kept. Behind it, each place has a scratch slot of its own, which sees the
    target's keys of all places before it and itself: what the first pass of a draft sees, for all places
    in one pass.

    Args:
        target: its cache is replaced.
        texts: of which places before supervised tokens are compared, evenly spaced ones.

    Raises:
        UserError: there are no such places.
    """

    def __init__(self, target: Target, texts: Iterable[Text]) -> None:
        kept = list(islice((text for text in texts if np.any(text.loss_mask[1:])), TEXTS))
        if not kept:
            raise UserError(
                "drafter.sublayers: there is no answer to search on; give them, or drafter.layers"
            )
        spots = [_spread(np.flatnonzero(text.loss_mask[1:])) for text in kept]
        lengths, width = RowInts([len(text.tokens) for text in kept]), max(map(len, spots))
        tokens = np.zeros((len(kept), max(lengths)), np.int64)
        place, real = (np.zeros((len(kept), width), kind) for kind in (np.int64, bool))
        for row, (text, spot) in enumerate(zip(kept, spots, strict=True)):
            tokens[row, : len(text.tokens)] = text.tokens
            place[row, : len(spot)], real[row, : len(spot)] = spot, True
        device = target.device
        text, self._places = torch.from_numpy(tokens).to(device), torch.from_numpy(place).to(device)
        self._target, self._real = target, torch.from_numpy(real).to(device)  # (B, n)
        target.start(len(kept), max(lengths) + width)
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
        """Share for the sublayers of a word."""
        return float((self._likeliest(parts_of(word)) == self._expected)[self._real].double().mean())


def _spread(places: np.ndarray) -> np.ndarray:
    """At most `PLACES` of them, evenly spaced."""
    return places[:: -(-len(places) // PLACES)]


class Found(NamedTuple):
    """Result of a search.

    Attributes:
        word: of the best sublayers.
        text: one line that describes it.
    """

    word: str
    text: str


@torch.inference_mode()
def search(target: Target, texts: Iterable[Text], share: float, progress: Progress | None = None) -> Found:
    """Find sublayers whose pass costs at most a share of the target's and agrees with it most often.

    It begins with the best of the longest early exit, evenly spaced whole layers, and those sublayers
    without which the whole target agrees least. Then a sublayer is replaced by others that there is room
    for, at random, as long as that helps. The same texts give the same result.

    Args:
        target: with a fused pass; its cache is replaced.
        texts: rollouts, the first of which are used.
        share: of the target's multiply-adds, head included.
        progress: see `Drafter.fit`.

    Raises:
        UserError: the head alone costs more, or there is no text.
    """
    assert target.fused is not None
    layers, costs = len(target.layers), Costs(target.fused, target)
    every = range(2 * layers)
    if not costs.filled(frozenset(), every, share):
        least = costs.share([min(every, key=costs.sublayers.__getitem__)])
        raise UserError(
            f"drafter.cost={share}: the head and one sublayer cost {least:.2f}; give that or more"
        )
    agreement, known = Agreement(target, texts), dict[Chosen, float]()

    def score(chosen: Chosen) -> float:
        if chosen not in known:
            known[chosen] = agreement(word_of(chosen, layers))
            if progress:
                progress(len(known), EVALUATIONS)
        return known[chosen]

    early, spaced = _whole_layers(costs, layers, share)
    starts = [early, spaced]
    if 2 * len(every) <= EVALUATIONS:
        without = {i: score(frozenset(every) - {i}) for i in every}
        starts.append(costs.filled(frozenset(), sorted(every, key=without.__getitem__), share))
    best, dice = max(starts, key=score), random.Random(0)
    for _ in range(10 * EVALUATIONS):
        if len(known) == EVALUATIONS:
            break
        left = [i for i in every if i not in best]
        other = costs.filled(best - {dice.choice(sorted(best))}, dice.sample(left, len(left)), share)
        best = max(best, other, key=score)  # the first of equals
    target.start(1, 1)  # frees the cache
    words = [f"{word_of(one, layers)} {score(one):.1%}" for one in (best, early, spaced)]
    return Found(
        word_of(best, layers),
        f"sublayers {words[0]} of the target's likeliest tokens at {costs.share(best):.2f} of its cost "
        f"({len(known)} tried on {agreement.places:,} places; early exit {words[1]}, evenly spaced "
        f"{words[2]})",
    )


def _whole_layers(costs: Costs, layers: int, share: float) -> tuple[Chosen, Chosen]:
    """The first layers, and evenly spaced ones with the first and the last, as many as there is room for.

    What is left of the share is filled with sublayers of the next layers.
    """
    pair = [frozenset((2 * i, 2 * i + 1)) for i in range(layers)]
    count = max(n for n in range(layers + 1) if not n or costs.share(frozenset().union(*pair[:n])) <= share)
    kept = [round(i * (layers - 1) / max(count - 1, 1)) for i in range(count)]
    whole = [frozenset[int]().union(*(pair[i] for i in chosen)) for chosen in (range(count), kept)]
    early, spaced = (costs.filled(chosen, range(2 * layers), share) for chosen in whole)
    return early, spaced
