"""Which of two computations is faster on this machine: measured once and cached on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decode.hardware import cache_folder, hardware

REPEATS = 7


def remembered(kind: str, measure: Callable[..., float], dtype: torch.dtype, *shape: int) -> float:
    """Result of `measure(dtype, *shape)` on this machine; 0 if torch lacks an operation.

    Cached by kind, machine, thread count, version, dtype and shape, so that later runs make the same
    choice and the same rounding errors.
    """
    facts = [hardware(torch.device("cpu")), torch.get_num_threads(), torch.__version__, str(dtype)]
    key = hashlib.sha256(json.dumps([*facts, *shape, os.environ.get("ONEDNN_MAX_CPU_ISA")]).encode())
    memory = cache_folder() / kind / f"{key.hexdigest()[:24]}.json"
    try:
        return float(json.loads(memory.read_text()))
    except (OSError, TypeError, ValueError):  # not measured yet, or damaged
        pass
    try:
        found = measure(dtype, *shape)
    # Torch lacks oneDNN or the private operators, or the processor lacks the dtype.
    except (AttributeError, NotImplementedError, RuntimeError):
        found = 0.0
    with contextlib.suppress(OSError):  # the cache is not writable: measure in every process
        memory.parent.mkdir(parents=True, exist_ok=True)
        whole = memory.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(found))
        whole.replace(memory)
    return found


def time_ratio(one: Sequence[Callable[[], Tensor]], other: Sequence[Callable[[], Tensor]]) -> float:
    """CPU time of one sequence of calls over another's."""
    ratios = []
    for _ in range(REPEATS):  # interleaved, so that other load slows both
        begin = time.thread_time()  # excludes time of other processes
        for call in one:
            call()
        middle = time.thread_time()
        for call in other:
            call()
        ratios.append((middle - begin) / (time.thread_time() - middle))
    return statistics.median(ratios)
