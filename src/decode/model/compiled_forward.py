"""Compiled forward pass of Llama-like models on a CPU, for passes over a few tokens.

Between its matrix products a layer runs some ten small operations, and launching them costs as much as
the products. torch.export traces all layers as one graph for every batch size, number of slots and length.
AOTInductor compiles it, with weights in the processor's layout, into a file in the cache. Compiling takes
a minute or more, once per machine and weights; loading the file takes less than a second.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

# private API: the documented way to call AOTInductor.
from torch import Tensor, _inductor, nn
from torch.export import Dim, export
from typing_extensions import override

from decode.hardware import cache_folder, hardware, locked
from decode.kernels.half_products import product_dtype
from decode.model import attention, fused_forward
from decode.model.attention import attend_folded
from decode.model.cache import RowStore
from decode.model.fused_forward import CompiledPass, Fused, LayerSteps, Norm, StackedLinear

OPTIONS = {
    "freezing": True,  # packed weights are constants of the file
    "cpp.dynamic_threads": True,  # the number of threads is read at each call
    "aot_inductor.precompile_headers": False,  # these pay off from the second compilation on
}
# For processors slow in half precision: C++ products that read bf16 weights and sum in fp32.
OWN_PRODUCTS = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP"}
MOST_TOKENS = 12  # with more per pass, fp32 copies (`packed_linear`) are faster than these
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative error of outputs
HALF_TOLERANCE = 0.1  # in half precision

Run = Callable[..., Sequence[Tensor]]


class _Linear(nn.Linear):
    """The weights of a `StackedLinear`, without a copy."""

    def __init__(self, source: StackedLinear) -> None:
        with torch.device("meta"):
            super().__init__(*reversed(source.weight.shape), bias=source.bias is not None)
        self.weight = _parameter(source.weight)
        if source.bias is not None:
            self.bias = _parameter(source.bias)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """Residual + output."""
        return residual + self(x)


class _Layer(LayerSteps, nn.Module):
    """A decoder layer with weights that torch.export can see."""

    def __init__(self, source: LayerSteps) -> None:
        nn.Module.__init__(self)
        for name in ("qkv", "out", "gate_up", "down"):
            setattr(self, name, _Linear(getattr(source, name)))
        self.input_norm, self.mlp_norm = _norm(source.input_norm), _norm(source.mlp_norm)
        norms = source.qk_norm
        self.qk_norm = None if norms is None else nn.ModuleList(map(_norm, norms))
        self.activation = copy.deepcopy(source.activation)
        self.dim, self.scale, self.heads = source.dim, source.scale, source.heads
        self.qk_heads = source.qk_heads


class _Layers(nn.Module):
    """Decoder layers and final norm with the cache as an argument."""

    def __init__(self, fused: Fused) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(_Layer, fused.layers))
        self.norm = _norm(fused.norm)

    @override
    def forward(
        self, x: Tensor, angles: Tensor, mask: Tensor, index: Tensor, parts: Sequence[Tensor]
    ) -> list[Tensor]:
        """Run the layers on new slots.

        Args:
            x: (B, n, D) embeddings.
            angles: (B, n, 2, 1, dim).
            mask: (B, 1, n, width) additive.
            index: (B * n,) new slots; see `RowStore.parts`.
            parts: keys and values of each layer, (B, capacity, kv_heads * dim); changed in place.

        Returns:
            (B, n, D) output of the norm, then the input of each layer.
        """
        width, inputs = mask.shape[-1], []
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            inputs.append(x)
            q, *new = layer.project(x, angles)
            k, v = (
                _written(part, values, index)[:, :width].unflatten(-1, (-1, layer.dim)).transpose(1, 2)
                for part, values in zip(parts[2 * i : 2 * i + 2], new, strict=True)
            )  # (B, kv_heads, width, dim)
            x = layer.add_mlp(layer.add_attention(x, attend_folded(q, k, v, mask, layer.scale)))
        return [self.norm(x), *inputs]


def _written(part: Tensor, new: Tensor, index: Tensor) -> Tensor:
    """Write (B, heads, n, dim) keys or values to (B, capacity, heads * dim)."""
    part.flatten(0, 1).index_copy_(0, index, new.transpose(1, 2).flatten(2).flatten(0, 1))
    return part


class _Compiled:
    """The compiled layers with the interface of `CompiledPass`."""

    def __init__(self, run: Run, size: int, most: int) -> None:
        self._run, self._size = run, size  # heads * dim of keys
        self.most = most

    def __call__(
        self, x: Tensor, angles: Tensor, mask: Tensor | None, store: RowStore, inputs: dict[int, Tensor]
    ) -> Tensor:
        rows, new = x.shape[:2]
        if mask is None:  # a single token that sees everything
            mask = x.new_zeros(rows, 1, new, store.width)
        parts, index = store.parts(self._size, x)
        # Compiled code assumes contiguous tensors.
        last, *read = self._run(x.contiguous(), angles.contiguous(), mask.contiguous(), index, list(parts))
        for layer in inputs:
            inputs[layer] = read[layer]
        return last


def compiled_pass(fused: Fused) -> tuple[CompiledPass | None, str]:
    """Compile the layers of a model, or load the compiled file.

    Processes that call this at the same time wait for the one that compiles.

    Returns:
        The compiled pass and ""; or None and the reason.
    """
    weight = fused.norm.weight
    if weight.device.type != "cpu":
        return None, "passes are compiled only on a CPU"
    first = fused.layers[0]
    size = (first.qk_heads - first.heads) * first.dim
    folder = cache_folder() / "compiled"
    file = folder / f"{_key(fused)}.pt2"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(file.with_suffix(".lock")):
            run = _read(file)
            if run is None:
                if reason := missing_compiler(weight.device):
                    return None, reason
                _write(fused, file)
                run = _read(file)
        if run is None:
            return None, f"{file} cannot be read"
        compiled = _Compiled(run, size, MOST_TOKENS if _slow(weight) else sys.maxsize)
        difference = _difference(fused, compiled)
    # Compilers and a full disk raise errors of any type.
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return None, f"the compiler failed ({lines[0][:200]})"
    if not difference <= TOLERANCE.get(weight.dtype, HALF_TOLERANCE):  # NaN, too
        return None, f"compiled and uncompiled passes differ by {difference:.2g}"
    return compiled, ""


def missing_compiler(device: torch.device) -> str:
    """What to install before code for a device can be compiled; "" if nothing."""
    compiler = os.environ.get("CXX", "g++")
    if device.type != "cpu" or shutil.which(compiler):
        return ""
    return f"no C++ compiler ({compiler}); install one or set CXX"


def _key(fused: Fused) -> str:
    """Hash of everything that the compiled code depends on, including weights."""
    facts: list[Any] = [
        hardware(torch.device("cpu")),
        torch.__version__,
        os.environ.get("ONEDNN_MAX_CPU_ISA"),
    ]
    facts += [
        Path(module.__file__ or "").read_text()
        for module in (sys.modules[__name__], fused_forward, attention)
    ]
    facts.append(_options(fused))
    for layer in fused.layers:
        norms = [layer.input_norm.eps, layer.mlp_norm.eps]
        facts.append([layer.dim, layer.scale, layer.heads, layer.qk_heads, repr(layer.activation), *norms])
    digest = hashlib.sha256(json.dumps(facts).encode())
    for weight in compiled_weights(fused):
        digest.update(f"{weight.dtype} {list(weight.shape)}".encode())
        digest.update(weight.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:24]


def _options(fused: Fused) -> dict[str, Any]:
    """New dict of compiler options; the compiler adds to it."""
    return OPTIONS | (OWN_PRODUCTS if _slow(fused.norm.weight) else {})


def _slow(weight: Tensor) -> bool:
    """Whether the processor is slow in the dtype of a weight already with a few rows."""
    return product_dtype(weight.dtype, weight.device, MOST_TOKENS) != weight.dtype


def compiled_weights(fused: Fused) -> Iterator[Tensor]:
    """Weights that are constants of the compiled code."""
    for layer in fused.layers:
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
            yield from (part for part in linear if part is not None)
        yield from (norm.weight for norm in (layer.input_norm, layer.mlp_norm, *(layer.qk_norm or ())))
    yield fused.norm.weight


def _read(file: Path) -> Run | None:
    """Load a compiled file; None if it is missing or damaged."""
    if not file.is_file():
        return None
    try:
        return _inductor.aoti_load_package(str(file))
    except (RuntimeError, OSError, ValueError):  # damaged
        return None


def _write(fused: Fused, file: Path) -> None:
    print(f"compiling the target's forward pass, once, for minutes, into {file}", file=sys.stderr, flush=True)
    rows, slots, width, capacity = Dim("rows"), Dim("slots"), Dim("width"), Dim("capacity")
    x, angles, mask, index, parts = _example(fused, 2, 5)
    sizes = {0: rows, 1: slots}
    dynamic = (
        sizes,
        sizes,
        {0: rows, 2: slots, 3: width},
        {0: Dim.AUTO},
        [{0: rows, 1: capacity}] * len(parts),
    )
    temporary = TemporaryDirectory(prefix="compiling-", dir=file.parent)  # it also holds the weights
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        temporary as name,
        compiler_folder(folder := Path(name)),
    ):
        graph = export(
            _Layers(fused).eval(), (x, angles, mask, index, parts), dynamic_shapes=dynamic, strict=False
        )
        whole = str(folder / file.name)
        _inductor.aoti_compile_and_package(graph, package_path=whole, inductor_configs=_options(fused))
        Path(whole).replace(file)


@contextmanager
def compiler_folder(folder: Path) -> Iterator[None]:
    """Let the compiler keep its own files in a folder."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _example(fused: Fused, rows: int, new: int) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Arguments of `_Layers.forward`: `new` slots from slot 3 on, after random settled ones."""
    layer, weight = fused.layers[0], fused.norm.weight
    dice, capacity = torch.Generator().manual_seed(0), 2 * new + 8

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=dice, dtype=torch.float64).to(weight.dtype)

    size = (layer.qk_heads - layer.heads) * layer.dim
    turn = draw(rows, new, 1, 1, layer.dim)
    index = torch.arange(rows)[:, None] * capacity + torch.arange(3, 3 + new)  # (B, n)
    mask = torch.zeros(rows, 1, new, 3 + new, dtype=weight.dtype)
    parts = [draw(rows, capacity, size) for _ in range(2 * len(fused.layers))]
    return draw(rows, new, len(weight)), torch.cat([turn.cos(), turn.sin()], 2), mask, index.flatten(), parts


