"""Provenance of results: commit and digests."""

from __future__ import annotations

import hashlib
import subprocess
from importlib.metadata import PackageNotFoundError, version

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


def digest(text: str) -> str:
    """Short hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
