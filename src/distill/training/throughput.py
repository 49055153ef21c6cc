"""Log training throughput over the steps since the last log line, as train/<name>.

`tokens_per_second` and `supervised_per_second` (anchors) count all ranks and no padding; `step_seconds` is
the time of a step, `data_wait` the share of it spent waiting for batches, `peak_gib` this rank's memory in
GiB. `mfu` (PaLM, arXiv:2204.02311, appendix B) is the FLOP of matrix products, as torch's `FlopCounterMode`
counts them in one step, target included, over the device's peak by Lightning's table; no peak, no `mfu`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from distill.data.datamodule import rollout_data
from distill.training.memory import GIB, MemoryWatch
from distill.utils.phase_log import PhaseLog

Shape = Sequence[int]


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """FLOP of attention: each query head by all keys, and back by all values."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[-2] * (width + value[-1])


def _attention_backward(_gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """FLOP of its gradients: scores once more, and those of scores, values, queries and keys."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[-2] * (3 * width + 2 * value[-1])


# Before 2.13 torch's own formulas raise an error where several query heads share a key head.
ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{suffix}"): formula
    for kernel in ("flash", "efficient", "cudnn")
    for suffix, formula in (("", _attention), ("_backward", _attention_backward))
}


class StepTiming(NamedTuple):
    """Time and size of one optimizer step.

    Attributes:
        data_seconds: waiting for batches.
        compute_seconds: from there to the end of the step.
        tokens: of its rows, over all ranks, without padding.
        anchors: supervised anchors, over all ranks.
    """

    data_seconds: float
    compute_seconds: float
    tokens: int
    anchors: int


class Throughput(L.Callback):
    """Logs tokens per second, seconds per step, the share spent waiting for data, peak memory and MFU.

    Averages over the steps since the last log line; saving, scoring and making rollouts do not count.
    Lightning's `ThroughputMonitor` synchronizes the device after every micro-batch, includes the time of
    saving, and needs the same FLOP for all batches. Here the clock is read where the step has already
    synchronized to check its loss.

    Must come before callbacks that save, and `resume` after them.

    Args:
        memory: measures peak memory.
        phases: is told of all steps, when the last one is done.
    """

    def __init__(self, memory: MemoryWatch, phases: PhaseLog) -> None:
        self.memory, self.phases = memory, phases
        self._done = {"steps": 0, "tokens": 0, "anchors": 0}  # by this process
        self._seconds = 0.0
        self.flops_per_token = 0.0  # FLOP of this rank over tokens of all ranks
        self._counter: FlopCounterMode | None = None
        self._data_seconds = self._compute_seconds = 0.0  # of the current step

    @property
    def resume(self) -> L.Callback:
        """Callback that restarts the clock after saving and scoring."""

        def restart(trainer: L.Trainer, *_: Any) -> None:
            self._start_clock(trainer)

        return LambdaCallback(on_train_start=restart, on_train_batch_end=restart)

    def _start_clock(self, trainer: L.Trainer) -> None:
        self._loading = _loading(trainer)
        self._now = time.perf_counter()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        options: Any = trainer  # Lightning sets some at run time, unknown to type checkers
        self._steps: deque[StepTiming] = deque(maxlen=max(1, options.log_every_n_steps))
        self._step = trainer.global_step
        device = pl_module.device
        self._available = get_available_flops(device, _dtype(str(trainer.precision)))
        self._start_clock(trainer)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self._data_seconds += now - self._now - (_loading(trainer) - self._loading)
        self._now = now
        if self._available and not self.flops_per_token and self._counter is None:
            self._counter = FlopCounterMode(display=False, custom_mapping=ATTENTION)
            self._counter.__enter__()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._compute_seconds += time.perf_counter() - self._now
        if trainer.global_step == self._step:
            return  # a micro-batch with more to come
        self._step = trainer.global_step
        tokens = rollout_data(trainer).batches.of(batch.step).tokens_of(batch.step)
        counted = self._count(tokens)
        timing = StepTiming(self._data_seconds, self._compute_seconds, tokens, batch.anchors)
        self._data_seconds = self._compute_seconds = 0.0
        if not counted:  # counting FLOP slows a step down
            self._steps.append(timing)
            self._seconds += timing.data_seconds + timing.compute_seconds
            for name, count in (("steps", 1), ("tokens", tokens), ("anchors", batch.anchors)):
                self._done[name] += count
        if self._steps:
            pl_module.log_dict({f"train/{name}": value for name, value in self._values().items()})

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.phases.add("training", self._seconds, **self._done, peak_bytes=self.memory.peak)

    def _values(self) -> dict[str, float]:
        waiting, computing, tokens, anchors = (sum(column) for column in zip(*self._steps, strict=True))
        seconds = waiting + computing
        values = {
            "tokens_per_second": tokens / seconds,
            "supervised_per_second": anchors / seconds,
            "step_seconds": seconds / len(self._steps),
            "data_wait": waiting / seconds,
            "peak_gib": self.memory.peak / GIB,
        }
        if self._available:
            values["mfu"] = self.flops_per_token * tokens / seconds / self._available
        return values

    def _count(self, tokens: int) -> bool:
        """Whether FLOP were counted in the finished step."""
        if self._counter is None:
            return False
        self._stop()
        self.flops_per_token = self._flops / tokens
        return True

    def _stop(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._flops, self._counter = self._counter.get_total_flops(), None

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._stop()


def _loading(trainer: L.Trainer) -> float:
    """Total seconds spent making and reading rollouts."""
    return rollout_data(trainer).batches.loading


def _dtype(precision: str) -> torch.dtype:
    """Of matrix products, by the trainer's precision."""
    names = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    return names.get(precision.partition("-")[0], torch.float32)
