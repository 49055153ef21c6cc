"""A process that trains when it is told to, in whatever environment it was started.

    python worker.py BUILDER.py

JSON lines over pipes. The first one in is the case; out comes what it is ready with. Then each
`{"steps": n}` is answered with the CPU seconds that n steps took. The end of the input ends it.

A builder is a file with `build(case) -> prepare` and `prepare(loss_mask) -> step`; a step is one
optimizer step on one text as long as the mask, and returns its loss. Nothing of foredraft is imported
here: the other side's environment does not have it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder: its file names are nobody else's modules

import ctypes
import gc
import json
import math
import os
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

PROCESS = Path("/proc/self")
WARM_UP = 64  # tokens: enough for every kernel to be loaded, and few compared with the measurement

Step = Callable[[], float]


def main(builder: str) -> None:
    """Serve until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no reply
    case = json.loads(sys.stdin.readline())
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(case["seed"])
    prepare = runpy.run_path(builder)["build"](case)
    step = _checked(prepare(case["loss_mask"]))
    _checked(prepare([1] * WARM_UP))()  # weights, gradients and the optimizer's state exist from here on
    peak = _peak_mib(step, case["device"]) if case["peak"] else None
    ready = {"peak_mib": peak, "torch": torch.__version__}
    _reply(replies, ready)
    for line in sys.stdin:
        steps = json.loads(line)["steps"]
        begin = time.process_time()
        for _ in range(steps):
            step()
        _reply(replies, {"cpu_seconds": time.process_time() - begin})


def _reply(replies: TextIO, value: dict[str, Any]) -> None:
    print(json.dumps(value), file=replies, flush=True)


def _checked(step: Step) -> Step:
    def run() -> float:
        loss = step()
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss is {loss}")
        return loss

    return run


def _peak_mib(step: Step, device: str) -> float:
    """Memory of one step above what stands before it: weights, gradients, optimizer state, inputs."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    ctypes.CDLL(None).malloc_trim(0)  # what the warm-up freed is not there for the step to reuse
    (PROCESS / "clear_refs").write_text("5")  # the highest mark starts again from what is resident now
    before = _resident("VmRSS")
    step()
    return (_resident("VmHWM") - before) / 1024


def _resident(field: str) -> int:
    """KiB, from the kernel's own account of this process."""
    lines = (PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main(sys.argv[1])
