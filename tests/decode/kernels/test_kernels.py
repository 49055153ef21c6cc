"""Kernels of few rows: packed and rounded weights, the dtype of products, and the norm."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from decode.hardware import cache_folder
from decode.kernels import half_products, int8_linear, norm, packed_linear
from decode.kernels.half_products import product_dtype
from decode.kernels.int8_linear import round_rows
from decode.kernels.norm import rms_norm
from decode.kernels.packed_linear import ROWS, Linear, int8_rows, is_packed, linear, linear_add, packing_gain

COPIES = {"half": torch.bfloat16, "wide": torch.float32}  # kinds of copies and their dtypes


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this processor has what oneDNN needs for products in a dtype."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(24, 16, dtype=dtype), 17)
    except RuntimeError:
        return False
    return True


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    """Nothing is remembered from elsewhere, in this process or on disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield
    forget()


def forget() -> None:
    packing_gain.cache_clear()
    packed_linear._wide_rows.cache_clear()
    half_products._slowness.cache_clear()


@pytest.fixture(params=COPIES)
def kind(request, monkeypatch) -> str:
    """Copies in half precision, and in fp32, as on a processor that is slow in half precision."""
    dtype = COPIES[request.param]
    if not can_pack(dtype):
        pytest.skip("oneDNN has no such products on this processor")
    monkeypatch.setattr(packed_linear, "product_dtype", lambda half, device: dtype)
    return request.param


@pytest.fixture
def gain(monkeypatch):
    """Sets what a measurement finds; returns the shapes that were measured."""
    measured = []

    def set_gain(value: float) -> list:
        monkeypatch.setattr(packed_linear, "_measure", lambda *shape: measured.append(shape) or value)
        least = int(value >= packed_linear.GAIN)
        monkeypatch.setattr(packed_linear, "_measure_wide", lambda *shape: measured.append(shape) or least)
        return measured

    return set_gain


def weight_of(rows=24, columns=16, dtype=torch.bfloat16) -> nn.Parameter:
    with torch.inference_mode(False):
        return nn.Parameter(torch.randn(rows, columns).to(dtype), requires_grad=False)


def check_products(x, weight, bias=None):
    residual = torch.randn(*x.shape[:-1], len(weight)).bfloat16()
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Half a unit in the last place of bf16, and the rounding of a sum in fp32.
    torch.testing.assert_close(linear(x, weight, bias).double(), exact, rtol=2**-8, atol=1e-5)
    added = linear_add(residual, x, weight, bias).double()
    # A sum may cancel, and its terms are rounded.
    rounding = max(exact.abs().flatten().tolist(), default=0.0) / 2**8
    torch.testing.assert_close(added, exact + residual.double(), rtol=2**-8, atol=rounding)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (2, 17, 16), (ROWS, 16), (ROWS + 1, 16)])
@pytest.mark.covering(pairs=True)
@torch.inference_mode()
def test_packed_product_is_exact(shape, bias, kind, gain):
    gain(2.0)
    weight, x = weight_of(), torch.randn(shape).bfloat16()
    check_products(x, weight, torch.randn(24).bfloat16() if bias else None)
    rows = x[..., 0].numel()
    assert is_packed(weight) == (rows > 0 and (kind == "wide" or rows <= ROWS))


def test_torch_still_has_its_private_functions(kind):
    """A version without them would silently be slower."""
    if kind == "half":
        assert packing_gain(torch.bfloat16, 24, 16) > 0
    assert packed_linear._pack(weight_of()).is_mkldnn
    x, numbers = torch.randn(2, 64).bfloat16(), torch.randint(-127, 128, (48, 64), dtype=torch.int8)
    found = int8_linear.multiply(x, numbers, torch.ones(48).bfloat16())
    torch.testing.assert_close(found.float(), x.float() @ numbers.float().T, rtol=2**-7, atol=1.0)


def gone(*args):
    raise AttributeError("no such operator")


