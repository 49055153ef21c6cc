"""Attention of grouped queries, by a kernel that does not write all scores to memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def repeats_keys(device: torch.device, groups: int, masked: bool) -> bool:
    """Whether keys and values are repeated for every query of a group, and not shared in the kernel.

    CUDA's kernels that take a mask know no groups; with `enable_gqa` torch falls back to plain products.
    """
    return device.type == "cuda" and groups > 1 and masked


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
        mask: bool or additive, broadcast to (B, heads, n, width).
        causal: each query sees the keys up to its own place.
        scale: of the scores; None: 1 / sqrt(dim).
    """
    groups = q.shape[1] // k.shape[1]
    if repeats_keys(q.device, groups, mask is not None):
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
    )
