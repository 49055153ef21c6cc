"""RMS norm of few rows; in half precision on a CPU, F.layer_norm needs fewer calls than F.rms_norm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.kernels.half_products import HALF

ROWS = 32  # up to which the calls of a norm dominate its cost


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, twice: Tensor | None = None) -> Tensor:
    """(..., D) / its root mean square, times a weight (D,).

    Args:
        x: input.
        weight: None: all 1.
        eps: added to the mean square.
        twice: (2 D,) the weight repeated twice, if the caller has it.
    """
    size = x.shape[-1]
    few = x.device.type == "cpu" and x.dtype in HALF and x.numel() <= ROWS * size
    if not few or torch.is_grad_enabled() or (weight is not None and weight.dtype != x.dtype):
        return F.rms_norm(x, (size,), weight, eps)
    if twice is None and weight is not None:
        twice = torch.cat([weight, weight])
    # (x, -x) has mean 0, and its variance is the mean square of x.
    return F.layer_norm(torch.cat([x, -x], -1), (2 * size,), twice, None, eps)[..., :size]
