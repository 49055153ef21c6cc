"""Unroll of decoder layers over their own output, computed for supervised anchors only.

This is the training-time test of EAGLE-3 (arXiv:2503.01840). The step of depth j reads the output of depth
j - 1. An anchor sees the keys and values of depth 1 up to itself, and its own of every later depth. Rows are
flat: at depth 1 all N positions up to the last anchor of their text, (N, D); later the M anchors that are
still supervised, (M, D). `unroll_attention` computes the attention, `AnchorIndex` the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafters.base import sample_anchors, supervised_anchors
from drafters.layers.decoder_layer import DecoderLayer, Rotary
from drafters.layers.unroll_attention import Visibility, attend_unrolled, oldest_keys, query_blocks


class FirstLayerInput(NamedTuple):
    """Input of the first layer: qkv = weight x + rest.

    Attributes:
        residual: (n, D) residual stream, which the layer adds its output to.
        x: (n, D) input of the q, k, v projection.
        rest: (n, P) precomputed summand of the projection, or None.
    """

    residual: Tensor
    x: Tensor
    rest: Tensor | None


class AnchorIndex:
    """Positions that take part in an unroll, computed on the host from the loss mask.

    Args:
        loss_mask: (B, T) bool.
        depth: maximum depth.
        sample: average number of anchors per text at depth 2 and deeper; 0: all.
        seed: of the sample.

    Attributes:
        anchors: for each depth with any supervised anchor, their flat indices b * T + t, (M,).
        share: number of anchors that each sampled one represents at depth 2 and deeper; 1 without a sample.
        places: (N,) flat indices of all positions up to the last anchor of their text.
        text: (N,) index into `places` of the text's first position.
        longest: upper bound on positions.
    """

    def __init__(self, loss_mask: Tensor, depth: int, sample: int = 0, seed: int = 0) -> None:
        mask = loss_mask.cpu()
        supervised = [supervised_anchors(mask, d) for d in range(1, depth + 1)]
        self.share = 1.0
        first = supervised[0].flatten().nonzero()[:, 0]
        if sample and len(first) > sample * len(mask):
            chosen = sample_anchors(first, sample * len(mask), seed)
            self.share = len(first) / len(chosen)
            kept = torch.zeros(mask.numel(), dtype=torch.bool)
            kept[chosen] = True
            supervised[1:] = [a & kept.view_as(a) for a in supervised[1:]]
        self.anchors = [a.flatten().nonzero()[:, 0] for a in supervised if a.any()]
        needed = supervised[0].flip(1).cumsum(1).flip(1) > 0  # (B, T): an anchor is here or follows
        self.places = needed.flatten().nonzero()[:, 0]
        sizes = needed.sum(1)
        self.longest = mask.shape[1] + depth
        self.text = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)  # exclusive sum: starts of texts

    def slots(self, depth: int) -> Tensor:
        """(M,) indices into `places` of the anchors of a depth."""
        return torch.searchsorted(self.places, self.anchors[depth - 1])


def finish_layer(layer: DecoderLayer, x: Tensor, attended: Tensor, checkpointing: bool) -> Tensor:
    """Output of a layer, given its attention; with `checkpointing` recomputed in the backward pass."""
    if checkpointing:
        return checkpoint(layer.finish, x, attended, use_reentrant=False, preserve_rng_state=False)
    return layer.finish(x, attended)


class LayerUnroll:
    """The decoder layers of one unroll, with the keys and values of all depths so far.

    Args:
        stack: the layers.
        weights: q, k, v projection of each layer, sliced once by the caller, so that all depths
            accumulate into one gradient.
        rotary: positions.
        index: positions and anchors.
        device: of the rows.
        checkpointing: recompute the part after attention in the backward pass. Keys and values are
            stored, since later depths read them.
    """

    def __init__(
        self,
        stack: Sequence[DecoderLayer],
        weights: Sequence[Tensor],
        rotary: Rotary,
        index: AnchorIndex,
        device: torch.device,
        checkpointing: bool = False,
    ) -> None:
        self._checkpointing = checkpointing
        self._stack, self._weights, self._rotary = stack, weights, rotary
        self._index, self._device = index, device
        self._keys: list[list[Tensor]] = [[] for _ in stack]
        self._values: list[list[Tensor]] = [[] for _ in stack]

    def switch_layers(self, stack: Sequence[DecoderLayer], weights: Sequence[Tensor], detach: bool) -> None:
        """Continue with other layers on the keys and values so far; `detach` stops their gradients."""
        self._stack, self._weights = stack, weights
        if detach:
            self._keys = [[k.detach() for k in of_layer] for of_layer in self._keys]
            self._values = [[v.detach() for v in of_layer] for of_layer in self._values]

    def slots(self, depth: int) -> Tensor:
        """(M,) rows of the first step that belong to the anchors of a depth."""
        return self._index.slots(depth).to(self._device)

    def surviving_rows(self, depth: int) -> Tensor | None:
        """(M,) rows of the previous step whose anchors are still supervised; None: all."""
        before, anchors = self._index.anchors[depth - 2 : depth]
        if len(before) == len(anchors):
            return None
        return torch.searchsorted(before, anchors).to(self._device)

    def _visibility(self, depth: int, query_slots: Tensor, like: Tensor) -> Visibility:
        """Keys that queries see; `query_slots` (M,) are the queries' rows in the first step, on the host."""
        anchors, layer = self._index.anchors[depth - 1], self._stack[0]
        later_slots = [torch.searchsorted(self._index.anchors[d - 1], anchors) for d in self._later(depth)]
        text, sinks = self._index.text[query_slots], layer.sinks
        # At depth j, a query is j - 1 positions after its anchor.
        oldest = oldest_keys(query_slots, text, layer.window, sinks, depth - 1)
        blocks = query_blocks(query_slots, text, layer.heads, like, oldest, sinks)
        places = [place.to(self._device) for place in (query_slots, *later_slots)]
        return Visibility(places, blocks, None if oldest is None else oldest.to(self._device), sinks)

    def _later(self, depth: int) -> range:
        """Depths after the first with keys in the window of a query at `depth`."""
        window = self._stack[0].window
        return range(2 if window is None else max(2, depth - window + 1), depth + 1)

    def step(self, depth: int, first: FirstLayerInput, positions: Tensor) -> Tensor:
        """Run one depth through all layers.

        Args:
            depth: from 1.
            first: input rows, n = M anchors; at depth 1 all N positions.
            positions: (n,) rotary positions of the rows.

        Returns:
            (M, D) output rows of the anchors.
        """
        x, y, rest = first
        anchors = self._index.slots(depth)
        angles = self._rotary.table(self._index.longest, x).index_select(0, positions)
        visibility = None
        for i, (layer, weight) in enumerate(zip(self._stack, self._weights, strict=True)):
            if i:
                y, rest = layer.input_layernorm(x), None
            # At depth 1 all positions have keys and values, but only anchors need the last layer's output.
            anchors_only = depth == 1 and i + 1 == len(self._weights) and len(anchors) < len(x)
            if anchors_only:
                query_rows = anchors.to(self._device)
                q, k, v = self._qkv_of_anchors(layer, weight, y, rest, angles, query_rows)
                x = x.index_select(0, query_rows)
            else:
                q, k, v = layer.split(_product(y, weight, rest), angles)
            if visibility is None or anchors_only:
                visibility = self._visibility(
                    depth, anchors if anchors_only or depth > 1 else torch.arange(len(x)), k
                )
            self._keys[i].append(k)
            self._values[i].append(v)
            keys, values = (
                [rows[0], *(rows[d - 1] for d in self._later(depth))]
                for rows in (self._keys[i], self._values[i])
            )
            attended = attend_unrolled(q, keys, values, visibility).flatten(1)
            x = finish_layer(layer, x, attended, self._checkpointing)
        return x

    @staticmethod
    def _qkv_of_anchors(
        layer: DecoderLayer,
        weight: Tensor,
        y: Tensor,
        rest: Tensor | None,
        angles: Tensor,
        query_rows: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of `query_rows`, keys and values of all rows."""
        sizes = [layer.queries, len(weight) - layer.queries]
        to_q, to_kv = weight.split(sizes)
        rest_q, rest_kv = (None, None) if rest is None else rest.split(sizes, -1)
        if rest_q is not None:
            rest_q = rest_q.index_select(0, query_rows)
        _, k, v = layer.split(_product(y, to_kv, rest_kv), angles)
        q = layer.rotate_queries(
            _product(y.index_select(0, query_rows), to_q, rest_q), angles.index_select(0, query_rows)
        )
        return q, k, v


def _product(y: Tensor, weight: Tensor, rest: Tensor | None) -> Tensor:
    return F.linear(y, weight) if rest is None else torch.addmm(rest, y, weight.mT)
