"""How threads of the CPU wait for one another; imported before torch, which reads the variables once.

Threads of OpenMP spin at every barrier, which is fastest on an idle machine; `thread_spinning` has the rest.
"""

from __future__ import annotations

import os
import sys

CHOSEN = {"GOMP_SPINCOUNT": "10000"}  # as fast as libgomp's 300,000 on an idle machine, and less wasteful
NAMES = (*CHOSEN, "OMP_WAIT_POLICY", "KMP_BLOCKTIME")  # the others are settings of single OpenMP libraries
COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_set = {"by_us": False}


def spin_briefly() -> None:
    """Choose short spinning for this process and its children, unless torch is loaded or the user chose.

    The variables are read once, when torch loads its library.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in NAMES):
        os.environ.update(CHOSEN)
        _set["by_us"] = True


def described() -> str:
    """How threads wait, and their number if the user chose it, for records; "" if nothing was chosen."""
    return ", ".join(f"{name}={os.environ[name]}" for name in (*NAMES, *COUNTS) if name in os.environ)


def chosen_here() -> dict[str, str]:
    """Variables that this process set, and the user did not."""
    return dict(CHOSEN) if _set["by_us"] else {}
