"""Packed forward passes: rows of different lengths concatenated without padding.

Positions restart in each row, and no token attends to another row. Without a mask and a cache,
transformers derives such masks from the positions, for every attention kernel. For `sdpa` this is an
(N, N) mask over the whole pack, which is slower than padding, so sdpa is called once per row instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

KERNEL = "foredraft_rows"
_lengths: ContextVar[Sequence[int]] = ContextVar("lengths")  # of the rows of the current pack


def pack_indices(lengths: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Indices of the tokens of (B, T) right-padded rows, and their positions.

    Args:
        lengths: of the rows, at least 1 each.
        width: T.

    Returns:
        (N,) indices into the flattened rows and (N,) positions.
    """
    positions = torch.cat([torch.arange(n) for n in lengths])
    starts = torch.arange(len(lengths)).mul(width).repeat_interleave(torch.tensor(lengths))
    return starts + positions, positions


@contextmanager
def attention_per_row(config: Any, lengths: Sequence[int]) -> Iterator[None]:
    """Make a model with the `sdpa` kernel run attention separately for each row of a pack.

    Args:
        config: text configuration of the model.
        lengths: of the rows in the pack.
    """
    # private API: transformers has no public way to ask for the attention kernel.
    kernel = config._attn_implementation
    if kernel != "sdpa":
        yield
        return
    token = _lengths.set(lengths)
    # private API: the public `set_attn_implementation` takes no kernel without a mask function.
    config._attn_implementation = KERNEL  # transformers builds no mask for an unknown kernel
    try:
        yield
    finally:
        config._attn_implementation = kernel  # private API: as above
        _lengths.reset(token)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Run transformers' sdpa for each row: (1, H, N, d) -> (1, N, H, d)."""
    assert attention_mask is None, "rows of a pack are separated without a mask"
    rows = zip(*(part.split(list(_lengths.get()), 2) for part in (query, key, value)), strict=True)
    outputs = [
        sdpa_attention_forward(module, q, k, v, _band(q, sliding_window), **options)[0] for q, k, v in rows
    ]
    return torch.cat(outputs, 1), None


def _band(query: Tensor, window: int | None) -> Tensor | None:
    """(1, 1, n, n) bool mask of a window shorter than the row; None: causal attention suffices."""
    length = query.shape[2]
    if window is None or length <= window:
        return None
    causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    return causal.triu(1 - window)[None, None]


AttentionInterface.register(KERNEL, _attend)
