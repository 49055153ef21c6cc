"""RMS norm, SwiGLU and rotation with hand-written backward passes.

They need fewer passes over memory (fewer kernels on a GPU) than autograd, and save fewer tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.kernels.norm import rms_norm as few_rows_norm


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean.add_(eps).rsqrt_()  # (..., 1)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        size = x.shape[-1]
        unit = x * scale
        product = grad * unit
        along = (product @ weight).div_(size)[..., None]
        grad_x = torch.addcmul(grad * weight, unit, along, value=-1).mul_(scale)
        return grad_x, product.view(-1, size).sum(0), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension (Zhang & Sennrich, arXiv:1910.07467)."""
    weight = weight.to(x.dtype)  # under autocast the input is bf16 and the weight fp32
    # torch's own is one kernel on a GPU, and computes 16-bit input in fp32.
    if x.device.type != "cpu" or x.dtype.itemsize < 4 or not torch.is_grad_enabled():
        return few_rows_norm(x, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        result = torch.empty_like(gate_up)
        grad_gate, grad_up = result.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return result


def swiglu(gate_up: Tensor) -> Tensor:
    """(..., 2 I) -> (..., I) silu of the first half times the second (Shazeer, arXiv:2002.05202)."""
    if not torch.is_grad_enabled():
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)
    return _SwiGLU.apply(gate_up)


def _rotate_by(x: Tensor, angles: Tensor, sign: int) -> Tensor:
    # In halves: building the `rotate_half` tensor is several times slower.
    cosine, sine = angles[..., 0, :, :], angles[..., 1, :, :]
    half = x.shape[-1] // 2
    rotated = x * cosine
    rotated[..., :half].addcmul_(x[..., half:], sine[..., :half], value=-sign)
    rotated[..., half:].addcmul_(x[..., :half], sine[..., half:], value=sign)
    return rotated


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return _rotate_by(x, angles, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _rotate_by(grad, *ctx.saved_tensors, sign=-1), None  # a rotation's transpose is its inverse


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the first n elements of (..., heads, dim) by (..., 2, 1, n) cosines and sines."""
    rotary_dim = angles.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat([rotate(x[..., :rotary_dim], angles), x[..., rotary_dim:]], -1)
    return _Rotate.apply(x, angles) if torch.is_grad_enabled() else _rotate_by(x, angles, 1)
