"""Locate conf/ and data/: inside the package `foredraft` of a wheel, or at the top of a clone."""

from __future__ import annotations

from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]  # src/ of a clone, site-packages of an installed wheel
PACKAGE = SOURCE / "foredraft"
ROOT = PACKAGE if (PACKAGE / "conf").is_dir() else SOURCE.parent
CONF = ROOT / "conf"


def bundled(path: str) -> str | Path:
    """The path if it exists, else the bundled file or folder of this name (`data/pocket`)."""
    shipped = ROOT / path
    return shipped if not Path(path).exists() and shipped.exists() else path
