"""Make threads of OpenMP wait passively, unless the user chose otherwise.

By default, they spin at every barrier, which takes cores from other processes and can slow rollouts down
several times. Passive threads sleep instead, at little cost on an idle machine. The variables are read once,
when torch loads its library; `scripts/lab/benchmark.py waiting` measures them.
"""

from __future__ import annotations

import os
import sys

CHOSEN = {"OMP_WAIT_POLICY": "PASSIVE"}
NAMES = (*CHOSEN, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # the last two are settings of single OpenMP libraries
_set = {"by_us": False}


def wait_passively() -> None:
    """Choose passive waiting for this process and its children, unless torch is loaded or the user chose."""
    if "torch" not in sys.modules and not any(name in os.environ for name in NAMES):
        os.environ.update(CHOSEN)
        _set["by_us"] = True


def described() -> str:
    """The waiting policy, for records; "" if none was chosen."""
    return ", ".join(f"{name}={os.environ[name]}" for name in NAMES if name in os.environ)


def chosen_here() -> dict[str, str]:
    """Variables that this process set, and the user did not."""
    return dict(CHOSEN) if _set["by_us"] else {}
