"""Memory of a device: how much there is, what this process holds of it and has held, what operations make."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from typing_extensions import override

GIB, MIB = 2**30, 2**20
PROCESS = Path("/proc/self")
CGROUP = Path("/sys/fs/cgroup/memory.max")  # of a container, as it sees itself


def said(count: float) -> str:
    """Bytes, for people."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def held(device: torch.device) -> int:
    """Bytes that this process holds now; on a CPU all of it, Python and libraries included."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS") or _peak_resident()


def peak(device: torch.device) -> int:
    """The most bytes held since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM") or _peak_resident()


def reset_peak(device: torch.device) -> None:
    """Begin anew; where the system cannot (macOS), a peak is that of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            (PROCESS / "clear_refs").write_text("5")


def available(device: torch.device) -> int:
    """Bytes that the device has; on a CPU what the machine, the container and the process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):  # no container, or "max"
        limits.append(int(CGROUP.read_text()))
    address = resource.getrlimit(resource.RLIMIT_AS)[0]
    return min(limits + [address] * (address != resource.RLIM_INFINITY))


def _peak_resident() -> int:
    """Of the process since it began: KiB, on macOS bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(field: str) -> int:
    """Bytes, from the kernel's own account; 0 where there is none."""
    try:
        lines = (PROCESS / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors on this rank: of one that is sharded (FSDP2, ZeRO-3) its own part."""
    local = [t.to_local() if isinstance(t, DTensor) else getattr(t, "ds_tensor", t) for t in tensors]
    return sum(t.numel() * t.itemsize for t in local)


class Made(TorchDispatchMode):
    """Within it: bytes that operations make and that something still holds.

    What was there before, weights say, does not count, nor does what one kernel uses inside of itself.

    Attributes:
        now: bytes.
        peak: the most there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_leaves((args, kwargs)):
            self._meet(given, False)
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            self._meet(made, True)
        return out

    def _meet(self, value: Any, made: bool) -> None:
        if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
            return
        storage = value.untyped_storage()
        key, count = storage._cdata, storage.nbytes() * made
        if key in self._known:
            return

        def gone(_: Any) -> None:
            del self._known[key]
            self.now -= count

        self._known[key] = weakref.ref(storage, gone)
        self.now += count
        self.peak = max(self.peak, self.now)
