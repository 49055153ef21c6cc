"""The dtype of products on a CPU that is slow in half precision."""

from __future__ import annotations

import pytest
import torch

from decode.kernels import half_products
from decode.kernels.half_products import product_dtype

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    """Nothing is remembered from elsewhere, in this process or on disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    half_products._slowness.cache_clear()
    yield
    half_products._slowness.cache_clear()


@pytest.mark.parametrize(("slowness", "expected"), [(20.0, torch.float32), (1.3, torch.bfloat16)])
def test_products_are_in_fp32_where_half_precision_is_slow(slowness, expected, monkeypatch):
    monkeypatch.setattr(half_products, "time_ratio", lambda half, wide: slowness)
    assert product_dtype(torch.bfloat16, CPU) == expected


def test_other_dtypes_and_devices_are_not_measured(monkeypatch):
    monkeypatch.setattr(half_products, "time_ratio", None)
    for dtype in (torch.float32, torch.float64):
        assert product_dtype(dtype, CPU) == dtype
    assert product_dtype(torch.bfloat16, torch.device("cuda")) == torch.bfloat16


def test_measurement_fits_this_processor():
    capabilities = torch.cpu.get_capabilities()
    if not capabilities.get("avx2"):
        pytest.skip("not an x86 processor")
    fast = capabilities["avx512_bf16"] or capabilities["amx_bf16"]
    if fast or not capabilities["avx512_f"]:  # between the two it depends on the processor
        assert (product_dtype(torch.bfloat16, CPU) == torch.bfloat16) == fast
