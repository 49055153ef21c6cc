"""Where the blocks of a training batch are: planned on the host, copied to the device at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decode.transfer import upload_together
from drafters.base import sample_anchors, supervised_anchors
from drafters.layers.decoder_layer import LayerShape
from drafters.layers.unroll_attention import Queries, Visibility, oldest_keys


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
        mask = loss_mask.cpu()
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
        self._queries = {
            "roots": self._asking(root_slots, 1, starts, shape),
            "blocks": self._asking(slots, len(within), starts, shape),
        }
        self._sees_all = bool(within.all())
        if not self._sees_all:
            hosts["within"] = within
        for of, queries in self._queries.items():
            hosts |= {(name, of): value for name, value in queries.tensors().items()}
        self._sent = sent = upload_together(hosts, device)
        self.texts, self.positions = sent["texts"], sent["texts"] % length
        self.roots, self.root_slots = sent["roots"], sent["root_slots"]
        self.chosen, self.slots, self.blocks = sent["chosen"], sent["slots"], sent.get("blocks")
        self.places = [sent["places", d] for d in range(len(rows))]
        self.filled, self.counts = sent.get("filled"), sent.get("counts")

    def _asking(self, slots: Tensor, width: int, starts: Tensor, shape: LayerShape) -> Queries:
        """The first `width` places of blocks; `slots` (A,): their newest features."""
        place, text = slots.repeat_interleave(width), starts[slots].repeat_interleave(width)
        # The root stands one place after the newest feature.
        ahead = torch.arange(1, width + 1).repeat(len(slots))
        return Queries(place, text, oldest_keys(place, text, shape.window, shape.sinks, ahead), shape.sinks)

    def slots_of(self, queries: str) -> Tensor:
        """(A,) newest features of the blocks that are named by `roots` or `blocks`."""
        return self.root_slots if queries == "roots" else self.slots

    def visibility(self, queries: str) -> Visibility:
        """Keys that `roots`, without their masks, or all places of the chosen `blocks` see."""
        asking, slots = self._queries[queries], self.slots_of(queries)
        width = len(asking.place) // len(slots)
        own = torch.arange(len(slots), device=slots.device).repeat_interleave(width)
        later = None
        if not self._sees_all:
            later = self._sent["within"][:width, :width].repeat(len(slots), 1)
        copied = {name: self._sent[name, queries] for name in asking.tensors()}
        return Visibility(asking, copied, [own] * width, later)


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
