"""Name of the hardware, for reports of measurements."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


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
