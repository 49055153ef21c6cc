"""Where the blocks of a training batch are: planned on the host, copied to the device at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.transfer import upload_together
from drafters.base import sample_anchors, supervised_anchors
from drafters.layers.decoder_layer import LayerShape
from drafters.layers.unroll_attention import Visibility, oldest_keys, query_blocks


class _Queries(NamedTuple):
    """Places of blocks that run through layers together, on the host.

    Attributes:
        width: places of a block.
        place: (M,) newest feature of each place's block.
        text: (M,) first feature of each place's text.
        oldest: (M,) see `Visibility`.
    """

    width: int
    place: Tensor
    text: Tensor
    oldest: Tensor | None


class BlockRows:
    """Anchors, features and blocks of a batch; features are those up to a text's last anchor.

    Tensors are on the device unless they say otherwise.

    Args:
        loss_mask: (B, T) bool, on the host.
        depth: K, predictions of a block.
        within: (W, W) bool, on the host: places of a block, the root and its masks, that each sees.
        shape: of the layers.
        device: of the batch.
        sample: average number of blocks per text; 0: one for each anchor.
        seed: of the sample and of the filled places.
        root_everywhere: whether the roots of all anchors are computed, not only those of blocks.
        fill: whether places are filled in, see `filled_places`.

    Attributes:
        share: number of anchors that each block represents.
        texts: (N,) flat indices b * T + t of the features.
        positions: (N,) in their texts.
        roots: (R,) flat indices of the anchors whose roots are computed.
        root_slots: (R,) their features.
        chosen: (A,) flat indices of the anchors of blocks.
        slots: (A,) their features.
        blocks: (A,) indices in `roots`; None: all, in order.
        roots_host: (R,) `roots` on the host.
        anchors: flat indices of the supervised anchors by depth, (M,) each, on the host.
        places: (M,) each, indices in `chosen` of `anchors`.
        filled: (A, K) bool.
        counts: (A,) see `filled_places`.
    """

    def __init__(
        self,
        loss_mask: Tensor,
        depth: int,
        within: Tensor,
        shape: LayerShape,
        device: torch.device,
        *,
        sample: int = 0,
        seed: int = 0,
        root_everywhere: bool = False,
        fill: bool = False,
    ) -> None:
        mask, self._shape = loss_mask.cpu(), shape
        length = mask.shape[1]
        candidates = supervised_anchors(mask, 1).flatten().nonzero()[:, 0]
        chosen = sample_anchors(candidates, len(mask) * sample or len(candidates), seed)
        roots = candidates if root_everywhere else chosen
        self.share, self.roots_host = len(candidates) / max(1, len(chosen)), roots
        supervised = torch.stack(
            [supervised_anchors(mask, d).flatten()[chosen] for d in range(1, depth + 1)], 1
        )  # (A, K)
        rows = [row for row in (column.nonzero()[:, 0] for column in supervised.unbind(1)) if len(row)]
        self.anchors = [chosen[row] for row in rows]
        ends = torch.zeros(len(mask), dtype=torch.long)
        ends.scatter_reduce_(0, roots // length, roots % length + 1, "amax")
        texts = (torch.arange(length) < ends[:, None]).flatten().nonzero()[:, 0]
        starts = (ends.cumsum(0) - ends)[texts // length]  # (N,) first feature of each text
        root_slots, slots = torch.searchsorted(texts, roots), torch.searchsorted(texts, chosen)
        hosts: dict[Any, Tensor] = {"texts": texts, "roots": roots, "chosen": chosen}
        hosts |= {"root_slots": root_slots, "slots": slots}
        hosts |= {("places", d): row for d, row in enumerate(rows)}
        if len(chosen) < len(roots):
            hosts["blocks"] = torch.searchsorted(roots, chosen)
        if fill:
            hosts["filled"], hosts["counts"] = filled_places(supervised, seed)
        self._queries = {"roots": self._places(root_slots, 1, starts)}
        self._queries |= {"blocks": self._places(slots, len(within), starts)}
        self._sees_all = bool(within.all())
        if not self._sees_all:
            hosts["within"] = within
        for name, queries in self._queries.items():
            if queries.oldest is not None:
                hosts["oldest", name] = queries.oldest
        self._sent = sent = upload_together(hosts, device)
        self.texts, self.positions = sent["texts"], sent["texts"] % length
        self.roots, self.root_slots = sent["roots"], sent["root_slots"]
        self.chosen, self.slots, self.blocks = sent["chosen"], sent["slots"], sent.get("blocks")
        self.places = [sent["places", d] for d in range(len(rows))]
        self.filled, self.counts = sent.get("filled"), sent.get("counts")

    def _places(self, slots: Tensor, width: int, starts: Tensor) -> _Queries:
        place, text = slots.repeat_interleave(width), starts[slots].repeat_interleave(width)
        # The root stands one place after the newest feature.
        ahead = torch.arange(1, width + 1).repeat(len(slots))
        oldest = oldest_keys(place, text, self._shape.window, self._shape.sinks, ahead)
        return _Queries(width, place, text, oldest)

    def slots_of(self, queries: str) -> Tensor:
        """(A,) newest features of the blocks that are named by `roots` or `blocks`."""
        return self.root_slots if queries == "roots" else self.slots

    def visibility(self, queries: str, like: Tensor) -> Visibility:
        """Keys that the places of blocks see.

        Args:
            queries: `roots`: the roots alone; `blocks`: all places of the chosen blocks.
            like: a tensor with the dtype and device of the keys.
        """
        (width, place, text, oldest), shape = self._queries[queries], self._shape
        blocks = query_blocks(place, text, shape.heads, like, oldest, shape.sinks)
        slots = self.slots_of(queries)
        own = torch.arange(len(slots), device=like.device).repeat_interleave(width)
        later = None
        if not self._sees_all:
            later = self._sent["within"][:width, :width].repeat(len(slots), 1)
        places = [slots.repeat_interleave(width), *[own] * width]
        return Visibility(places, blocks, self._sent.get(("oldest", queries)), shape.sinks, later)


def filled_places(supervised: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Places of blocks that a training pass fills in, and the loss weight of the others.

    Of a block's n supervised places, m are filled in at random, m uniform from 0 to n - 1; the others have
    weight n / (n - m). The expected loss is the bound of masked diffusion models (MDLM, arXiv:2406.07524),
    with a number of masks instead of a rate.

    Args:
        supervised: (A, K) bool.
        seed: of the draws.

    Returns:
        (A, K) bool, and (A,) weights; a block without supervised places has the weight 0.
    """
    random = torch.Generator().manual_seed(seed)
    size = supervised.sum(1)  # (A,)
    order = torch.rand(supervised.shape, generator=random).masked_fill(~supervised, 2.0).argsort(1).argsort(1)
    count = (torch.rand(len(size), generator=random) * size).long()
    return (order < count[:, None]) & supervised, size / (size - count).clamp_min(1)