@pytest.mark.parametrize("dtype", COPIES.values(), ids=COPIES)
@torch.inference_mode()
def test_without_packing_a_product_is_plain_or_of_an_fp32_copy(dtype, monkeypatch, gain):
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", gone, raising=False)
    monkeypatch.setattr(packed_linear, "product_dtype", lambda half, device: dtype)
    if dtype == torch.float32:
        gain(2.0)
    weight = weight_of()
    assert is_packed(weight) is False
    check_products(torch.randn(3, 16).bfloat16(), weight)
    assert is_packed(weight) == (dtype == torch.float32)


@torch.inference_mode()
def test_fp32_copy_is_read_from_the_rows_where_it_is_faster(monkeypatch):
    monkeypatch.setattr(packed_linear, "product_dtype", lambda half, device: torch.float32)
    monkeypatch.setattr(packed_linear, "time_ratio", lambda plain, wide: len(plain[0].args[0]) / 3)
    assert packed_linear.copy_rows(torch.bfloat16, 24, 16) == 4  # the first that was measured above 3
    weight, read = weight_of(), []
    product = packed_linear._product
    monkeypatch.setattr(packed_linear, "_product", lambda x, *rest: read.append(len(x)) or product(x, *rest))
    for rows in (1, 3, 4, 2 * ROWS):
        linear(torch.ones(rows, 16).bfloat16(), weight)
    assert read == [4, 2 * ROWS]


def test_other_code_reads_copies_where_half_precision_is_slow(monkeypatch, gain):
    gain(2.0)
    for dtype, wide in ((torch.bfloat16, False), (torch.float32, True)):
        monkeypatch.setattr(packed_linear, "product_dtype", lambda half, device, dtype=dtype: dtype)
        layer, x = nn.Linear(16, 24).bfloat16().requires_grad_(False), torch.randn(3, 16).bfloat16()
        with torch.no_grad(), packed_linear.fast_linears(layer.weight):
            found = layer(x)
        assert is_packed(layer.weight) == wide
        torch.testing.assert_close(found, layer(x), rtol=2**-7, atol=2**-7)
        assert not found.is_inference()


@torch.inference_mode()
def test_measurements_are_remembered(kind, gain):
    measured = gain(1.5)
    x = torch.ones(1, 16).bfloat16()
    for _ in range(2):
        forget()  # as in another process
        weights = [weight_of(), weight_of()]
        for weight in weights:
            linear(x, weight)
        assert all(map(is_packed, weights))
    assert measured == [(torch.bfloat16, 24, 16)]
    linear(x, weight_of(rows=8))
    assert measured[1:] == [(torch.bfloat16, 8, 16)], "another shape is measured by itself"


def test_gain_is_found_though_a_measurement_was_disturbed(monkeypatch):
    ratios = iter([1.7, 1.05, 1.0, 1.6, 1.7, 1.5])  # of one row and of 17 rows, in three attempts
    monkeypatch.setattr(packed_linear, "time_ratio", lambda plain, packed: next(ratios))
    monkeypatch.setattr(packed_linear, "_pack", lambda weight: weight)
    assert packing_gain(torch.bfloat16, 24, 16) == 1.5


def test_damaged_or_unwritable_cache_is_measured_again(gain, monkeypatch, tmp_path):
    measured = gain(1.5)
    packing_gain(torch.bfloat16, 24, 16)
    (file,) = (cache_folder() / "packing").iterdir()
    for damage in ("", "1.5, ", "{}"):
        file.write_text(damage)
        packing_gain.cache_clear()
        assert packing_gain(torch.bfloat16, 24, 16) == 1.5
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # no folder can be made in it
    packing_gain.cache_clear()
    assert packing_gain(torch.bfloat16, 24, 16) == 1.5
    assert len(measured) == 5


