"""Supervised anchors by depth, for drafters whose depths need no other indices."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decode.transfer import upload_together
from drafters.base import supervised_anchors


class AnchorRows(NamedTuple):
    """M of A anchors: those that are supervised at one depth.

    Attributes:
        anchor: (M,) flat indices b * T + t, on the host.
        place: (M,) the same on the device.
        row: (M,) their indices in all A, on the device.
    """

    anchor: Tensor
    place: Tensor
    row: Tensor


def rows_by_depth(
    loss_mask: Tensor, depth: int, device: torch.device, chosen: Tensor | None = None
) -> list[AnchorRows]:
    """The anchors of depth 1, 2, ... up to the last one with any.

    Args:
        loss_mask: (B, T) bool, on the host.
        depth: maximum depth.
        device: where indices are used; they are copied there at once.
        chosen: (A,) anchors to choose from, on the host; default: all that are supervised at depth 1.
    """
    mask = loss_mask.cpu()
    if chosen is None:
        chosen = supervised_anchors(mask, 1).flatten().nonzero()[:, 0]
    rows = [supervised_anchors(mask, d).flatten()[chosen].nonzero()[:, 0] for d in range(1, depth + 1)]
    rows = [row for row in rows if len(row)]
    sent = upload_together({"chosen": chosen} | dict(enumerate(rows)), device)
    return [AnchorRows(chosen[row], sent["chosen"][sent[d]], sent[d]) for d, row in enumerate(rows)]
