"""SIGTERM in training: the step is finished, its state saved, and every rank leaves with 143."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn, TypeVar

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from distill.utils.progress import first_rank

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # the latter is what SLURM's --signal often sends
CODE = 128 + signal.SIGTERM  # a shell's for a process that SIGTERM ended; schedulers know it
T = TypeVar("T")


class Stopped(SystemExit):
    """This run was asked to stop, and has saved what it needs to go on."""


class _AtOnce(BaseException):
    """Leaves work that may be abandoned anywhere."""


class Stop(L.Callback):
    """Graceful shutdown: a signal to any process of the run stops all of them at the same step.

    The handler only sets a flag, so no save is torn and no step is left between two of its
    micro-batches. The flags are added up with the sums that ranks exchange in every optimizer step
    (`DistillModule.on_before_optimizer_step`) and at every save point, so that all ranks stop at the
    same step and none waits for one that has gone.

    Lightning's own handler broadcasts inside the handler, which waits for ranks that got no signal, and
    leaves after any micro-batch with nothing saved; under SLURM it saves a checkpoint of its own format and
    requeues the job. This one replaces it while training runs; Lightning's teardown, which also runs after
    errors, restores what was there before the fit.

    Attributes:
        by: name of the signal, once all ranks know of it; empty before.
    """

    def __init__(self) -> None:
        self.by = ""
        self._heard = [0.0] * len(SIGNALS)
        self._may_leave = False

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():  # Python refuses it elsewhere
            for number in SIGNALS:
                signal.signal(number, self.hear)

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal."""
        del frame
        self._heard[SIGNALS.index(signal.Signals(number))] = 1.0
        if self._may_leave:
            self._may_leave = False
            raise _AtOnce

    @property
    def heard(self) -> list[float]:
        """1 for every one of SIGNALS that this process has had: what ranks add up."""
        return list(self._heard)

    def agree(self, total: Sequence[float]) -> None:
        """Take note of what all ranks have heard.

        Args:
            total: `heard`, summed over ranks.
        """
        self.by = next((s.name for s, count in zip(SIGNALS, total, strict=True) if count), "")

    def ask_all(self, trainer: L.Trainer) -> None:
        """Exchange what ranks have heard; waits for all of them, as a barrier does."""
        heard = torch.tensor(self._heard, device=trainer.strategy.root_device)
        total = trainer.strategy.reduce(heard, reduce_op="sum")
        assert isinstance(total, Tensor)
        self.agree(total.tolist())

    def unless_asked(self, work: Callable[[], T]) -> T | None:
        """The result of work that loses nothing by being done later; None where a signal came first."""
        try:
            try:
                self._may_leave = True  # before looking, or a signal in between would have to wait
                return None if self.by or any(self._heard) else work()
            finally:
                self._may_leave = False
        except _AtOnce:
            return None

    def leave(self, step: int) -> NoReturn:
        """End the process.

        Args:
            step: that was saved.

        Raises:
            Stopped: always.
        """
        if first_rank():
            text = f"stopped by {self.by} at step {step}; the same command goes on from there"
            print(text, file=sys.stderr, flush=True)
        raise Stopped(CODE)
