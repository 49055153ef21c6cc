"""Grouped-query attention with a kernel that does not write all scores to memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Queries per key head; with more, the kernel's products are large enough without folding.
FOLDED_ROWS = {"cpu": 64, "cuda": 256}


def fast_dtype(like: Tensor) -> torch.dtype:
    """Fastest dtype for attention of a few queries, for a model with the dtype of `like`.

    On a CPU torch's kernel takes several times as long in half precision (docs/speed.md).
    """
    half = like.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if half and like.device.type == "cpu" else like.dtype


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """(B, heads, n, dim) attention of queries to (B, kv_heads, width, dim) keys and values.

    Args:
        q: queries.
        k: keys.
        v: values.
        mask: (B, 1, n, width) or (1, 1, n, width), bool or additive.
        causal: each query sees the keys up to its own position.
        scale: of the scores; None: 1 / sqrt(dim).
    """
    groups, kind = q.shape[1] // k.shape[1], q.device.type
    # CUDA's kernels with a mask do not share keys within a group: they would be copied for every query head.
    unshared = kind == "cuda" and mask is not None
    few = groups * q.shape[2] <= FOLDED_ROWS.get(kind, 0) and not causal
    if groups > 1 and few and (kind == "cpu" or unshared):
        return attend_folded(q, k, v, mask, scale)
    if groups > 1 and unshared:
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
    )


def attend_folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Attention with all queries of a key head as one block of rows.

    A kernel that does not share keys reads them once per query head. Folded, it reads them once per group.
    """
    groups = q.shape[1] // k.shape[1]
    rows = q.unflatten(1, (-1, groups)).contiguous().flatten(2, 3)  # (B, kv_heads, groups * n, dim)
    if mask is not None:
        mask = mask.repeat(1, 1, groups, 1)  # (B, 1, groups * n, width)
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
    return out.unflatten(2, (groups, -1)).flatten(1, 2)
