"""What a device does at most, the host's waits for it, operations started on it, and kernels that run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.autograd import DeviceType

# private API: the documented way to see every operation, and to walk its arguments.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

# Dense bf16 by NVIDIA's data sheets, in FLOP/s; the first name that is part of the card's
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
}
# Calls by which the host reads the device, and waits for it
READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__")
# Operations that start no kernel; views do not either
WITHOUT_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view"}
# Operations that read only the rows or numbers that they return
CHOOSING = {"embedding", "gather", "index", "index_select"}
SIDE = {"cuda": 8192, "cpu": 256}  # of the square matrices of a product
BYTES = {"cuda": 2**32, "cpu": 2**24}  # that are copied


def synchronize(device: torch.device) -> None:
    """Wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def named_peak(name: str) -> float | None:
    """FLOP/s of dense bf16 products by the card's data sheet; None for another card."""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def seconds_of(body: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median seconds of a call, after three that are not counted."""
    for _ in range(3):
        body()
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        begin = time.perf_counter()
        body()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def ceilings(device: torch.device) -> dict[str, float]:
    """FLOP/s of a large bf16 product, and bytes a second that a copy reads and writes, on random data."""
    side = SIDE[device.type]
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    product = seconds_of(lambda: torch.mm(left, right, out=out), device, 10)
    source = torch.randn(BYTES[device.type] // 4, device=device)
    copy = torch.empty_like(source)
    copied = seconds_of(lambda: copy.copy_(source), device, 10)
    return {"bf16_flops": 2 * side**3 / product, "copy_bytes": 2 * source.nbytes / copied}


@dataclass
class Waits:
    """Reads of the device by the host, and the seconds that they waited."""

    reads: int = 0
    seconds: float = 0.0


@contextmanager
def waits(device: torch.device) -> Iterator[Waits]:
    """Count what the host reads of the device in this block; its other time is the host's own.

    Before a read the device finishes its work, and that time is counted. Python's calls are seen, so are
    `Event.synchronize` and `torch.cuda.synchronize`; reads inside of torch's own functions are not.
    """
    found, inside = Waits(), [False]

    def counted(call: Callable[..., Any], waits_itself: bool) -> Callable[..., Any]:
        @wraps(call)
        def timed(*given: Any, **named: Any) -> Any:
            elsewhere = (
                bool(given) and isinstance(given[0], torch.Tensor) and given[0].device.type != device.type
            )
            if inside[0] or elsewhere:
                return call(*given, **named)
            inside[0], found.reads, begin = True, found.reads + 1, time.perf_counter()
            try:
                if waits_itself:
                    return call(*given, **named)
                synchronize(device)
            finally:
                found.seconds += time.perf_counter() - begin
                inside[0] = False
            return call(*given, **named)

        return timed

    places: list[tuple[Any, str, bool]] = [(torch.Tensor, name, False) for name in READS]
    if device.type == "cuda":
        places += [(torch.cuda.Event, "synchronize", True), (torch.cuda, "synchronize", True)]
    with _replaced(places, counted):
        yield found


@contextmanager
def _replaced(places: list[tuple[Any, str, bool]], by: Callable[..., Any]) -> Iterator[None]:
    """Replace attributes of classes and modules, inherited ones too, until the block ends."""
    own = [vars(holder).get(name) for holder, name, _ in places]
    for holder, name, waits_itself in places:
        setattr(holder, name, by(getattr(holder, name), waits_itself))
    try:
        yield
    finally:
        for (holder, name, _), before in zip(places, own, strict=True):
            if before is None:
                delattr(holder, name)
            else:
                setattr(holder, name, before)


class Operations(TorchDispatchMode):
    """Counts torch's operations while it is entered: about the kernels that the host starts.

    Operations made of others count as these, as in a trace; views do not count.

    Attributes:
        count: so far. What a CUDA graph repeats is not in it.
        bytes: of the tensors that they read and write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in WITHOUT_KERNEL:
            self.count += 1
            given = args[1:] if func.overloadpacket.__name__ in CHOOSING else args
            tensors = tree_leaves((given, kwargs, result))
            self.bytes += sum({id(t): t.nbytes for t in tensors if isinstance(t, torch.Tensor)}.values())
        return result


def kernels(body: Callable[[], Any], device: torch.device) -> tuple[int, float] | None:
    """Kernels that a call runs on a card, and their seconds; None on a CPU."""
    if device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        body()
        torch.cuda.synchronize(device)
    events: Any = profile.events()
    ran = [
        e for e in events if e.device_type == DeviceType.CUDA and not e.name.startswith(("Memcpy", "Memset"))
    ]
    return len(ran), sum(event.device_time for event in ran) / 1e6
