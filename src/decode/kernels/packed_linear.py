"""Products on a CPU with copies of frozen weights in oneDNN's own layout.

oneDNN rearranges a plain weight in every call, which costs more than a product of a few rows. So `linear`
keeps a rearranged copy of frozen weights in half precision if that is measured to be faster. On processors
that are slow in half precision the copy is in fp32; it serves all numbers of rows except the smallest,
for which reading half the bytes is faster.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from decode.hardware import memory_bytes
from decode.kernels import int8_linear
from decode.kernels.half_products import HALF, product_dtype
from decode.kernels.measured import remembered, time_ratio
from decode.kernels.weight_state import WeightState, is_frozen, may_copy, notice_changes, weight_state

ROWS = 128  # with more rows, rearranging is a small part of the product
MEASURED_ROWS = (1, 17)  # plain decoding, and a draft of 16 nodes
WIDE_ROWS = (2, 3, 4, 8, 16, 32)  # candidates for the number of rows from which on an fp32 copy is used
INT8_ROWS = (1, 4)  # chain pass, and a level of the default tree
MEASURED_BYTES = 2**26  # exceeds caches, so that weights come from memory as in a forward pass
MEASURED_COPIES = 32
ATTEMPTS = 3  # other programs can hide a gain by using memory bandwidth, but cannot cause one
GAIN = 1.1  # a smaller gain is not worth the memory
MEMORY_SHARE = 0.25  # maximum share of the machine's memory for all copies


class _Copy(NamedTuple):
    """Packed copy of a weight, and the state of its source."""

    weight: weakref.ref[Tensor]
    state: WeightState
    packed: Tensor | None  # None: the plain weight is faster, or memory is short
    least: int  # minimum rows of a product that uses it
    size: int  # bytes of `packed`, which does not know it: the plain size, up to padding


_COPIES: dict[int, _Copy] = {}  # by id of the weight


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
        return _product(x, packed, bias, residual)
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
    return F.linear(x, weight, bias) if packed is None else _product(x, packed, bias)


def fast_linears(weight: Tensor, begins: bool = False) -> AbstractContextManager:
    """Context in which other code multiplies with fp32 copies if a CPU is slow in the weight's dtype.

    Args:
        weight: of the model's head.
        begins: new texts start, so copied weights are compared with their sources.
    """
    slow = weight.device.type == "cpu" and _widens(weight.dtype)
    if slow and begins:
        notice_changes()
    return _Linears() if slow else nullcontext()


def is_packed(weight: Tensor) -> bool:
    """Whether `linear` has a packed copy of this weight."""
    copy = _COPIES.get(id(weight))
    return copy is not None and copy.weight() is weight and copy.packed is not None


def _rounded(x: Tensor, weight: Tensor) -> int8_linear.Rounded | None:
    """int8 numbers for this product; None: use other weights."""
    found = int8_linear.rounded(weight)
    if found is None or x.dtype != weight.dtype or weight.device.type != "cpu":
        return None
    fits = 0 < x.numel() <= INT8_ROWS[-1] * x.shape[-1]
    return found if fits and x.numel() <= int8_rows(weight.dtype, *weight.shape) * x.shape[-1] else None


def _packed(x: Tensor, weight: Tensor) -> Tensor | None:
    """Packed copy for this product; None: use the plain weight."""
    if weight.device.type != "cpu" or weight.dtype not in HALF or x.dtype != weight.dtype:
        return None
    rows = x.numel() // max(x.shape[-1], 1)
    if not rows or (rows > ROWS and not _widens(weight.dtype)):
        return None
    copy = _COPIES.get(id(weight))
    if copy is None or copy.state != weight_state(weight) or copy.weight() is not weight:
        copy = _COPIES[id(weight)] = _make_copy(weight)
    return copy.packed if rows >= copy.least else None


def _widens(dtype: torch.dtype) -> bool:
    """Whether copies of this dtype are in fp32."""
    return product_dtype(dtype, torch.device("cpu")) != dtype


def _make_copy(weight: Tensor) -> _Copy:
    key = id(weight)
    size = weight.numel() * product_dtype(weight.dtype, weight.device).itemsize
    room = MEMORY_SHARE * memory_bytes(weight.device) - sum(copy.size for copy in _COPIES.values())
    least = copy_rows(weight.dtype, *weight.shape) if size <= room else 0
    with torch.inference_mode(False), torch.no_grad():  # compiled rounds use copies in any mode
        packed, size = (_pack(weight), size) if least else (None, 0)
    reference = weakref.ref(weight, lambda _: _COPIES.pop(key, None))
    return _Copy(reference, weight_state(weight), packed, least, size)


def _pack(weight: Tensor) -> Tensor:
    weight = weight.detach()
    wide = weight.to(product_dtype(weight.dtype, weight.device))
    try:
        # private API: what torch.compile emits for linear layers; no public function keeps a packed weight.
        return torch.ops.mkldnn._reorder_linear_weight(wide, MEASURED_ROWS[-1])
    except (AttributeError, NotImplementedError, RuntimeError):  # e.g. on a Mac, where torch has no oneDNN
        if wide is weight:
            raise
        return wide


def _product(x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """Product and sum in the copy's dtype, rounded once."""
    x, bias, residual, dtype = (*(_cast(part, packed.dtype) for part in (x, bias, residual)), x.dtype)
    if not packed.is_mkldnn:
        product = F.linear(x, packed, bias)
        return (product if residual is None else product + residual).to(dtype)
    if residual is None:
        # private API: as in `_pack`.
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "").to(dtype)
    # private API: as in `_pack`.
    return torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add").to(dtype)


