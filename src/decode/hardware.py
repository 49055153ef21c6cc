"""Name and memory of the hardware, and the cache folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup/memory.max")  # memory limit of the container


def hardware(device: torch.device) -> str:
    """Name of the GPU, or model and core count of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
    name = facts.get("model name") or platform.processor() or platform.machine()
    kind = f"family {facts.get('cpu family', '?')}, model {facts.get('model', '?')}"
    return f"{name} ({kind}), {os.cpu_count()} cores"


def memory_bytes(device: torch.device) -> int:
    """Memory of the device in bytes; on a CPU the smallest limit of machine, container and process."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):  # no container, or "max"
        limits.append(int(CGROUP.read_text()))
    address = resource.getrlimit(resource.RLIMIT_AS)[0]
    return min(limits + [address] * (address != resource.RLIM_INFINITY))


def cache_folder() -> Path:
    """Folder for data about models and this machine that is kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "foredraft"


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold a file lock, released when the process ends; False: it is taken, and `wait` is not set."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
