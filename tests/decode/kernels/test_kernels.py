"""Kernels of few rows: packed and rounded weights, the dtype of products, and the norm."""

import pytest
import torch
from packing import can_pack
from torch import nn
from torch.nn import functional as F

from decode.hardware import cache_folder
from decode.kernels import half_products, int8_linear, norm, packed_linear, packing
from decode.kernels.half_products import fp32_rows, product_dtype, training_dtype
from decode.kernels.int8_linear import round_rows
from decode.kernels.norm import rms_norm
from decode.kernels.packed_linear import ROWS, Linear, int8_rows, linear, linear_add, packing_gain

COPIES = {"half": torch.bfloat16, "wide": torch.float32}  # kinds of copies and their dtypes


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    """Nothing is remembered from elsewhere, in this process or on disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield
    forget()


def forget() -> None:
    packing_gain.cache_clear()
    packed_linear.copy_range.cache_clear()
    half_products._fp32_rows.cache_clear()
    half_products._step_slowness.cache_clear()


def copies(weight: torch.Tensor) -> list[torch.dtype]:
    """Dtypes of the packed copies of a weight."""
    found = packed_linear._COPIES.get(id(weight))
    return [dtype for dtype, copy in found.packed.items() if copy is not None] if found else []


@pytest.fixture(params=COPIES)
def kind(request, found) -> str:
    """Copies in half precision, and in fp32, as on a processor that is slow in half precision."""
    if not can_pack(COPIES[request.param]):
        pytest.skip("oneDNN has no such products on this processor")
    found.fp32_from = int(request.param == "wide")
    return request.param


class Found:
    """What measurements find: a gain of packing, and the rows from which on fp32 is faster."""

    def __init__(self) -> None:
        self.gain, self.fp32_from = 0.0, 0
        self.measured = []  # shapes

    def __call__(self, gain: float) -> list:
        self.gain = gain
        return self.measured

    def packing(self, *shape) -> float:
        self.measured.append(shape)
        return self.gain

    def fp32(self, *shape) -> int:
        self.measured.append(shape)
        return self.fp32_from if self.gain >= packed_linear.GAIN else 0


@pytest.fixture
def found(monkeypatch) -> Found:
    found = Found()
    for name in ("_measure", "_measure_many"):
        monkeypatch.setattr(packed_linear, name, found.packing)
    monkeypatch.setattr(packed_linear, "_measure_least", lambda *shape: int(found.packing(*shape) > 1))
    monkeypatch.setattr(half_products, "_measure", found.fp32)
    return found


@pytest.fixture
def gain(found) -> Found:
    return found


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
    assert copies(weight) == [COPIES[kind]] * (rows > 0 and (kind == "wide" or rows <= ROWS))


def test_torch_still_has_its_private_functions(kind):
    """A version without them would silently be slower."""
    if kind == "half":
        assert packed_linear._gain(torch.bfloat16, (24, 16), 1) > 0
    assert packing.pack(weight_of(), COPIES[kind]).is_mkldnn
    x, numbers = torch.randn(2, 64).bfloat16(), torch.randint(-127, 128, (48, 64), dtype=torch.int8)
    found = int8_linear.multiply(x, numbers, torch.ones(48).bfloat16())
    torch.testing.assert_close(found.float(), x.float() @ numbers.float().T, rtol=2**-7, atol=1.0)


def gone(*args):
    raise AttributeError("no such operator")


@pytest.mark.parametrize("wide", [False, True])
@torch.inference_mode()
def test_without_packing_a_product_is_plain_or_of_an_fp32_copy(wide, monkeypatch, found):
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", gone, raising=False)
    found(2.0)
    found.fp32_from = int(wide)
    monkeypatch.setattr(packed_linear, "_measure", gone)  # packing is measured and not found
    weight = weight_of()
    check_products(torch.randn(3, 16).bfloat16(), weight)
    assert copies(weight) == [torch.float32] * wide


def test_each_number_of_rows_reads_the_copy_that_is_faster_for_it(found, monkeypatch):
    found(2.0)
    found.fp32_from, read = 17, []
    weight, product = weight_of(), packed_linear.product
    monkeypatch.setattr(
        packed_linear, "product", lambda x, copy, *rest: read.append(copy.dtype) or product(x, copy, *rest)
    )
    if not can_pack(torch.bfloat16):
        pytest.skip("oneDNN has no such products on this processor")
    with torch.inference_mode():
        linear(torch.ones(16, 16).bfloat16(), weight)
        assert copies(weight) == [torch.bfloat16], "copies are made when they are needed"
        for rows in (17, ROWS + 1, 1):
            linear(torch.ones(rows, 16).bfloat16(), weight)
    assert read == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    assert packed_linear.described(weight) == (
        "weights packed for decoding, products of 17 or more rows in fp32"
    )


@pytest.mark.parametrize("many", [True, False])
@torch.inference_mode()
def test_copy_of_an_fp32_weight_is_read_where_it_is_faster(many, monkeypatch, found):
    found(2.0)
    monkeypatch.setattr(packed_linear, "_measure_least", lambda *shape: 4)
    monkeypatch.setattr(packed_linear, "_measure_many", lambda *shape: 2.0 if many else 1.0)
    weight, read = weight_of(dtype=torch.float32), []
    product = packed_linear.product
    monkeypatch.setattr(packed_linear, "product", lambda x, *rest: read.append(len(x)) or product(x, *rest))
    x = torch.randn(ROWS + 1, 16)
    exact = F.linear(x.double(), weight.double())
    for rows in (1, 3, 4, ROWS, ROWS + 1):
        found_rows = linear(x[:rows], weight)
        torch.testing.assert_close(found_rows.double(), exact[:rows], rtol=0, atol=1e-5)
    assert read == [4, ROWS, *[ROWS + 1] * many]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("slow", [True, False])
def test_other_code_reads_copies_where_many_rows_are_slow(slow, dtype, found, monkeypatch):
    found(2.0)
    found.fp32_from = int(slow)
    monkeypatch.setattr(packed_linear, "_measure_many", lambda *shape: 2.0 if slow else 1.0)
    layer, x = nn.Linear(16, 24).to(dtype).requires_grad_(False), torch.randn(3, 16).to(dtype)
    with torch.no_grad(), packed_linear.fast_linears(layer.weight):
        got = layer(x)
        vector = F.linear(x, layer.weight[0])
    assert copies(layer.weight) == [torch.float32] * slow
    torch.testing.assert_close(vector, x @ layer.weight[0], rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(got, layer(x), rtol=2**-7, atol=2**-7)
    assert not got.is_inference()


@torch.inference_mode()
def test_measurements_are_remembered(kind, gain):
    measured = gain(1.5)
    x = torch.ones(1, 16).bfloat16()
    for _ in range(2):
        forget()  # as in another process
        weights = [weight_of(), weight_of()]
        for weight in weights:
            linear(x, weight)
        assert all(map(copies, weights))
    times = 1 if kind == "wide" else 2  # fp32 against half, and packed against plain
    assert measured == [(torch.bfloat16, 24, 16)] * times
    linear(x, weight_of(rows=8))
    assert measured[times:] == [(torch.bfloat16, 8, 16)] * times, "another shape is measured by itself"


def test_gain_is_found_though_a_measurement_was_disturbed(monkeypatch):
    ratios = iter([1.7, 1.05, 1.0, 1.6, 1.7, 1.5])  # of one row and of 17 rows, in three attempts
    monkeypatch.setattr(packed_linear, "_gain", lambda dtype, shape, rows: next(ratios))
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
    ("dtype", "ratio", "memory"),
    [(torch.float64, 2.0, 2**30), (torch.bfloat16, 1.05, 2**30), (torch.bfloat16, 2.0, 2000)],
    ids=["fp64", "hardly faster", "no memory"],
)
@torch.inference_mode()
def test_weight_stays_plain(dtype, ratio, memory, gain, monkeypatch):
    gain(ratio)
    monkeypatch.setattr(packed_linear, "memory_bytes", lambda device: memory)
    weight, x = weight_of(dtype=dtype), torch.ones(1, 16, dtype=dtype)
    assert linear(x, weight).equal(F.linear(x, weight))
    assert not copies(weight)


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
            assert [len(copies(weight)) for weight in weights] == [1, 1, 0]
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
    assert bool(copies(layer.weight)) == (trained == "input"), "an optimizer may change it"


def test_model_reads_its_packed_head(kind, gain, tiny_target):
    gain(2.0)
    target, text = tiny_target(vocab=40, dtype=torch.bfloat16), torch.tensor([[5, 9, 2, 7]])
    target.model.requires_grad_(False)
    with torch.inference_mode():
        target.start(1, 16)
        found = target.head(target.forward(text)).float()
        plain = target.model(input_ids=text).logits.float()
    said = {"half": "weights packed for decoding", "wide": "products of 1 or more rows in fp32"}
    assert target.products == said[kind]
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


@pytest.mark.parametrize("crossing", [2, 17, 128, 1000, 2000])
def test_rows_from_which_fp32_is_faster_are_found(crossing, monkeypatch):
    monkeypatch.setattr(half_products, "_fp32_gain", lambda dtype, shape, rows: rows / crossing * 1.1)
    least = next((rows for rows in half_products.ROWS if rows >= crossing), 0)
    assert fp32_rows(torch.bfloat16) == least
    for rows in (1, 16, 128, 4096):
        fast = torch.float32 if 0 < least <= rows else torch.bfloat16
        assert product_dtype(torch.bfloat16, CPU, rows) == fast


def test_fp32_is_compared_with_the_fastest_product_in_half_precision(monkeypatch):
    kinds = {"plain": 1.5, "packed": 0.9}
    monkeypatch.setattr(half_products, "plain_products", lambda *args: "plain")
    monkeypatch.setattr(half_products, "packed_products", lambda weights, rows, dtype: "packed")
    monkeypatch.setattr(half_products, "time_ratio", lambda one, wide: kinds[one])
    gains = [half_products._fp32_gain(torch.bfloat16, (24, 16), rows) for rows in (17, 1024)]
    assert gains == [0.9, 1.5], "packed half products have few rows"


def test_other_dtypes_and_devices_are_not_measured(monkeypatch):
    monkeypatch.setattr(half_products, "time_ratio", None)
    for dtype in (torch.float32, torch.float64):
        assert product_dtype(dtype, CPU, 64) == dtype
    assert product_dtype(torch.bfloat16, torch.device("cuda"), 64) == torch.bfloat16
    assert training_dtype(torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize(("slowness", "dtype"), [(1.2, torch.float32), (0.6, torch.bfloat16)])
def test_training_is_in_the_faster_dtype(slowness, dtype, monkeypatch):
    monkeypatch.setattr(half_products, "time_ratio", lambda half, wide: slowness)
    assert training_dtype(CPU) == dtype


def test_training_step_is_measured_with_its_gradients():
    assert half_products._measure_step(torch.bfloat16, 8, 4, 4) > 0


def test_measurement_fits_this_processor():
    capabilities = torch.cpu.get_capabilities()
    if not capabilities.get("avx2"):
        pytest.skip("not an x86 processor")
    if not capabilities["avx512_f"]:
        assert 0 < fp32_rows(torch.bfloat16) <= 16
    elif capabilities["amx_bf16"]:
        assert fp32_rows(torch.bfloat16) == 0


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
