"""Graceful shutdown: on SIGTERM, finish the step, save, and exit with code 143 on every rank."""

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

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1 is common for SLURM's --signal
EXIT_CODE = 128 + signal.SIGTERM  # 143, what a shell reports after SIGTERM
T = TypeVar("T")


class Stopped(SystemExit):
    """The run stopped on a signal after saving; it can be resumed."""


class _Abandoned(BaseException):
    """Raised by the signal handler to abort interruptible work."""


class Stop(L.Callback):
    """Graceful shutdown: a signal to any process of the run stops all processes at the same step.

    The handler only sets a flag, so that saves and optimizer steps complete. Ranks sum the flags together
    with the loss in every optimizer step (`DistillModule.on_before_optimizer_step`) and at every save point,
    so that all ranks stop at the same step and none waits for a process that has exited.

    Lightning's own handler broadcasts inside the handler, which blocks on ranks without a signal, and exits
    after any micro-batch without saving; under SLURM it saves a checkpoint in its own format and requeues the
    job. This callback replaces it during training; Lightning's teardown restores the previous handlers, also
    after errors.

    Attributes:
        signal_name: name of the signal, once all ranks know of it; empty before.
    """

    def __init__(self) -> None:
        self.signal_name = ""
        self._received = [0.0] * len(SIGNALS)
        self._interruptible = False

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():  # required by Python
            for number in SIGNALS:
                signal.signal(number, self.handle_signal)

    def handle_signal(self, number: int, frame: FrameType | None = None) -> None:
        """Record a signal; abort interruptible work."""
        del frame
        self._received[SIGNALS.index(signal.Signals(number))] = 1.0
        if self._interruptible:
            self._interruptible = False
            raise _Abandoned

    @property
    def received(self) -> list[float]:
        """1.0 for each of SIGNALS that this process has received, else 0.0; summed over ranks by callers."""
        return list(self._received)

    def update(self, total: Sequence[float]) -> None:
        """Set `signal_name` from the signals of all ranks.

        Args:
            total: `received`, summed over ranks.
        """
        self.signal_name = next((s.name for s, count in zip(SIGNALS, total, strict=True) if count), "")

    def synchronize(self, trainer: L.Trainer) -> None:
        """Exchange received signals between ranks; blocks like a barrier."""
        received = torch.tensor(self._received, device=trainer.strategy.root_device)
        total = trainer.strategy.reduce(received, reduce_op="sum")
        assert isinstance(total, Tensor)
        self.update(total.tolist())

    def run_unless_stopped(self, work: Callable[[], T]) -> T | None:
        """Run work that can be repeated later; a signal aborts it, and the result is None."""
        try:
            try:
                self._interruptible = True  # set before checking, so that a signal in between aborts
                return None if self.signal_name or any(self._received) else work()
            finally:
                self._interruptible = False
        except _Abandoned:
            return None

    def exit(self, step: int) -> NoReturn:
        """Exit the process.

        Args:
            step: last saved step.

        Raises:
            Stopped: always.
        """
        if first_rank():
            text = f"stopped by {self.signal_name} at step {step}; the same command continues from there"
            print(text, file=sys.stderr, flush=True)
        raise Stopped(EXIT_CODE)
