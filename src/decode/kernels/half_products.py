"""Whether a processor has instructions for products in half precision.

Without them (x86 before AVX512-BF16, AMX or AVX512-FP16) torch multiplies bf16 and fp16 several times more
slowly than fp32 as soon as there are several rows.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch

from decode.kernels.measured import remembered, time_ratio

HALF = (torch.bfloat16, torch.float16)
SIZE = 256  # rows, inputs and outputs of the measured product
SLOW = 2.0  # times as slow as fp32; emulated products come near 1


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Dtype for products of several rows: fp32 if those in `dtype` are slow."""
    return torch.float32 if device.type == "cpu" and dtype in HALF and _slowness(dtype) >= SLOW else dtype


@lru_cache
def _slowness(dtype: torch.dtype) -> float:
    """Time of a product in half precision over one in fp32, with casts of its input and output."""
    return remembered("half", _measure, dtype, SIZE)


@torch.inference_mode()
def _measure(dtype: torch.dtype, size: int) -> float:
    half = torch.zeros(size, size, dtype=dtype)
    wide = half.float()
    return time_ratio([partial(torch.mm, half, half)], [lambda: (half.float() @ wide).to(dtype)])
