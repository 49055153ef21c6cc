"""Products of few rows on a CPU with weights in oneDNN's own layout.

Given a plain weight, oneDNN rearranges it in every call, which costs more than a product of a few rows. So
`linear` keeps a rearranged copy of frozen weights, where that is faster: measured once per machine, thread
count, version and shape, and remembered on disk, so that later runs choose, and round, alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from decode.hardware import cache_folder, hardware, memory_bytes
from decode.kernels import int8_linear
from decode.kernels.weight_state import may_copy, weight_state

HALF = (torch.bfloat16, torch.float16)
ROWS = 128  # with more rows, rearranging is a small part of the product
MEASURED_ROWS = (1, 17)  # plain decoding, and a draft of 16 nodes
INT8_ROWS = (1, 4)  # a chain's pass, and that of a level of the default tree
MEASURED_BYTES = 2**26  # more than caches hold, so that weights come from memory as in a forward pass
MEASURED_COPIES = 32
REPEATS = 7
ATTEMPTS = 3  # programs that fill the memory's bandwidth hide a gain for a while, and none make one
GAIN = 1.1  # a smaller gain is not worth the memory
MEMORY_SHARE = 0.25  # of the machine's memory, at most, for all copies


class _Copy(NamedTuple):
    """Packed copy of a weight, and what it was made from."""

    weight: weakref.ref[Tensor]
    pointer: int
    version: int
    packed: Tensor | None  # None: the plain weight is faster, or there is no room
    size: int  # bytes of `packed`; it does not tell, but it is the plain one's but for some padding


_COPIES: dict[int, _Copy] = {}  # by id of the weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., K) -> (..., N) with a weight (N, K) and a bias (N,): `F.linear`, faster where it can be.

    Only in inference mode and with a frozen parameter: packed products have no gradient, and what an
    optimizer changes would have to be packed again.
    """
    if (int8 := _rounded(x, weight)) is not None:
        product = int8_linear.product(x, int8)
        return product if bias is None else product + bias
    packed = _packed(x, weight)
    return F.linear(x, weight, bias) if packed is None else _product(x, packed, bias)


