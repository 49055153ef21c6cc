"""Rows of different lengths read behind one another, without padding.

Positions begin anew with every row, and no token sees another row's. transformers builds such masks
from the positions alone where there is neither a mask nor a cache, for every attention kernel. For
`sdpa` that is a mask of (N, N) over the whole pack, which costs more than padding does; so the kernel
is called once for every row instead, each as large as its row and causal by itself.
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
_lengths: ContextVar[Sequence[int]] = ContextVar("lengths")  # of the rows of the pack that is being read


def places(lengths: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Where the tokens of a pack are in (B, T) right-padded rows, and their positions.

    Args:
        lengths: of the rows, each at least 1.
        width: T.

    Returns:
        (N,) indices into the flattened rows and (N,) positions.
    """
    positions = torch.cat([torch.arange(n) for n in lengths])
    starts = torch.arange(len(lengths)).mul(width).repeat_interleave(torch.tensor(lengths))
    return starts + positions, positions


@contextmanager
def row_by_row(config: Any, lengths: Sequence[int]) -> Iterator[None]:
    """Within, a model that attends by `sdpa` does so row by row of a pack.

    Args:
        config: the model's, of its text part.
        lengths: of the pack's rows.
    """
    # private API: transformers has no public way to ask for the attention kernel.
    kernel = config._attn_implementation
    if kernel != "sdpa":
        yield
        return
    token = _lengths.set(lengths)
    # private API: the public `set_attn_implementation` takes no kernel without a mask function.
    config._attn_implementation = KERNEL  # transformers makes no mask for a kernel it does not know
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
    """Transformers' sdpa for each row: (1, H, N, d) -> (1, N, H, d)."""
    assert attention_mask is None, "a mask over the pack, where rows are told apart without one"
    rows = zip(*(part.split(list(_lengths.get()), 2) for part in (query, key, value)), strict=True)
    read = [
        sdpa_attention_forward(module, q, k, v, _band(q, sliding_window), **options)[0] for q, k, v in rows
    ]
    return torch.cat(read, 1), None


def _band(query: Tensor, window: int | None) -> Tensor | None:
    """(1, 1, n, n) bool of a window that is shorter than the row; None: causality will do."""
    length = query.shape[2]
    if window is None or length <= window:
        return None
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    return seen.triu(1 - window)[None, None]


AttentionInterface.register(KERNEL, _attend)
