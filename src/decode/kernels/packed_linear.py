"""Products on a CPU with copies of frozen weights in oneDNN's own layout.

oneDNN rearranges a plain weight in every call, which costs more than a product of a few rows, and the
library that torch multiplies fp32 with is slow on some processors. So `linear` keeps a rearranged copy of
frozen weights if that is measured to be faster. Where many rows are multiplied faster in fp32 than in half
precision (`half_products`), there is a second copy in fp32 for these.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from decode.hardware import memory_bytes
from decode.kernels import int8_linear
from decode.kernels.half_products import GAIN, HALF, fp32_rows
from decode.kernels.measured import remembered, time_ratio
from decode.kernels.packing import (
    LARGEST,
    PACKED_FOR,
    measured_weights,
    pack,
    packed_products,
    plain_products,
    product,
)
from decode.kernels.weight_state import is_frozen, may_copy, notice_changes, weight_state

DTYPES = (*HALF, torch.float32)  # of weights that may have copies
ROWS = 128  # with more rows, rearranging a weight in half precision is a small part of the product
MEASURED_ROWS = (1, PACKED_FOR)  # plain decoding, and a draft of 16 nodes
FP32_ROWS = (1, 4, 16)  # candidates for the number of rows from which on a copy of an fp32 weight is used
INT8_ROWS = (1, 4)  # chain pass, and a level of the default tree
ATTEMPTS = 3  # other programs can hide a gain by using memory bandwidth, but cannot cause one
MEMORY_SHARE = 0.25  # maximum share of the machine's memory for all copies


class _Copies:
    """Packed copies of a weight, each made for the first product that it is faster for.

    Attributes:
        weight: reference to the weight.
        state: of the weight when it was copied.
        packed: by dtype; None: memory is short.
        size: bytes of the copies, which do not know it: the plain size, up to padding.
    """

    __slots__ = ("packed", "size", "state", "weight")

    def __init__(self, weight: Tensor) -> None:
        key = id(weight)
        self.weight = weakref.ref(weight, lambda _: _COPIES.pop(key, None))
        self.state, self.size = weight_state(weight), 0
        self.packed: dict[torch.dtype, Tensor | None] = {}

    def of(self, weight: Tensor, rows: int) -> Tensor | None:
        """The copy for products of so many rows; None: use the plain weight."""
        dtype, shape = weight.dtype, weight.shape
        if 0 < fp32_rows(dtype, *shape) <= rows and (wide := self._copy(weight, torch.float32)) is not None:
            return wide
        least, most = copy_range(dtype, *shape) if rows <= ROWS or dtype == torch.float32 else (0, 0)
        return self._copy(weight, dtype) if 0 < least <= rows <= most else None

    def _copy(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        if dtype not in self.packed:
            size = weight.numel() * dtype.itemsize
            room = MEMORY_SHARE * memory_bytes(weight.device) - sum(one.size for one in _COPIES.values())
            with torch.inference_mode(False), torch.no_grad():  # compiled rounds use copies in any mode
                self.packed[dtype] = pack(weight, dtype) if size <= room else None
            self.size += size if size <= room else 0
        return self.packed[dtype]


_COPIES: dict[int, _Copies] = {}  # by id of the weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., K) -> (..., N) with a weight (N, K) and a bias (N,): `F.linear`, but faster if possible.

    Uses copies only in inference mode and with frozen parameters, because packed products have no gradient
    and changed weights would have to be packed again.
    """
    if not may_copy(weight):
        return F.linear(x, weight, bias)
    if (int8 := _rounded(x, weight)) is not None:
        product = int8_linear.product(x, int8)
        return product if bias is None else product + bias
    return _linear(x, weight, bias)


def linear_add(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., N) residual + `linear(x, weight, bias)`."""
    copies = may_copy(weight)
    if copies and _rounded(x, weight) is not None:
        return residual + linear(x, weight, bias)
    packed = _packed(x, weight) if copies else None
    if packed is not None:
        return product(x, packed, bias, residual)
    if bias is not None:
        return residual + F.linear(x, weight, bias)
    return torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), weight.mT).view_as(residual)


class Linear(nn.Linear):
    """A linear layer of a drafter; decodes with `linear`."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """Residual + output, in one call."""
        return linear_add(residual, x, self.weight, self.bias)


class _Linears(TorchFunctionMode):
    """Makes `F.linear` use copies of frozen weights."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (_linear if func is F.linear else func)(*args, **(kwargs or {}))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    packed = None if torch.is_grad_enabled() or not is_frozen(weight) else _packed(x, weight)
    return F.linear(x, weight, bias) if packed is None else product(x, packed, bias)


def fast_linears(weight: Tensor, begins: bool = False) -> AbstractContextManager:
    """Context in which other code multiplies with copies if a CPU is slow with many rows of plain weights.

    Args:
        weight: of the model's head.
        begins: new texts start, so copied weights are compared with their sources.
    """
    if weight.device.type != "cpu" or not _many_are_slow(weight.dtype, *weight.shape):
        return nullcontext()
    if begins:
        notice_changes()
    return _Linears()


