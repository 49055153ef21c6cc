"""Training for a fixed time: number of steps and learning-rate schedule."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from typing_extensions import override

from distill.training.checkpointing import ScoreCheckpoint
from distill.training.module import DistillModule
from distill.utils.run_folder import checkpoints

MAX_STEPS = 10**7  # of a run with a time budget, before its steps have been timed
RECENT = 20  # steps whose times predict the next ones'
MIN_WARMUP = 10  # steps
FIRST = 8  # steps after which the number between save points is chosen
SAVE_EVERY = 60.0  # seconds of training that a killed process may lose


class Budget(L.Callback):
    """Ends a run after a number of seconds, and decays the learning rate towards that end.

    Warm-up, constant learning rate, then linear decay to `final_lr` over the last `cooldown` of the
    seconds. The rate before the cool-down does not depend on the length of the run, so a run that is
    given more time continues from its cooled-down weights at the constant rate (WSD-S, arXiv:2410.05192).
    The schedule follows the clock, since the number of steps is not known.

    `attach` adds it to a trainer before the callbacks that save. For one process only.

    Args:
        seconds: from the first step to the last.
        part: number of this stretch of training; time used by other parts does not count.
        cooldown: share of the seconds in which the learning rate falls.
        clock: current time in seconds.
    """

    def __init__(
        self,
        seconds: float,
        part: int = 0,
        cooldown: float = 0.3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds, self.part, self.cooldown, self.clock = seconds, part, cooldown, clock
        self.before = 0.0  # seconds of this part used by processes before this one
        self._created, self._start = clock(), math.nan  # time of construction, and of the first step
        self.steps = MAX_STEPS  # current estimate of the steps of the whole run
        self.waited = 0.0  # seconds before the first step
        self._step_seconds: deque[float] = deque(maxlen=RECENT)
        self._step = -1

    @property
    def used(self) -> float:
        """Seconds of this part so far, earlier processes included."""
        return self.before + (0.0 if math.isnan(self._start) else self.clock() - self._start)

    @property
    def left(self) -> float:
        """Seconds until the budget is used up."""
        return self.seconds - self.used

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"part": self.part, "used": self.used}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["part"] == self.part:
            self.before = state_dict["used"]

    def attach(self, trainer: L.Trainer, step: int) -> None:
        """Add this to a trainer whose run resumes at `step`; 0: there is no trainer state."""
        _callbacks(trainer).append(self)
        saved = checkpoints(Path(trainer.default_root_dir))
        self._step = step or (int(saved[-1].name) if saved else 0)
        self._set(trainer, MAX_STEPS)

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._step > 0 and self.left <= 0:
            self._set(trainer, self._step)
        assert isinstance(pl_module, DistillModule)
        optimizer, rates = trainer.optimizers[0], (pl_module.warmup, pl_module.final_lr)
        schedule = self.schedule(optimizer, *rates, pl_module.rate_factors(optimizer))
        trainer.lr_scheduler_configs[0].scheduler = schedule

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        self._start = self._last_time = self._saved = self.clock()
        self.waited = self._start - self._created

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self._step:
            now = self.clock()
            self._step_seconds.append((now - self._last_time) / (trainer.global_step - self._step))
            self._step, self._last_time = trainer.global_step, now
            self._set(trainer, self._step + self.remaining_steps())
            if now - self._saved >= SAVE_EVERY:
                self._saved = now
                _saver(trainer).save_early = True

    def remaining_steps(self) -> int:
        """Estimated number of steps in the remaining seconds."""
        seconds_per_step = max(median(self._step_seconds), 1e-6)
        return max(0, round(self.left / seconds_per_step))

    def _set(self, trainer: L.Trainer, steps: int) -> None:
        self.steps = steps
        trainer.fit_loop.epoch_loop.max_steps = steps

    def schedule(
        self,
        optimizer: torch.optim.Optimizer,
        warmup: float,
        final_lr: float,
        factors: Sequence[Callable[[float], float]],
    ) -> torch.optim.lr_scheduler.LambdaLR:
        """Warm-up by steps, cool-down by the clock; see `warm_up_and_decay` for the arguments."""

        def rate(step: int) -> float:
            rise = max(MIN_WARMUP, round(warmup * self.steps)) if self.steps < MAX_STEPS else MIN_WARMUP
            falling = self.cooldown * self.seconds  # 0 also where setting up the run took all of the time
            level = self.left / falling if falling else 1.0
            return min(1.0, (step + 1) / rise) * (final_lr + (1 - final_lr) * min(1.0, max(0.0, level)))

        def scaled(factor: Callable[[float], float]) -> Callable[[int], float]:
            return lambda step: rate(step) * factor(min(1.0, step / self.steps))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, [scaled(f) for f in factors])


class Deadline(Budget):
    """A `Budget` that ends at a time of the clock, with about so many scored save points before it.

    The steps between save points follow from the first timed ones; a resumed run keeps their number. What a
    stopped process had trained is taken from the time until the end.

    Args:
        end: time of the clock at which training ends.
        points: number of save points, if scores took no time.
        cooldown: see `Budget`.
        clock: see `Budget`.
    """

    def __init__(
        self,
        end: float,
        points: int,
        cooldown: float = 0.3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(max(0.0, end - clock()), 0, cooldown, clock)
        self.end, self.points = end, points
        self.every = 0  # steps between save points; 0: not known yet

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"every": self.every}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.every = state_dict["every"]

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds = max(self.before, self.end - self.clock())
        if self.every:
            _saver(trainer).every = self.every
        super().on_fit_start(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if not self.every and len(self._step_seconds) >= FIRST:
            self.every = max(1, round(self.steps / self.points))
            _saver(trainer).every = self.every


def _saver(trainer: L.Trainer) -> ScoreCheckpoint:
    return next(callback for callback in _callbacks(trainer) if isinstance(callback, ScoreCheckpoint))


def _callbacks(trainer: L.Trainer) -> list[L.Callback]:
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
