"""End a run once its acceptance falls, which the loss may not show."""

from __future__ import annotations

from typing import Any

import lightning as L
from typing_extensions import override

from decode.errors import UserError
from decode.evaluation.scorecard import Scorecard, read_scorecard
from distill.scoring.paired import tau_difference
from distill.training.checkpointing import ScoreCheckpoint
from distill.utils.progress import say
from distill.utils.run_folder import checkpoints


class EarlyEnd(L.Callback):
    """Ends training when the newest save points are all worse than the best one, beyond noise.

    The decision follows from the scorecards in the run's folder, so a resumed run decides as it would have.
    It comes after the callback that saves.

    Args:
        saver: saves and scores checkpoints.
        patience: number of save points in a row.
    """

    def __init__(self, saver: ScoreCheckpoint, patience: int) -> None:
        self.saver, self.patience = saver, patience
        self._decided = -1  # step of the last decision

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._decide(trainer)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        due = trainer.global_step % self.saver.every == 0 and trainer.global_step < trainer.max_steps
        if due and trainer.global_step > self._decided:
            self._decide(trainer)

    def _decide(self, trainer: L.Trainer) -> None:
        self._decided = step = trainer.global_step
        ends = trainer.is_global_zero and self._falls()
        if trainer.strategy.broadcast(ends):
            self._end(trainer, step)

    def _end(self, trainer: L.Trainer, step: int) -> None:
        trainer.fit_loop.epoch_loop.max_steps = step
        if trainer.is_global_zero:
            best = (self.saver.root / "best").readlink()
            say(
                f"ended at step {step}: tau of the last {self.patience} save points is below that of step "
                f"{best}, beyond noise (score.patience)"
            )
            with self.saver.watchdog.working():
                self.saver.rescore_best(trainer, self.saver.root / str(step))

    def _falls(self) -> bool:
        """Whether the newest save points are all worse than the best."""
        best = self.saver.root / "best"
        if not best.exists():
            return False
        cards = {
            int(path.name): card for path in checkpoints(self.saver.root.parent) if (card := _card(path))
        }
        top = int(best.readlink().name)
        newest = sorted(step for step in cards if step > top)[-self.patience :]
        return len(newest) == self.patience and all(worse(cards[step], cards[top]) for step in newest)


def worse(card: Scorecard, best: Scorecard) -> bool:
    """Whether tau is smaller at 95 % confidence, paired by prompt."""
    difference = tau_difference(card.compared, best.compared)
    return difference is not None and difference.interval is not None and difference.interval[1] < 0


def _card(path: Any) -> Scorecard | None:
    try:
        return read_scorecard(path / "score.json")
    except UserError:
        return None