def _cast(part: Any, dtype: torch.dtype) -> Any:
    return None if part is None else part.to(dtype)


def copy_rows(dtype: torch.dtype, rows: int, columns: int) -> int:
    """Number of rows from which on products with a copy of a weight are faster; 0: never."""
    if _widens(dtype):
        return _wide_rows(dtype, rows, columns)
    return int(packing_gain(dtype, rows, columns) >= GAIN)


@lru_cache
def packing_gain(dtype: torch.dtype, rows: int, columns: int) -> float:
    """Time of products with a plain weight over time with a packed one; 0 if torch cannot pack.

    Minimum over `MEASURED_ROWS`, measured or cached.
    """
    return remembered("packing", _measure, dtype, rows, columns)


@lru_cache
def _wide_rows(dtype: torch.dtype, rows: int, columns: int) -> int:
    """`copy_rows` of copies in fp32; measured or cached."""
    return int(remembered("widening", _measure_wide, dtype, rows, columns))


@lru_cache
def int8_rows(dtype: torch.dtype, rows: int, columns: int) -> int:
    """Number of rows up to which products with int8 numbers are the fastest; measured or cached."""
    return int(remembered("int8", _measure_int8, dtype, rows, columns))


@torch.inference_mode()
def _measure(dtype: torch.dtype, rows: int, columns: int) -> float:
    plain = _zeros(dtype, rows, columns)
    packed = [_pack(weight) for weight in plain]
    inputs = [torch.zeros(size, columns, dtype=dtype) for size in MEASURED_ROWS]
    most = 0.0
    for _ in range(ATTEMPTS):
        ratios = []
        for x in inputs:
            products = [partial(F.linear, x, w) for w in plain]
            ratios.append(time_ratio(products, [partial(_product, x, w, None) for w in packed]))
        most = max(most, min(ratios))
        if most >= GAIN:
            break
    return most


@torch.inference_mode()
def _measure_wide(dtype: torch.dtype, rows: int, columns: int) -> float:
    plain = _zeros(dtype, rows, columns)
    packed = [_pack(weight) for weight in plain]
    for size in WIDE_ROWS:
        x = torch.zeros(size, columns, dtype=dtype)
        one = [partial(F.linear, x, w) for w in plain]
        if time_ratio(one, [partial(_product, x, w, None) for w in packed]) >= GAIN:
            return size
    return 0


@torch.inference_mode()
def _measure_int8(dtype: torch.dtype, rows: int, columns: int) -> float:
    weights, most = _zeros(dtype, rows, columns), 0
    numbers = [(w.to(torch.int8), w.new_ones(rows)) for w in weights]
    least = copy_rows(dtype, rows, columns) if dtype in HALF else 0
    packed = [_pack(weight) for weight in weights] if least else []
    for size in INT8_ROWS:
        x = torch.zeros(size, columns, dtype=dtype)
        best = [partial(F.linear, x, w) for w in weights]
        if packed and size >= least:
            best = [partial(_product, x, w, None) for w in packed]
        if time_ratio(best, [partial(int8_linear.multiply, x, *pair) for pair in numbers]) < GAIN:
            break
        most = size
    return most


def _zeros(dtype: torch.dtype, rows: int, columns: int) -> list[Tensor]:
    """Enough weights to exceed the processor's caches."""
    count = max(1, min(MEASURED_COPIES, MEASURED_BYTES // (rows * columns * dtype.itemsize)))
    return [torch.zeros(rows, columns, dtype=dtype) for _ in range(count)]
