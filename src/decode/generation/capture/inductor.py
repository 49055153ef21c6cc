"""Traced stages through Inductor, which fuses the operations between two products.

Weights are arguments of the compiled code and not part of it. So the code is small, and it is kept on disk
and used again for other weights of the same shapes, such as those of the next checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import torch

# private API: the documented way to compile a graph that was traced without TorchDynamo.
from torch import Tensor, _inductor, fx

from decode.generation.capture.state import NotCapturedError, clones
from decode.hardware import cache_folder
from decode.model.compiled_forward import compiler_folder, missing_compiler

Run = Callable[..., Sequence[Tensor]]

SOON = 2.0  # seconds of a compilation before it is said
OPTIONS = {"size_asserts": False, "alignment_asserts": False}  # shapes and addresses are fixed
PRODUCT = "foredraft::packed_product"

torch.library.define(PRODUCT, "(Tensor x, Tensor packed, Tensor? bias) -> Tensor")


@torch.library.impl(PRODUCT, "default")
def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """A product with a packed weight that Inductor calls as it is; its own rules want constant weights."""
    # private API: as in `packed_linear`.
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


@torch.library.register_fake(PRODUCT)
def _product_shape(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    del bias
    return x.new_empty(*x.shape[:-1], len(packed))


def packed_products() -> dict[Any, Callable[..., Tensor]]:
    """What a trace records in place of products with packed weights; for `make_fx`."""
    # private API: as in `packed_linear`; torch lacks it where it lacks oneDNN.
    linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if linear is None:
        return {}
    product = torch.ops.foredraft.packed_product

    def plain(x: Tensor, packed: Tensor, bias: Tensor | None, *_: object) -> Tensor:
        return product(x, packed, bias)

    def added(x: Tensor, residual: Tensor, packed: Tensor, bias: Tensor | None, _: str) -> Tensor:
        return product(x, packed, bias) + residual

    return {linear.default: plain, linear.binary: added}


def compiled(module: fx.GraphModule, arguments: Sequence[Tensor]) -> Run:
    """Compile a traced stage, or load its code from the cache; it changes its arguments as the module does.

    Raises:
        NotCapturedError: there is no compiler, or it fails.
    """
    if all(node.op != "call_function" for node in module.graph.nodes):
        return module  # a plain round drafts nothing
    if reason := missing_compiler(arguments[0].device):
        raise NotCapturedError(f"cannot be compiled: {reason}")
    module, held = _constants_as_arguments(module)
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with compiler_folder(folder()), _said_soon():
            code = _inductor.standalone_compile(
                module,
                [*clones(arguments), *held],
                dynamic_shapes="from_example_inputs",
                options={"config_patches": OPTIONS},
            )
    except Exception as error:  # compilers and a full disk raise errors of any type
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise NotCapturedError(f"cannot be compiled: the compiler failed ({lines[0][:200]})") from error

    def run(*given: Tensor) -> Sequence[Tensor]:
        return code(*given, *held)

    return run


def folder() -> Path:
    """Where compiled rounds are kept; the number of threads is part of the code."""
    return cache_folder() / "compiled" / f"rounds-{torch.get_num_threads()}"


@contextmanager
def _said_soon() -> Iterator[None]:
    """Print a line if it takes long."""
    line = f"compiling a captured round: up to two minutes, once; kept in {folder()}"
    timer = Timer(SOON, lambda: print(line, file=sys.stderr, flush=True))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _constants_as_arguments(module: fx.GraphModule) -> tuple[fx.GraphModule, list[Tensor]]:
    """The same graph with further arguments in place of the module's tensors, and these tensors."""
    graph, last = module.graph, [node for node in module.graph.nodes if node.op == "placeholder"][-1]
    places: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        node.meta.clear()  # example values, each of a mode of its own
        if node.op == "get_attr":
            if node.target not in places:
                with graph.inserting_after(last):
                    last = places[node.target] = graph.placeholder(f"held_{len(places)}")
            node.replace_all_uses_with(places[node.target])
            graph.erase_node(node)
    graph.lint()
    return fx.GraphModule({}, graph), [getattr(module, name) for name in places]
