"""Faster imports of large packages."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from types import ModuleType


def import_uncollected(name: str) -> ModuleType:
    """Import a module in a process that keeps it until its end.

    Imports allocate millions of objects that stay, and the garbage collector visits them again and again:
    a quarter of the time of importing torch, transformers and Lightning. So it pauses, and never visits
    what was imported.
    """
    if name in sys.modules:
        return sys.modules[name]
    enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