def linear_add(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., N) residual + `linear(x, weight, bias)`."""
    if _rounded(x, weight) is not None:
        return residual + linear(x, weight, bias)
    packed = _packed(x, weight)
    if packed is not None:
        # private API: as in `_pack`.
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add")
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


def is_packed(weight: Tensor) -> bool:
    """Whether `linear` has a packed copy of this weight."""
    copy = _COPIES.get(id(weight))
    return copy is not None and copy.weight() is weight and copy.packed is not None


def _rounded(x: Tensor, weight: Tensor) -> int8_linear.Rounded | None:
    """The int8 numbers for this product; None: use others."""
    found = int8_linear.rounded(weight)
    if found is None or not may_copy(weight) or x.dtype != weight.dtype or weight.device.type != "cpu":
        return None
    fits = 0 < x.numel() <= INT8_ROWS[-1] * x.shape[-1]
    return found if fits and x.numel() <= int8_rows(weight.dtype, *weight.shape) * x.shape[-1] else None


def _packed(x: Tensor, weight: Tensor) -> Tensor | None:
    """The packed copy for this product; None: use the plain weight."""
    if weight.device.type != "cpu" or weight.dtype not in HALF:
        return None
    if not may_copy(weight) or not 0 < x.numel() <= ROWS * x.shape[-1]:
        return None
    copy = _COPIES.get(id(weight))
    if copy is None or (copy.pointer, copy.version) != weight_state(weight) or copy.weight() is not weight:
        copy = _COPIES[id(weight)] = _make_copy(weight)
    return copy.packed


def _make_copy(weight: Tensor) -> _Copy:
    size, key = weight.numel() * weight.itemsize, id(weight)
    room = MEMORY_SHARE * memory_bytes(weight.device) - sum(copy.size for copy in _COPIES.values())
    pays = size <= room and packing_gain(weight.dtype, *weight.shape) >= GAIN
    reference = weakref.ref(weight, lambda _: _COPIES.pop(key, None))
    return _Copy(reference, *weight_state(weight), _pack(weight) if pays else None, size if pays else 0)


def _pack(weight: Tensor) -> Tensor:
    # private API: what torch.compile emits for linear layers; no public function keeps a packed weight.
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), MEASURED_ROWS[-1])


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    # private API: as in `_pack`.
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@lru_cache
def packing_gain(dtype: torch.dtype, rows: int, columns: int) -> float:
    """Time of products with a plain weight over that with a packed one; 0 where torch cannot pack.

    The least over `MEASURED_ROWS`, measured or remembered.
    """
    return _remembered("packing", _measure, dtype, rows, columns)


@lru_cache
def int8_rows(dtype: torch.dtype, rows: int, columns: int) -> int:
    """Number of rows up to which products with int8 numbers are the fastest; measured or remembered."""
    return int(_remembered("int8", _measure_int8, dtype, rows, columns))


def _remembered(
    kind: str, measure: Callable[[torch.dtype, int, int], float], dtype: torch.dtype, rows: int, columns: int
) -> float:
    """What `measure` finds on this machine; 0 where torch lacks what it needs."""
    facts = [hardware(torch.device("cpu")), torch.get_num_threads(), torch.__version__, str(dtype)]
    key = hashlib.sha256(json.dumps([*facts, rows, columns, os.environ.get("ONEDNN_MAX_CPU_ISA")]).encode())
    memory = cache_folder() / kind / f"{key.hexdigest()[:24]}.json"
    try:
        return float(json.loads(memory.read_text()))
    except (OSError, TypeError, ValueError):  # not measured yet, or damaged
        pass
    try:
        found = measure(dtype, rows, columns)
    # In a torch without oneDNN, or without these private operators, or on a processor without the dtype.
    except (AttributeError, NotImplementedError, RuntimeError):
        found = 0.0
    with contextlib.suppress(OSError):  # a home that cannot be written to: measured again in every process
        memory.parent.mkdir(parents=True, exist_ok=True)
        whole = memory.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(found))
        whole.replace(memory)
    return found


@torch.inference_mode()
def _measure(dtype: torch.dtype, rows: int, columns: int) -> float:
    plain = _zeros(dtype, rows, columns)
    packed = [_pack(weight) for weight in plain]
    inputs = [torch.zeros(size, columns, dtype=dtype) for size in MEASURED_ROWS]
    most = 0.0
    for _ in range(ATTEMPTS):
        ratios = (
            _ratio([partial(F.linear, x, w) for w in plain], [partial(_product, x, w, None) for w in packed])
            for x in inputs
        )
        most = max(most, min(ratios))
        if most >= GAIN:
            break
    return most


@torch.inference_mode()
def _measure_int8(dtype: torch.dtype, rows: int, columns: int) -> float:
    weights, most = _zeros(dtype, rows, columns), 0
    numbers = [(w.to(torch.int8), w.new_ones(rows)) for w in weights]
    packs = dtype in HALF and packing_gain(dtype, rows, columns) >= GAIN
    packed = [_pack(weight) for weight in weights] if packs else []
    for size in INT8_ROWS:
        x = torch.zeros(size, columns, dtype=dtype)
        best = [partial(_product, x, w, None) for w in packed] or [partial(F.linear, x, w) for w in weights]
        if _ratio(best, [partial(int8_linear.multiply, x, *pair) for pair in numbers]) < GAIN:
            break
        most = size
    return most


def _zeros(dtype: torch.dtype, rows: int, columns: int) -> list[Tensor]:
    """As many weights as do not fit a cache together."""
    count = max(1, min(MEASURED_COPIES, MEASURED_BYTES // (rows * columns * dtype.itemsize)))
    return [torch.zeros(rows, columns, dtype=dtype) for _ in range(count)]


def _ratio(one: Sequence[Callable[[], Tensor]], other: Sequence[Callable[[], Tensor]]) -> float:
    """Time of one kind of products over that of another."""
    ratios = []
    for _ in range(REPEATS):  # one after the other, so that other load slows both
        begin = time.thread_time()  # without the time that other processes had
        for call in one:
            call()
        middle = time.thread_time()
        for call in other:
            call()
        ratios.append((middle - begin) / (time.thread_time() - middle))
    return statistics.median(ratios)
