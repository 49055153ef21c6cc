"""Where numbers come from."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from omegaconf import DictConfig

from decode.hardware import hardware
from decode.model.target import Target
from distill.utils.paths import ROOT


def commit() -> str:
    """Commit of this checkout (with -dirty), else the installed version."""
    if (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            pass
    try:
        return version("foredraft")
    except PackageNotFoundError:
        return "unknown"


def conditions(cfg: DictConfig, target: Target, threads: int, load: Sequence[float]) -> dict[str, Any]:
    """What a benchmark was run on and with, as its file records it."""
    return {
        "temperature": cfg.temperature,
        "max_new_tokens": cfg.score.max_new_tokens,
        "repeats": cfg.score.repeats,
        "target": cfg.target.path,
        "checkpoint": cfg.checkpoint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": threads,
        "hardware": hardware(target.device),
        "load_average": load,
        "seed": cfg.seed,
        "commit": commit(),
    }


def digest(text: str) -> str:
    """Short hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