@torch.inference_mode()
def _difference(fused: Fused, compiled: CompiledPass) -> float:
    """Root mean square error of the compiled pass, relative to its outputs, over a few passes."""
    expected, found = (_outputs(fused, passes) for passes in (None, compiled))
    return float((found - expected).norm() / expected.norm())


def _outputs(fused: Fused, compiled: CompiledPass | None) -> Tensor:
    """Outputs for two rows that read four slots, then one, then three."""
    fused.compiled, start, outputs = compiled, 0, []
    store = RowStore(len(fused.layers), 2, 16)
    tokens, dtype = torch.arange(16).view(2, 8) % len(fused.embed.weight), fused.norm.weight.dtype
    for new in (4, 1, 3):
        store.begin(new)
        positions = torch.arange(start, start + new).expand(2, -1)
        mask = torch.full((2, 1, new, start + new), torch.finfo(dtype).min, dtype=dtype).triu(start + 1)
        outputs.append(fused(positions, mask, store, {}, input_ids=tokens[:, start : start + new]))
        store.keep([new, new])
        start += new
    fused.compiled = None
    return torch.cat(outputs, 1).double()


def _parameter(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach(), requires_grad=False)


def _norm(source: Norm) -> nn.RMSNorm:
    with torch.device("meta"):
        norm = nn.RMSNorm(len(source.weight), source.eps)
    norm.weight = _parameter(source.weight)
    return norm
