"""Unroll of decoder layers over their own output, computed for supervised anchors only.

This is the training-time test of EAGLE-3 (arXiv:2503.01840). The step of depth j reads the output of depth
j - 1. An anchor sees the keys and values of depth 1 up to itself, and its own of every later depth. Rows are
flat: at depth 1 all N positions up to the last anchor of their text, (N, D); later the M anchors that are
still supervised, (M, D). `unroll_attention` computes the attention, `AnchorIndex` the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from decode.transfer import upload_together
from drafters.base import sample_anchors, supervised_anchors
from drafters.layers.decoder_layer import DecoderLayer, Rotary
from drafters.layers.unroll_attention import Attend, Queries, Visibility, attend_unrolled, oldest_keys


class FirstLayerInput(NamedTuple):
    """Input of the first layer: qkv = weight x + rest, or weight x + bias.

    Attributes:
        residual: (n, D) residual stream, which the layer adds its output to.
        x: (n, D) input of the q, k, v projection.
        rest: (n, P) precomputed summand of the projection, which includes its bias; None: only the bias.
    """

    residual: Tensor
    x: Tensor
    rest: Tensor | None


class AnchorIndex:
    """Positions that take part in an unroll, computed on the host from the loss mask.

    Args:
        loss_mask: (B, T) bool, on the host.
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

    Indices of all depths go to the device in one copy.

    Args:
        stack: the layers.
        weights: q, k, v projection of each layer, sliced once by the caller, so that all depths
            accumulate into one gradient.
        rotary: positions.
        index: positions and anchors.
        device: of the rows.
        checkpointing: recompute the part after attention in the backward pass. Keys and values are
            stored, since later depths read them.
        attend: computes the attention.

    Attributes:
        places: (N,) `AnchorIndex.places` on the device.
    """

    def __init__(
        self,
        stack: Sequence[DecoderLayer],
        weights: Sequence[Tensor],
        rotary: Rotary,
        index: AnchorIndex,
        device: torch.device,
        checkpointing: bool = False,
        attend: Attend = attend_unrolled,
    ) -> None:
        self._checkpointing, self._attend = checkpointing, attend
        self._stack, self._weights, self._rotary = stack, weights, rotary
        self._index = index
        self._keys: list[list[Tensor]] = [[] for _ in stack]
        self._values: list[list[Tensor]] = [[] for _ in stack]
        self._queries: dict[int, Queries] = {}  # by depth; 0: all positions in the first step
        self._sent = upload_together(self._indices(), device)
        self.places = self._sent["places"]

    def _indices(self) -> dict[Any, Tensor]:
        """All that layers index with, on the host."""
        index, (window, sinks) = self._index, (self._stack[0].window, self._stack[0].sinks)
        hosts: dict[Any, Tensor] = {"places": index.places}
        asking: dict[int, tuple[Tensor, int]] = {}  # depth -> last visible keys, distance from them
        for depth, anchors in enumerate(index.anchors, 1):
            hosts["anchors", depth], hosts["slots", depth] = anchors, index.slots(depth)
            if depth > 1 and len(before := index.anchors[depth - 2]) > len(anchors):
                hosts["surviving", depth] = torch.searchsorted(before, anchors)
            for d in self._later(depth):
                hosts["later", depth, d] = torch.searchsorted(index.anchors[d - 1], anchors)
            # At depth j, a query is j - 1 positions after its anchor.
            asking[depth] = hosts["slots", depth], depth - 1
        if len(self._stack) > 1:  # all positions ask in the first step, but in the last layer
            asking[0] = torch.arange(len(index.places)), 0
        for depth, (slots, ahead) in asking.items():
            text = index.text[slots]
            queries = Queries(slots, text, oldest_keys(slots, text, window, sinks, ahead), sinks)
            self._queries[depth] = queries
            hosts |= {(name, depth): value for name, value in queries.tensors().items()}
        return hosts

    def switch_layers(self, stack: Sequence[DecoderLayer], weights: Sequence[Tensor], detach: bool) -> None:
        """Continue with other layers on the keys and values so far; `detach` stops their gradients."""
        self._stack, self._weights = stack, weights
        if detach:
            self._keys = [[k.detach() for k in of_layer] for of_layer in self._keys]
            self._values = [[v.detach() for v in of_layer] for of_layer in self._values]

    def anchors(self, depth: int) -> Tensor:
        """(M,) flat indices of the anchors of a depth."""
        return self._sent["anchors", depth]

    def slots(self, depth: int) -> Tensor:
        """(M,) rows of the first step that belong to the anchors of a depth."""
        return self._sent["slots", depth]

    def surviving_rows(self, depth: int) -> Tensor | None:
        """(M,) rows of the previous step whose anchors are still supervised; None: all."""
        return self._sent.get(("surviving", depth))

    def _visibility(self, depth: int) -> Visibility:
        """Keys that the queries of a depth see; depth 0: all positions in the first step."""
        queries = self._queries[depth]
        copied = {name: self._sent[name, depth] for name in queries.tensors()}
        return Visibility(queries, copied, [self._sent["later", depth, d] for d in self._later(depth)])

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
        anchors = self.slots(depth)
        angles = self._rotary.table(self._index.longest, x).index_select(0, positions)
        visibility = None
        for i, (layer, weight) in enumerate(zip(self._stack, self._weights, strict=True)):
            if i:
                y, rest = layer.input_layernorm(x), None
            # At depth 1 all positions have keys and values, but only anchors need the last layer's output.
            anchors_only = depth == 1 and i + 1 == len(self._weights) and len(anchors) < len(x)
            if anchors_only:
                q, k, v = self._qkv_of_anchors(layer, weight, y, rest, angles, anchors)
                x = x.index_select(0, anchors)
            else:
                q, k, v = layer.split(_product(y, weight, rest, layer.qkv_proj.bias), angles)
            if visibility is None or anchors_only:
                everywhere = depth == 1 and not anchors_only and len(anchors) < len(x)
                visibility = self._visibility(0 if everywhere else depth)
            self._keys[i].append(k)
            self._values[i].append(v)
            keys, values = (
                [rows[0], *(rows[d - 1] for d in self._later(depth))]
                for rows in (self._keys[i], self._values[i])
            )
            attended = self._attend(q, keys, values, visibility).flatten(1)
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
        bias = layer.qkv_proj.bias
        bias_q, bias_kv = (None, None) if bias is None else bias.split(sizes)
        _, k, v = layer.split(_product(y, to_kv, rest_kv, bias_kv), angles)
        q = layer.rotate_queries(
            _product(y.index_select(0, query_rows), to_q, rest_q, bias_q), angles.index_select(0, query_rows)
        )
        return q, k, v


def _product(y: Tensor, weight: Tensor, rest: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.linear(y, weight, bias) if rest is None else torch.addmm(rest, y, weight.mT)
