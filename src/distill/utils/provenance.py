"""Provenance of results: commit and digests."""

from __future__ import annotations

import hashlib
import subprocess
from importlib.metadata import PackageNotFoundError, version

from distill.utils.paths import ROOT

PACKED = "COMMIT"  # file in a copy of a clone without its history, such as scripts/gpu.py pack makes


def commit() -> str:
    """Commit of this checkout (with -dirty) or of the one it was copied from, else the installed version."""
    if (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            pass
    elif (ROOT / PACKED).is_file():
        return (ROOT / PACKED).read_text().strip()
    try:
        return version("foredraft")
    except PackageNotFoundError:
        return "unknown"


def digest(text: str) -> str:
    """Short hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
