"""Whether a processor multiplies faster in half precision or in fp32, by the number of rows.

With few rows a product takes the time in which its weight is read, and half precision reads half the bytes.
With more rows arithmetic takes the time. Processors with AMX multiply faster in half precision, some with
AVX512-BF16 more slowly, and those without either several times as slowly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import lru_cache

import torch
from torch.nn import functional as F

from decode.kernels.measured import remembered, time_ratio
from decode.kernels.packing import LARGEST, measured_weights, packed_products, plain_products

HALF = (torch.bfloat16, torch.float16)
ROWS = (2, 4, 8, 16, 32, 64, 128, 256, 1024)  # candidates for `fp32_rows`
FEW = 128  # with more rows, a plain weight is rearranged in a small part of the product's time
SIZE = 512  # inputs and outputs of a product without a shape
STEP_ROWS = 512  # of a product of a training step
GAIN = 1.1  # a smaller one is not worth the memory of a copy


def product_dtype(dtype: torch.dtype, device: torch.device, rows: int) -> torch.dtype:
    """Dtype for products of so many rows: `dtype`, or fp32 if that is faster."""
    if device.type != "cpu" or dtype not in HALF:
        return dtype
    return torch.float32 if 0 < fp32_rows(dtype) <= rows else dtype


def fp32_rows(dtype: torch.dtype, outputs: int = SIZE, inputs: int = SIZE) -> int:
    """Rows from which on products with an fp32 copy of a weight, casts included, are faster on this CPU.

    Measured once for each shape, or read from the cache; large weights count as square ones of `LARGEST`.

    Args:
        dtype: of the weight.
        outputs: its first size.
        inputs: its second size.

    Returns:
        One of `ROWS`; 0: never, or not in half precision.
    """
    return _fp32_rows(dtype, min(outputs, LARGEST), min(inputs, LARGEST)) if dtype in HALF else 0


@lru_cache
def _fp32_rows(dtype: torch.dtype, outputs: int, inputs: int) -> int:
    return int(remembered("fp32_rows", _measure, dtype, outputs, inputs))


@torch.inference_mode()
def _measure(dtype: torch.dtype, outputs: int, inputs: int) -> int:
    """The first of `ROWS` where fp32 is faster, by bisection: more rows never favour half precision."""
    low, high = -1, len(ROWS) - 1
    if _fp32_gain(dtype, (outputs, inputs), ROWS[high]) < GAIN:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        if _fp32_gain(dtype, (outputs, inputs), ROWS[middle]) >= GAIN:
            high = middle
        else:
            low = middle
    return ROWS[high]


def _fp32_gain(dtype: torch.dtype, shape: tuple[int, int], rows: int) -> float:
    """Time of the fastest product in half precision over that of an fp32 copy."""
    weights = measured_weights(dtype, shape, rows)
    wide = packed_products(weights, rows, torch.float32)
    gain = time_ratio(plain_products(weights, rows), wide)
    if gain >= GAIN and rows <= FEW:
        with contextlib.suppress(RuntimeError):  # the processor has no packed products in this dtype
            gain = min(gain, time_ratio(packed_products(weights, rows, dtype), wide))
    return gain


def training_dtype(device: torch.device) -> torch.dtype:
    """bf16, or fp32 if a CPU multiplies faster in it, forward and backward, without autocast's casts."""
    slow = device.type == "cpu" and not 0 < _step_slowness() < 1  # 0: it cannot
    return torch.float32 if slow else torch.bfloat16


@lru_cache
def _step_slowness() -> float:
    """Time of a training step's product under bf16 autocast over that in fp32."""
    return remembered("step", _measure_step, torch.bfloat16, STEP_ROWS, SIZE, 2 * SIZE)


def _measure_step(dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> float:
    x, weight = (torch.zeros(size, inputs).requires_grad_() for size in (rows, outputs))
    slope = torch.zeros(rows, outputs)

    def step(half: bool) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with torch.autocast("cpu", dtype, enabled=half):
                out = F.linear(x, weight).float()
            return torch.autograd.grad(out, (x, weight), slope)[0]

        return run

    with torch.inference_mode(False), torch.enable_grad():
        return time_ratio([step(True)], [step(False)])