def _many_are_slow(dtype: torch.dtype, rows: int, columns: int) -> bool:
    """Whether products of more than `ROWS` rows are slow with a plain weight."""
    return fp32_rows(dtype, rows, columns) > 0 or copy_range(dtype, rows, columns)[1] > ROWS


def described(weight: Tensor) -> str:
    """How products with a weight are computed, for a line of a run; known after the first pass."""
    copies = _COPIES.get(id(weight))
    own = copies is not None and copies.packed.get(weight.dtype) is not None
    rows = fp32_rows(weight.dtype, *weight.shape) if weight.device.type == "cpu" else 0
    parts = ["weights packed for decoding"] * own + [f"products of {rows} or more rows in fp32"] * (rows > 0)
    return ", ".join(parts)


def _rounded(x: Tensor, weight: Tensor) -> int8_linear.Rounded | None:
    """int8 numbers for this product; None: use other weights."""
    found = int8_linear.rounded(weight)
    if found is None or x.dtype != weight.dtype or weight.device.type != "cpu":
        return None
    fits = 0 < x.numel() <= INT8_ROWS[-1] * x.shape[-1]
    return found if fits and x.numel() <= int8_rows(weight.dtype, *weight.shape) * x.shape[-1] else None


def _packed(x: Tensor, weight: Tensor) -> Tensor | None:
    """Packed copy for this product; None: use the plain weight."""
    if weight.device.type != "cpu" or x.dtype != weight.dtype or weight.dtype not in DTYPES:
        return None
    if weight.ndim != 2:  # a vector, which other code may multiply with
        return None
    rows = x.numel() // max(x.shape[-1], 1)
    if not rows:
        return None
    copies = _COPIES.get(id(weight))
    if copies is None or copies.state != weight_state(weight) or copies.weight() is not weight:
        copies = _COPIES[id(weight)] = _Copies(weight)
    return copies.of(weight, rows)


@lru_cache
def copy_range(dtype: torch.dtype, rows: int, columns: int) -> tuple[int, float]:
    """Fewest and most rows of products that are faster with a packed copy in the weight's dtype.

    (0, 0): none are, or torch cannot pack. Measured or cached.
    """
    if dtype in HALF:
        return (1, ROWS) if packing_gain(dtype, rows, columns) >= GAIN else (0, 0)
    if dtype != torch.float32:
        return 0, 0
    rows, columns = min(rows, LARGEST), min(columns, LARGEST)
    least = int(remembered("packing_rows", _measure_least, dtype, rows, columns))
    if least and remembered("packing_many", _measure_many, dtype, rows, columns) >= GAIN:
        return least, math.inf
    return (least, ROWS) if least else (0, 0)


@lru_cache
def packing_gain(dtype: torch.dtype, rows: int, columns: int) -> float:
    """Time of products with a plain weight over time with a packed one; 0 if torch cannot pack.

    Minimum over `MEASURED_ROWS`, measured or cached.
    """
    return remembered("packing", _measure, dtype, rows, columns)


@lru_cache
def int8_rows(dtype: torch.dtype, rows: int, columns: int) -> int:
    """Number of rows up to which products with int8 numbers are the fastest; measured or cached."""
    return int(remembered("int8", _measure_int8, dtype, rows, columns))


@torch.inference_mode()
def _measure(dtype: torch.dtype, rows: int, columns: int) -> float:
    most = 0.0
    for _ in range(ATTEMPTS):
        most = max(most, min(_gain(dtype, (rows, columns), size) for size in MEASURED_ROWS))
        if most >= GAIN:
            break
    return most


@torch.inference_mode()
def _measure_least(dtype: torch.dtype, rows: int, columns: int) -> int:
    return next((size for size in FP32_ROWS if _gain(dtype, (rows, columns), size) >= GAIN), 0)


@torch.inference_mode()
def _measure_many(dtype: torch.dtype, rows: int, columns: int) -> float:
    return _gain(dtype, (rows, columns), 2 * ROWS)


def _gain(dtype: torch.dtype, shape: tuple[int, int], rows: int) -> float:
    """Time of a plain product over that of a packed one."""
    weights = measured_weights(dtype, shape, rows)
    return time_ratio(plain_products(weights, rows), packed_products(weights, rows, dtype))


@torch.inference_mode()
def _measure_int8(dtype: torch.dtype, rows: int, columns: int) -> float:
    weights, most = measured_weights(dtype, (rows, columns), 1), 0
    numbers = [(w.to(torch.int8), w.new_ones(rows)) for w in weights]
    for size in INT8_ROWS:
        x = torch.zeros(size, columns, dtype=dtype)
        kind = _fastest(dtype, rows, columns, size)
        best = packed_products(weights, size, kind) if kind else plain_products(weights, size)
        if time_ratio(best, [partial(int8_linear.multiply, x, *pair) for pair in numbers]) < GAIN:
            break
        most = size
    return most


def _fastest(dtype: torch.dtype, rows: int, columns: int, size: int) -> torch.dtype | None:
    """Dtype of the copy that products of `size` rows use; None: the plain weight."""
    if 0 < fp32_rows(dtype, rows, columns) <= size:
        return torch.float32
    least, most = copy_range(dtype, rows, columns)
    return dtype if 0 < least <= size <= most else None
