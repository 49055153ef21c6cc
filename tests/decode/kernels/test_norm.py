"""RMS norm of few rows in half precision: the same numbers as torch's, in fewer calls."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from decode.kernels.norm import ROWS, rms_norm


@pytest.mark.parametrize("shape", [(1, 3, 96), (ROWS, 16), (ROWS + 1, 16), (2, 0, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.covering(pairs=True)
@torch.no_grad()
def test_norm_is_torchs(shape, dtype, weighted):
    x = (3 * torch.randn(shape)).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype) if weighted else None
    exact = F.rms_norm(x.double(), shape[-1:], None if weight is None else weight.double(), 1e-5)
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    # Three roundings of half a unit each: of the unit vector, of the weighted one, and what eps may move.
    torch.testing.assert_close(found.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-12)


def test_norm_has_a_gradient():
    x, weight = torch.randn(2, 8).bfloat16().requires_grad_(), torch.ones(8).bfloat16().requires_grad_()
    rms_norm(x, weight, 1e-5).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
