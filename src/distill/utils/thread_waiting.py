"""How threads of OpenMP wait for one another: passively, unless the user says otherwise.

By default they spin at every barrier. Next to other processes that takes the cores from those that work: with
two threads and two busy processes rollouts take several times as long. Passive threads sleep instead, which
costs little on a machine of one's own. The variables are read once, when torch loads its library.
"""

from __future__ import annotations

import os
import sys

NAME, PASSIVE = "OMP_WAIT_POLICY", "PASSIVE"
OTHERS = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # by which users say it to one library of OpenMP
_set = {"by_us": False}


def wait_passively() -> None:
    """Choose it for this process and those that it starts, unless torch is there or the user chose."""
    if "torch" not in sys.modules and not any(name in os.environ for name in (NAME, *OTHERS)):
        os.environ[NAME] = PASSIVE
        _set["by_us"] = True


def described() -> str:
    """What was chosen, for records: "" where nothing was."""
    said = [f"{name}={os.environ[name]}" for name in (NAME, *OTHERS) if name in os.environ]
    return ", ".join(said)


def chosen_here() -> dict[str, str]:
    """Variables that this process has chosen, and its user has not."""
    return {NAME: PASSIVE} if _set["by_us"] else {}
