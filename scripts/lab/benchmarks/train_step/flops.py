"""FLOP of the matrix products of an EAGLE-3 training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from drafters.layers.unroll import AnchorIndex


def products(shape: Mapping[str, int], loss_mask: Sequence[int], train_head: bool) -> float:
    """Least FLOP of the matrix products of a step on one text.

    Backward counts as two forward passes, or one if the input (tapped features, embeddings) or the weight
    (a frozen head) needs no gradient; the head of the teacher only runs forward. A token's part of the
    first product is the same at every depth and counts once. Attention counts visible keys only.

    Args:
        shape: as in conf/lab/train.yaml.
        loss_mask: of the text.
        train_head: whether the drafter's head trains.
    """
    route = AnchorIndex(torch.tensor([loss_mask], dtype=torch.bool), shape["depth"])
    wide, everybody = shape["hidden_size"], len(route.places)
    queries, keys = shape["heads"] * shape["head_dim"], 2 * shape["kv_heads"] * shape["head_dim"]
    total = 2 * everybody * wide * (shape["taps"] * wide + queries + keys)
    for depth, anchors in enumerate(route.anchors, 1):
        slots = route.slots(depth)
        for layer in range(1, shape["layers"] + 1):
            # At depth 1 the last layer is asked by anchors alone.
            asking = slots if depth > 1 or layer == shape["layers"] else torch.arange(everybody)
            making = everybody if depth == 1 else len(slots)
            seen = int((asking + depth).sum())  # keys of the first step up to its own, and one a step
            total += 3 * making * wide * keys + 6 * seen * queries
            total += 3 * len(asking) * wide * (2 * queries + 3 * shape["intermediate_size"])
        total += (3 if train_head else 2) * len(anchors) * wide * shape["draft_vocab_size"]
    answered = torch.cat([anchors + depth for depth, anchors in enumerate(route.anchors, 1)]).unique()
    return 2.0 * (total + len(answered) * wide * shape["vocab_size"])
