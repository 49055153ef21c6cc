"""Training for so many seconds: how many steps that is, and the learning rate on the way."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import lightning as L
import torch
from typing_extensions import override

FOREVER = 10**7  # steps of a run that is ended by the clock, before its steps have been timed
RECENT = 20  # steps whose time the next ones are predicted by
RISE = 10  # steps of a warm-up at the least
SAVED = 60.0  # seconds that a kill may lose


class Budget(L.Callback):
    """Ends a run when its seconds are used up, and lowers the learning rate towards that end.

    Warm-up, constant rate, and a line down to `final_lr` over the last `cooldown` of the seconds: the
    rate before the cool-down does not depend on how long the run will be, so a run that is given more
    seconds goes on from its cooled-down weights at the constant rate again (WSD-S, arXiv:2410.05192).
    The rate is read off the clock, since the number of steps is not known.

    Comes before what saves. One process alone.

    Args:
        seconds: from the first step to the last.
        part: number of this stretch; what another part had used does not count.
        cooldown: share of the seconds in which the learning rate falls.
        clock: seconds.
    """

    def __init__(
        self,
        seconds: float,
        part: int = 0,
        cooldown: float = 0.3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds, self.part, self.cooldown, self.clock = seconds, part, cooldown, clock
        self.before = 0.0  # seconds of this part before a kill
        self._made, self._start = clock(), math.nan  # this, and the first step
        self.steps = FOREVER  # of the run in all, as predicted by now
        self.waited = 0.0  # seconds before the first step
        self.taken: deque[float] = deque(maxlen=RECENT)
        self._step = -1

    @property
    def used(self) -> float:
        """Seconds of this part so far, those before a kill among them."""
        return self.before + (0.0 if math.isnan(self._start) else self.clock() - self._start)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.seconds - self.used

    def save_now(self) -> bool:
        """Whether too much would be lost by now."""
        if self.clock() - self._saved < SAVED:
            return False
        self._saved = self.clock()
        return True

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"part": self.part, "used": self.used}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["part"] == self.part:
            self.before = state_dict["used"]

    def resume(self, trainer: L.Trainer, step: int) -> None:
        """Say where the run goes on; before its state is restored, which may leave nothing to do."""
        self._step = step
        self._set(trainer, FOREVER)

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._step > 0 and self.left <= 0:
            self._set(trainer, self._step)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        self._start = self._then = self._saved = self.clock()
        self.waited = self._start - self._made

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self._step:
            now = self.clock()
            self.taken.append((now - self._then) / (trainer.global_step - self._step))
            self._step, self._then = trainer.global_step, now
            self._set(trainer, self._step + self.more())

    def more(self) -> int:
        """Steps that fit into the seconds that are left."""
        each = max(median(self.taken), 1e-6)
        return max(0, round(self.left / each))

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
        """Warm-up by steps, cool-down by the clock; arguments as of `warm_up_and_decay`."""

        def rate(step: int) -> float:
            rise = max(RISE, round(warmup * self.steps)) if self.steps < FOREVER else RISE
            falling = self.left / (self.cooldown * self.seconds) if self.cooldown else 1.0
            return min(1.0, (step + 1) / rise) * (final_lr + (1 - final_lr) * min(1.0, max(0.0, falling)))

        def times(factor: Callable[[float], float]) -> Callable[[int], float]:
            return lambda step: rate(step) * factor(min(1.0, step / self.steps))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, [times(f) for f in factors])
