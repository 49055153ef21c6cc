"""How fast training goes and what it waits for."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from distill.data.datamodule import served
from distill.training.memory import GIB, MemoryWatch


class Took(NamedTuple):
    """One optimizer step.

    Attributes:
        waited: seconds for its batches.
        worked: seconds from there to its end.
        tokens: of its rows, over all ranks, without padding.
        anchors: supervised ones, over all ranks.
    """

    waited: float
    worked: float
    tokens: int
    anchors: int


class Throughput(L.Callback):
    """Logs tokens a second, seconds a step, the share spent waiting for data, peak memory and MFU.

    Over the steps since the last line of the log; what lies between steps, saving and scoring, does not
    count, nor does making rollouts. Lightning's own `ThroughputMonitor` waits for the device after every
    micro-batch, counts what save points take and wants one number of operations for all batches. Here
    the clock is read where a step has waited for the device anyway, to check its loss.

    Comes before whatever saves, and `resume` behind it.

    Args:
        memory: measures it.
    """

    def __init__(self, memory: MemoryWatch) -> None:
        self.memory = memory
        self.flops_per_token = 0.0  # of this rank, by the tokens of all
        self._counter: FlopCounterMode | None = None
        self._waited = self._worked = 0.0  # of the step that is under way

    @property
    def resume(self) -> L.Callback:
        """The clock goes on from here."""
        return LambdaCallback(on_train_batch_end=lambda trainer, *_: self._wait(trainer))

    def _wait(self, trainer: L.Trainer) -> None:
        self._loading = _loading(trainer)
        self._now = time.perf_counter()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        options: Any = trainer  # Lightning adds some of them unknown to type checkers
        self._steps: deque[Took] = deque(maxlen=max(1, options.log_every_n_steps))
        self._step = trainer.global_step
        device = pl_module.device
        self._available = get_available_flops(device, _dtype(str(trainer.precision)))
        self._wait(trainer)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self._waited += now - self._now - (_loading(trainer) - self._loading)
        self._now = now
        if self._available and not self.flops_per_token and self._counter is None:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._worked += time.perf_counter() - self._now
        if trainer.global_step == self._step:
            return  # a micro-batch with more to come
        self._step = trainer.global_step
        tokens = served(trainer).batches.of(batch.step).tokens_of(batch.step)
        counted = self._count(tokens)
        took = Took(self._waited, self._worked, tokens, batch.anchors)
        self._waited = self._worked = 0.0
        if not counted:  # the step in which operations were counted took longer for it
            self._steps.append(took)
        if self._steps:
            pl_module.log_dict({f"train/{name}": value for name, value in self._values().items()})

    def _values(self) -> dict[str, float]:
        waited, worked, tokens, anchors = (sum(column) for column in zip(*self._steps, strict=True))
        seconds = waited + worked
        values = {
            "tokens_per_second": tokens / seconds,
            "supervised_per_second": anchors / seconds,
            "step_seconds": seconds / len(self._steps),
            "data_wait": waited / seconds,
            "peak_gib": self.memory.peak / GIB,
        }
        if self._available:
            values["mfu"] = self.flops_per_token * tokens / seconds / self._available
        return values

    def _count(self, tokens: int) -> bool:
        """Whether operations were counted in the step that has ended."""
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
    """Seconds so far in which rollouts were made and read."""
    return served(trainer).batches.loading


def _dtype(precision: str) -> torch.dtype:
    """That products are made in."""
    names = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    return names.get(precision.partition("-")[0], torch.float32)