@pytest.mark.parametrize(
    ("dtype", "found", "memory"),
    [(torch.float32, 2.0, 2**30), (torch.bfloat16, 1.05, 2**30), (torch.bfloat16, 2.0, 2000)],
    ids=["fp32", "hardly faster", "no memory"],
)
@torch.inference_mode()
def test_weight_stays_plain(dtype, found, memory, gain, monkeypatch):
    gain(found)
    monkeypatch.setattr(packed_linear, "memory_bytes", lambda device: memory)
    weight, x = weight_of(dtype=dtype), torch.ones(1, 16, dtype=dtype)
    assert linear(x, weight).equal(F.linear(x, weight))
    assert not is_packed(weight)


def test_copies_of_freed_weights_make_room(kind, gain, monkeypatch):
    gain(2.0)
    size = 24 * 16 * COPIES[kind].itemsize
    held = sum(copy.size for copy in packed_linear._COPIES.values())
    monkeypatch.setattr(packed_linear, "memory_bytes", lambda device: (held + 2 * size) / 0.25)
    x = torch.ones(1, 16).bfloat16()
    with torch.inference_mode():
        for _ in range(3):
            weights = [weight_of() for _ in range(3)]
            assert all(linear(x, weight).shape == (1, 24) for weight in weights)
            assert list(map(is_packed, weights)) == [True, True, False]
            weights.clear()


@pytest.mark.parametrize("trained", ["weight", "input"])
def test_gradients_flow_and_trained_weights_stay_plain(trained, kind, gain):
    gain(2.0)
    layer = Linear(16, 24, bias=False).bfloat16().requires_grad_(trained == "weight")
    x = torch.ones(3, 16, dtype=torch.bfloat16, requires_grad=trained == "input")
    layer(x).sum().backward()
    assert (layer.weight.grad if trained == "weight" else x.grad) is not None
    with torch.inference_mode():
        layer(x)
    assert is_packed(layer.weight) == (trained == "input"), "an optimizer may change it"


def test_model_reads_its_packed_head(kind, gain, tiny_target):
    gain(2.0)
    target, text = tiny_target(vocab=40, dtype=torch.bfloat16), torch.tensor([[5, 9, 2, 7]])
    target.model.requires_grad_(False)
    with torch.inference_mode():
        target.start(1, 16)
        found = target.head(target.forward(text)).float()
        plain = target.model(input_ids=text).logits.float()
    assert target.packed
    torch.testing.assert_close(found, plain, rtol=0.05, atol=0.05 * float(plain.abs().max()))


# -- weights rounded to int8 --------------------------------------------------------------------


@pytest.fixture
def four_rows(monkeypatch):
    """int8 products are found to be faster up to four rows."""
    monkeypatch.setattr(packed_linear, "int8_rows", lambda *shape: 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 64), (2, 2, 64), (5, 64)])
@torch.inference_mode()
def test_int8_product_is_that_of_the_rounded_weight(shape, dtype, four_rows):
    weight = weight_of(48, 64, dtype)
    whole = weight.clone()
    round_rows(weight)
    assert (weight - whole).abs().max() <= whole.abs().max() / 127
    sizes = (shape, (*shape[:-1], 48), (48,))
    x, residual, bias = (torch.randn(size).to(dtype) for size in sizes)
    exact = F.linear(x.double(), weight.double())
    atol = 4 * torch.finfo(dtype).eps * float(exact.abs().max())
    torch.testing.assert_close(linear(x, weight).double(), exact, rtol=0, atol=atol)
    added = linear_add(residual, x, weight, bias).double()
    torch.testing.assert_close(added, exact + residual.double() + bias.double(), rtol=0, atol=2 * atol)


@torch.inference_mode()
def test_without_int8_products_rounded_weights_are_multiplied(monkeypatch):
    monkeypatch.setattr(int8_linear, "multiply", gone)
    int8_rows.cache_clear()
    weight, x = weight_of(), torch.ones(1, 16).bfloat16()
    round_rows(weight)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    int8_rows.cache_clear()


# -- the dtype of products ---------------------------------------------------------------------------


CPU = torch.device("cpu")


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


# -- the norm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 3, 96), (norm.ROWS, 16), (norm.ROWS + 1, 16), (2, 0, 16)])
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
