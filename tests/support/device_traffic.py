"""Counts uploads, reads and synchronisations of a CUDA device on a CPU, by call site.

Within `Traffic` tensors say that they are on `cuda:0`, unless they were made on the host. An operation on
tensors of both is an error, as it is there.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from workbench import ROOT

CUDA = torch.device("cuda", 0)
SOURCE = str(ROOT / "src") + "/"
UPLOAD, READ, SYNCHRONISATION = "upload", "read", "synchronisation"

_FROM_DATA = {"tensor", "as_tensor", "asarray", "new_tensor"}
_FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "zeros"}
_FACTORIES |= {"rand", "randint", "randn", "randperm"}
# Only the device knows their size or value.
_READS = {
    *("item", "tolist", "numpy", "cpu", "__array__", "__contains__", "is_nonzero", "equal", "allclose"),
    *("__bool__", "__int__", "__float__", "__index__", "nonzero", "argwhere", "masked_select", "bincount"),
    *("unique", "_unique2", "unique_consecutive", "_return_output", "_return_inverse", "histc"),
}
_MOVES = {"to", "copy_", "type_as", "__getitem__", "__setitem__"}  # may take tensors of both


class Traffic(TorchFunctionMode):
    """Counts while it is entered.

    Attributes:
        sites: Counter of (kind, `file:line` of the innermost frame in src).
    """

    def __init__(self) -> None:
        super().__init__()
        self.sites: Counter[tuple[str, str]] = Counter()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self):
        from_numpy, iterate, generator = torch.from_numpy, Tensor.__iter__, torch.Generator
        self._patch.setattr(torch, "Generator", lambda *_: generator())
        self._patch.setattr(torch, "from_numpy", lambda array: _mark(from_numpy(array), host=True))
        self._patch.setattr(torch.cuda, "synchronize", lambda *_: self.count(SYNCHRONISATION))

        def iterated(tensor: Tensor):
            if not _on_host(tensor):
                self.count(READ)
            return iterate(tensor)

        self._patch.setattr(Tensor, "__iter__", iterated)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def count(self, kind: str) -> None:
        """Count one at the innermost frame in src; nothing outside src."""
        frame = sys._getframe(1)
        while frame is not None and not _is_caller(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            site = f"{frame.f_code.co_filename.removeprefix(SOURCE)}:{frame.f_lineno}"
            self.sites[kind, site] += 1

    def take(self) -> Counter[tuple[str, str]]:
        """Return the counts so far and start again."""
        sites, self.sites = self.sites, Counter()
        return sites

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func == Tensor.device.__get__:
            return torch.device("cpu") if _on_host(args[0]) else CUDA
        if func == Tensor.is_cuda.__get__:
            return not _on_host(args[0])
        name = func.__name__
        if name == "pin_memory":  # needs a driver
            return args[0]
        tensors = [t for t in _flat((args, kwargs)) if isinstance(t, Tensor)]
        on_device = any(not _on_host(t) for t in tensors)
        if on_device and name not in _MOVES:
            stray = [t for t in tensors if _on_host(t) and t.dim()]
            assert not stray, f"{name}: an operand is on the host and another on the device"
        place = torch.device("cpu") if name == "cpu" else CUDA if name == "cuda" else _place(args, kwargs)
        self._observe(name, args, kwargs, on_device, place)
        result = func(*map(_on_cpu, args), **{k: _on_cpu(v) for k, v in kwargs.items()})
        if name == "copy_":
            return result
        by_name = name in _FACTORIES or name in _FROM_DATA or name in ("to", "cpu", "cuda")
        host = (
            place.type == "cpu"
            if by_name and place is not None
            else bool(tensors or by_name) and not on_device
        )
        if tensors and result is tensors[0] and host != _on_host(result):
            result = result.view(
                result.shape
            )  # a move that copies nothing on a CPU leaves its input as it is
        for tensor in _flat(result):
            if isinstance(tensor, Tensor):
                _mark(tensor, host)
        return result

    def _observe(self, name: str, args: Any, kwargs: Any, on_device: bool, place: Any) -> None:
        """Count what one call moves."""
        if name in _FROM_DATA:
            to_device = place.type == "cuda" if place is not None else on_device
            if to_device and not any(isinstance(a, Tensor) for a in args[name == "new_tensor" :]):
                self.count(UPLOAD)
        elif name in ("to", "cuda"):
            if place is not None and (place.type == "cuda") == _on_host(args[0]):
                self.count(UPLOAD if place.type == "cuda" else READ)
        elif name == "copy_" and _on_host(args[0]) != _on_host(args[1]):
            self.count(READ if _on_host(args[0]) else UPLOAD)
        elif name in ("__getitem__", "__setitem__") and not _on_host(args[0]):
            self._index(args[1], scalar=name == "__setitem__" and not isinstance(args[2], Tensor))
        elif on_device and (name in _READS or _has_unknown_size(name, args, kwargs)):
            self.count(READ)

    def _index(self, index: Any, scalar: bool) -> None:
        """Count what indexing a tensor on the device costs; a scalar is written through a mask."""
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, (list, np.ndarray)) or (isinstance(part, Tensor) and _on_host(part)):
                self.count(UPLOAD)
            elif isinstance(part, Tensor) and part.dtype == torch.bool and not scalar:
                self.count(READ)


def _has_unknown_size(name: str, args: Any, kwargs: Any) -> bool:
    if name == "repeat_interleave":
        return isinstance(args[-1], Tensor) and "output_size" not in kwargs
    return name == "where" and len(args) == 1


def _is_caller(file: str) -> bool:
    return file.startswith(SOURCE) and file != f"{SOURCE}decode/transfer.py"


def _on_host(tensor: Tensor) -> bool:
    return getattr(tensor, "made_on_host", False)


def _mark(tensor: Tensor, host: bool) -> Tensor:
    tensor.made_on_host = host  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [leaf for part in value if not isinstance(part, (int, float)) for leaf in _flat(part)]
    return [value]


def _place(args: Any, kwargs: Any) -> torch.device | None:
    """The device that a call names, or that of a tensor given to `to`; None if it names none."""
    for value in (kwargs.get("device"), *args):
        if isinstance(value, torch.device):
            return value
        if isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda"):
            return torch.device(value)
    others = [a for a in args[1:] if isinstance(a, Tensor)] if args and isinstance(args[0], Tensor) else []
    return None if not others else torch.device("cpu") if _on_host(others[0]) else CUDA


def _on_cpu(value: Any) -> Any:
    named = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
    return torch.device("cpu") if named else value
