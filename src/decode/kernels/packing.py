"""Products with weights in oneDNN's own layout, and what is measured to choose between kinds of products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

PACKED_FOR = 17  # rows that oneDNN is told to expect: a draft of 16 nodes
MEASURED_BYTES = 2**26  # exceeds caches, so that weights come from memory as in a forward pass
MEASURED_COPIES = 32
COMPUTED_ROWS, COMPUTED_BYTES = 32, 2**20  # with so many rows, arithmetic takes the time
LARGEST = 1024  # longest side of a measured weight

Product = Callable[[], Tensor]


def pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy of a (N, K) weight in oneDNN's layout.

    Raises:
        AttributeError, NotImplementedError, RuntimeError: torch or the processor lacks such products.
    """
    weight = weight.detach()
    wide = weight.to(dtype)
    try:
        # private API: what torch.compile emits for linear layers; no public function keeps a packed weight.
        return torch.ops.mkldnn._reorder_linear_weight(wide, PACKED_FOR)
    except (AttributeError, NotImplementedError, RuntimeError):  # e.g. on a Mac, where torch has no oneDNN
        if wide is weight:
            raise
        return wide


def product(x: Tensor, packed: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """(..., K) -> (..., N) product and sum in the copy's dtype, rounded once."""
    x, bias, residual, dtype = (*(_cast(part, packed.dtype) for part in (x, bias, residual)), x.dtype)
    if not packed.is_mkldnn:
        found = F.linear(x, packed, bias)
        return (found if residual is None else found + residual).to(dtype)
    if residual is None:
        # private API: as in `pack`.
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "").to(dtype)
    # private API: as in `pack`.
    return torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add").to(dtype)


def _cast(part: Any, dtype: torch.dtype) -> Any:
    return None if part is None else part.to(dtype)


def measured_weights(dtype: torch.dtype, shape: tuple[int, int], rows: int) -> list[Tensor]:
    """Weights of a shape for products of `rows` rows; with few rows they exceed the processor's caches."""
    room = COMPUTED_BYTES if rows >= COMPUTED_ROWS else MEASURED_BYTES
    count = max(1, min(MEASURED_COPIES, room // (shape[0] * shape[1] * dtype.itemsize)))
    return [torch.zeros(shape, dtype=dtype) for _ in range(count)]


def plain_products(weights: list[Tensor], rows: int) -> list[Product]:
    """One product with each weight."""
    x = torch.zeros(rows, weights[0].shape[1], dtype=weights[0].dtype)
    return [partial(F.linear, x, weight) for weight in weights]


def packed_products(weights: list[Tensor], rows: int, dtype: torch.dtype) -> list[Product]:
    """Likewise, with copies in a dtype.

    Raises:
        AttributeError, NotImplementedError, RuntimeError: see `pack`.
    """
    x = torch.zeros(rows, weights[0].shape[1], dtype=weights[0].dtype)
    return [partial(product, x, pack(weight, dtype)) for weight in weights]
