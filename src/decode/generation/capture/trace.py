"""A round as a list of operations on tensors: traced once, without the host."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

# private API: the place where make_fx looks for a mode to describe results in, before it makes one for each.
from torch._guards import TracingContext, tracing

# private API: that mode.
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

# private API: the documented way to see every operation.
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from decode import transfer
from decode.generation.capture.state import NotCapturedError, clones
from decode.transfer import HostReadError

# Operations that read the device, or have shapes that depend on data.
READS = {
    "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "item", "bincount",
    "unique_consecutive", "unique_dim",
}  # fmt: skip
UPLOADS = {"lift_fresh", "lift_fresh_copy"}
SOURCE = Path(__file__).resolve().parents[2]

Function = Callable[..., Any]


class RefuseHost(TorchDispatchMode):
    """Refuses operations that a graph cannot repeat, with the line that they come from."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1]
        )
        if masks or name in READS:
            raise NotCapturedError(f"reads the device ({name}) in {_place()}")
        if name in UPLOADS:
            raise NotCapturedError(f"uploads numbers in {_place()}")
        return func(*args, **(kwargs or {}))


@contextmanager
def refused_reads() -> Iterator[None]:
    """Turn a read of numbers that only the device knows into `NotCapturedError`, with its line."""
    try:
        yield
    except HostReadError as error:
        place = _place(traceback.extract_tb(error.__traceback__))
        raise NotCapturedError(f"reads the device in {place}") from error


def _place(frames: Sequence[traceback.FrameSummary] | None = None) -> str:
    """File and line of the newest frame outside of torch and of what refuses: a package's, or this one's."""
    refusing, torch_files = {__file__, transfer.__file__}, Path(torch.__file__).parent
    for frame in reversed(frames or traceback.extract_stack()):
        file = Path(frame.filename)
        if frame.filename in refusing or torch_files in file.parents:
            continue
        for root in (SOURCE, torch_files.parent):
            if root in file.parents:
                return f"{file.relative_to(root)}:{frame.lineno}"
    return "unknown code"


def trace(
    function: Function, arguments: Sequence[Tensor], replacements: dict[Any, Function] | None = None
) -> fx.GraphModule:
    """Trace a function of tensors, which stay as they are.

    Tables that are made at a first call must exist.

    Args:
        function: of tensors.
        arguments: its arguments.
        replacements: operations, and functions that are traced in place of them.

    Raises:
        NotCapturedError: it reads the device or uploads numbers.
    """
    with RefuseHost(), refused_reads():
        function(*clones(arguments))
    with tracing(TracingContext(FakeTensorMode())):
        module = make_fx(function, replacements, tracing_mode="real")(*clones(arguments))
    return folded(module)


def folded(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph with results that depend on no argument computed once, and unused ones left out."""
    module = fx.GraphModule(module, copy.deepcopy(module.graph))
    graph, written = module.graph, _written(module.graph)
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node in written:
            continue
        if node.op == "get_attr":
            values[node] = getattr(module, node.target)
        elif node.op == "call_function" and all(part in values for part in node.all_input_nodes):
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    for count, (node, value) in enumerate(values.items()):
        used = any(user not in values for user in node.users)
        if node.op == "call_function" and isinstance(value, Tensor) and used:
            name = f"constant_{count}"
            module.register_buffer(name, value)
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.get_attr(name), lambda user: user not in values)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op in ("call_function", "get_attr") and not _writes(node):
            graph.erase_node(node)
    graph.lint()
    module.recompile()
    return module


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that are changed in place, also through a view, and those that change them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if not _writes(node):
            continue
        found.add(node)
        changed = node.all_input_nodes[0]
        found.add(changed)
        while _is_view(changed):
            changed = changed.all_input_nodes[0]
            found.add(changed)
    return found


def _schema(node: fx.Node) -> Any:
    """Types of an operation's arguments, and which of them it changes; None for other nodes."""
    # private API: torch has no public way to ask which arguments an operation changes.
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def _writes(node: fx.Node) -> bool:
    schema = _schema(node)
    return schema is not None and schema.is_mutable


def _is_view(node: fx.Node) -> bool:
    schema = _schema(node)
    if schema is None or not node.all_input_nodes:
        return False
    return any(argument.alias_info for argument in schema.arguments[:1])
