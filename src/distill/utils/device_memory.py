"""How much memory a device has."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup/memory.max")  # memory limit of the container


def available(device: torch.device) -> int:
    """Memory of the device in bytes; on a CPU the least limit of machine, container and process."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):  # no container, or "max"
        limits.append(int(CGROUP.read_text()))
    address = resource.getrlimit(resource.RLIMIT_AS)[0]
    return min(limits + [address] * (address != resource.RLIM_INFINITY))
