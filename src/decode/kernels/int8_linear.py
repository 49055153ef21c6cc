"""Weights rounded to int8 with one scale per row, and their products with few rows on a CPU.

A rounded weight keeps its dtype, so any code can compute with it. Products of few rows read the int8
numbers and scales instead (half the bytes) if that is measured to be faster (`packed_linear`). Both
give the same results up to rounding.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from decode.kernels.weight_state import WeightState, weight_state

LARGEST = 127


class Rounded(NamedTuple):
    """Numbers and scales of a rounded weight."""

    weight: weakref.ref[Tensor]
    state: WeightState
    numbers: Tensor  # (N, K) int8
    scales: Tensor  # (N,) in the weight's dtype


_ROUNDED: dict[int, Rounded] = {}  # by id of the weight


def round_rows(weight: Tensor) -> None:
    """Round a weight (N, K) in place to multiples (up to 127) of one scale per row."""
    # torch does not count changes made in inference mode.
    with torch.inference_mode(weight.is_inference()), torch.no_grad():
        scales = (weight.abs().amax(1) / LARGEST).clamp_min(torch.finfo(weight.dtype).tiny)
        wide = scales.float()[:, None]
        numbers = (weight.float() / wide).round_().clamp_(-LARGEST, LARGEST)
        weight.copy_(numbers * wide)
    key = id(weight)
    reference = weakref.ref(weight, lambda _: _ROUNDED.pop(key, None))
    _ROUNDED[key] = Rounded(reference, weight_state(weight), numbers.to(torch.int8), scales)


def rounded(weight: Tensor) -> Rounded | None:
    """Numbers and scales of a weight; None if it was not rounded or has changed since."""
    found = _ROUNDED.get(id(weight))
    same = found is not None and found.weight() is weight and found.state == weight_state(weight)
    return found if same else None


def product(x: Tensor, weight: Rounded) -> Tensor:
    """(..., K) -> (..., N)."""
    return multiply(x.reshape(-1, x.shape[-1]), weight.numbers, weight.scales).view(*x.shape[:-1], -1)


def multiply(x: Tensor, numbers: Tensor, scales: Tensor) -> Tensor:
    """(M, K), (N, K) int8, (N,) -> (M, N)."""
    # private API: torch has no public product of int8 weights with inputs in half precision.
    return torch._weight_int8pack_mm(x, numbers, scales)
