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
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from decode.hardware import cache_folder, hardware, memory_bytes

ROWS = 128  # with more rows, rearranging is a small part of the product
MEASURED_ROWS = (1, 17)  # plain decoding, and a draft of 16 nodes
MEASURED_BYTES = 2**26  # more than caches hold, so that weights come from memory as in a forward pass
MEASURED_COPIES = 32
REPEATS = 7
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
    packed = _packed(x, weight)
    return F.linear(x, weight, bias) if packed is None else _product(x, packed, bias)


def linear_add(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., N) residual + `linear(x, weight, bias)`."""
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


def _packed(x: Tensor, weight: Tensor) -> Tensor | None:
    """The packed copy for this product; None: use the plain weight."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float16):
        return None
    if not may_copy(weight) or not 0 < x.numel() <= ROWS * x.shape[-1]:
        return None
    copy = _COPIES.get(id(weight))
    if copy is None or (copy.pointer, copy.version) != weight_state(weight) or copy.weight() is not weight:
        copy = _COPIES[id(weight)] = _make_copy(weight)
    return copy.packed


def may_copy(weight: Tensor) -> bool:
    """Whether decoding may keep a copy of this weight: it is frozen and shows changes."""
    # Other kinds of tensors are views made anew in every call, or sharded, or hide their changes.
    frozen = type(weight) is nn.Parameter and not weight.requires_grad and not weight.is_inference()
    return frozen and torch.is_inference_mode_enabled()


def weight_state(weight: Tensor) -> tuple[int, int]:
    """Changes whenever the tensor's memory is replaced or written to."""
    # private API: torch has no public way to ask whether a tensor was changed in place. Inference tensors
    # have no count of changes.
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


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
    facts = [hardware(torch.device("cpu")), torch.get_num_threads(), torch.__version__, str(dtype)]
    key = hashlib.sha256(json.dumps([*facts, rows, columns, os.environ.get("ONEDNN_MAX_CPU_ISA")]).encode())
    memory = cache_folder() / "packing" / f"{key.hexdigest()[:24]}.json"
    try:
        return float(json.loads(memory.read_text()))
    except (OSError, TypeError, ValueError):  # not measured yet, or damaged
        pass
    try:
        gain = _measure(dtype, rows, columns)
    # In a torch without oneDNN, or without these private operators, or on a processor without the dtype.
    except (AttributeError, NotImplementedError, RuntimeError):
        gain = 0.0
    with contextlib.suppress(OSError):  # a home that cannot be written to: measured again in every process
        memory.parent.mkdir(parents=True, exist_ok=True)
        whole = memory.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(gain))
        whole.replace(memory)
    return gain


@torch.inference_mode()
def _measure(dtype: torch.dtype, rows: int, columns: int) -> float:
    count = max(1, min(MEASURED_COPIES, MEASURED_BYTES // (rows * columns * dtype.itemsize)))
    plain = [torch.zeros(rows, columns, dtype=dtype) for _ in range(count)]
    packed = [_pack(weight) for weight in plain]
    gains = []
    for size in MEASURED_ROWS:
        x = torch.zeros(size, columns, dtype=dtype)
        ratios = []
        for _ in range(REPEATS):  # one after the other, so that other load slows both
            begin = time.perf_counter()
            for weight in plain:
                F.linear(x, weight)
            middle = time.perf_counter()
            for weight in packed:
                _product(x, weight, None)
            ratios.append((middle - begin) / (time.perf_counter() - middle))
        gains.append(statistics.median(ratios))
    return min(gains)
