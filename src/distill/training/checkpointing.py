"""What happens at a save point."""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors import SafetensorError
from typing_extensions import override

from decode.errors import UserError
from decode.evaluation.scorecard import Scorecard, read_scorecard
from decode.model.target import Target
from distill.distributed.graceful_shutdown import Stop
from distill.distributed.ranks import write_state
from distill.loggers.base import numbers, trackers
from distill.report import html as html_report
from distill.training.module import DistillModule
from distill.training.strategies import consolidated
from distill.training.time_budget import Budget
from distill.utils.atomic_files import clean, write_json
from distill.utils.progress import bar, say
from distill.utils.run_folder import checkpoints
from drafters.base import Drafter
from drafters.checkpoint import io as hub
from drafters.checkpoint.atomic import rename_into_place

log = logging.getLogger(__name__)
Scorer = Callable[[Path, int], Scorecard]
REPORT_EVERY = 60.0  # seconds between pages of a run that goes on
STATE = Path("trainer") / "state.ckpt"  # optimizer and schedule; kept in the newest checkpoint only


class ScoreCheckpoint(L.Callback):
    """Save, reload the folder, score it, repoint `best` and `last`.

    A checkpoint appears under its final name only when it is whole. What is scored is the folder,
    as a user would load it. Scoring touches no training state.

    Args:
        folder: of the run.
        every: optimizer steps between save points.
        scorer: (checkpoint folder, step) -> scorecard, or None to save only.
        target_name: written into the checkpoint.
        stop: says when to stop. The step that a run stops at is a save point like any other, but for
            one thing: if it would not have been one, it is not scored, and goes once there is a newer.
        budget: says when a step is to be saved like that.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        scorer: Scorer | None,
        target_name: str,
        stop: Stop | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.root = folder / "checkpoints"
        self.every, self.scorer, self.target_name = every, scorer, target_name
        self.stop, self.budget = stop or Stop(), budget
        self.trained = 0.0  # seconds in training steps, whatever was scored between them
        self._reported = time.monotonic()  # when its page was written
        self._kept = 0  # the newest save point; a disk may show it to other machines too late

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"trained": self.trained}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.trained = state_dict["trained"]

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._kept = trainer.global_step

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._begin = time.monotonic()

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, DistillModule)
        self._catch_up(trainer, pl_module.target)

    def _catch_up(self, trainer: L.Trainer, target: Target) -> None:
        if trainer.is_global_zero:
            self.root.mkdir(parents=True, exist_ok=True)
            clean(self.root)
            # A kill may have come between a checkpoint and its links or its score.
            self._link(trainer)
            for path in checkpoints(self.root.parent):
                if self._score(trainer, path):
                    self._track(trainer, path)
        target.join()  # the first rank alone scores
        trainer.strategy.barrier()

    def _due(self, trainer: L.Trainer, step: int) -> bool:
        return step % self.every == 0 or step == trainer.max_steps

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.trained += time.monotonic() - self._begin
        step = trainer.global_step
        # Micro-batches of the next step come with the same number.
        if step > self._kept and (self._due(trainer, step) or self._meanwhile()):
            self.save(trainer, pl_module, step)
        if self.stop.by:
            trainer.should_stop = True

    def _meanwhile(self) -> bool:
        """Whether a step is saved that is not due."""
        return bool(self.stop.by) or (self.budget is not None and self.budget.save_now())

    def save(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Make the save point of `step`."""
        assert isinstance(module, DistillModule)
        self._kept = step
        self._publish(trainer, module.drafter, module.target, step)
        module.target.join()
        if trainer.is_global_zero:
            say(_line(step, trainer.max_steps, module.loss, self.root / str(step)))
        self.stop.ask_all(trainer)  # others wait here while rank 0 scores

    def save_untrained(self, trainer: L.Trainer, drafter: Drafter, target: Target) -> None:
        """Make the one save point, 0, of a drafter that there is nothing to fit in."""
        self._catch_up(trainer, target)
        if trainer.is_global_zero and not (self.root / "0").exists():
            self._publish(trainer, drafter, target, 0)
        target.join()

    def _publish(self, trainer: L.Trainer, drafter: Drafter, target: Target, step: int) -> None:
        final, temporary = self.root / str(step), self.root / f"{step}.tmp"
        weights = consolidated(trainer, drafter)
        finite = all(bool(w.isfinite().all()) for w in weights.values())
        if not (trainer.strategy.broadcast(finite) if drafter.trains else finite):  # rank 0 has them all
            raise UserError(f"training: weights are not finite after step {step}; lower optimizer.lr")
        temporary.mkdir(parents=True, exist_ok=True)
        try:
            if drafter.trains:
                (temporary / STATE.parent).mkdir(exist_ok=True)
                trainer.save_checkpoint(temporary / STATE)  # on every rank: each may have a part
                write_state(trainer, temporary / STATE.parent)
            if trainer.is_global_zero:
                hub.save(drafter, target, temporary, self.target_name, weights)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError):
                raise
            raise OSError(errno.EIO, str(error), str(temporary)) from error  # its words for a full disk
        if drafter.trains:
            trainer.strategy.barrier()  # every rank's part is written
        if trainer.is_global_zero:
            if final.exists():  # of a run that has lost its state and began anew
                _remove(final)
            rename_into_place(temporary, final)
            self._link(trainer)
            self._score(trainer, final)
            if self._due(trainer, step):
                self._track(trainer, final)

    def _link(self, trainer: L.Trainer) -> None:
        """Point `last` to the newest checkpoint; it alone keeps the trainer's state."""
        found = checkpoints(self.root.parent)
        if found:
            _point(self.root / "last", found[-1])
        for older in found[:-1]:
            shutil.rmtree(older / STATE.parent, ignore_errors=True)
            if not self._due(trainer, int(older.name)):
                _remove(older)

    def _track(self, trainer: L.Trainer, path: Path) -> None:
        for tracker in trackers(trainer.loggers):
            tracker.saved(self.root.parent, path)

    def _score(self, trainer: L.Trainer, path: Path) -> bool:
        """Whether it had no score, and has one now."""
        scorer, step = self.scorer, int(path.name)
        if scorer is None or (path / "score.json").exists() or not self._due(trainer, step):
            return False
        with torch.random.fork_rng():  # loading a drafter first makes a random one
            card = self.stop.unless_asked(lambda: scorer(path, step))
        if card is None:
            return False
        card = replace(card, checkpoint=replace(card.checkpoint, train_seconds=self.trained))
        write_json(path / "score.json", card.to_json())
        if not card.audit_passed:
            log.error("audit failed at step %s: %s", path.name, card.audit)
        for row in card.rows:
            if row.replay and not row.replay.agrees:
                log.error(
                    "step %s, %s, T=%g: replay and decoder disagree, tau %.3f and %.3f (99 %% interval of "
                    "the difference on the same prompts: %s)",
                    *(path.name, row.decode, row.temperature, row.replay.tau, row.tau),
                    "{:.3f} to {:.3f}".format(*row.replay.difference_interval or (math.nan, math.nan)),
                )
        scored = [p for p in checkpoints(self.root.parent) if (p / "score.json").exists()]
        _point(self.root / "best", max(scored, key=_worth))
        for logger in trainer.loggers:
            logger.log_metrics(numbers(card), step=int(path.name))
            logger.save()  # what is written now and then
        if time.monotonic() - self._reported > REPORT_EVERY:
            html_report.attempt(self.root.parent)
            self._reported = time.monotonic()
        return True


def _worth(checkpoint: Path) -> float:
    """Tau on the prompts that it is not reported on, where there are any."""
    row = read_scorecard(checkpoint / "score.json").headline
    return row.replay.selection_tau if row.replay else row.tau


def _line(step: int, steps: int, loss: float, checkpoint: Path) -> str:
    text = f"step {step:>{len(str(steps))}}/{steps}  loss {loss:.3f}"
    if not (checkpoint / "score.json").exists():
        return text
    card = read_scorecard(checkpoint / "score.json")
    verdict = "pass" if card.audit_passed else "FAIL"
    drift = card.checkpoint.target_drift
    note = f"  target moved by KL {drift.kl:.2g}" if drift else ""
    return f"{text}  tau {card.headline.tau:.2f}  speedup {card.headline.speedup:.2f}x  audit {verdict}{note}"


def _remove(checkpoint: Path) -> None:
    going = checkpoint.replace(
        checkpoint.with_name(f"{checkpoint.name}.old.tmp")
    )  # half of it is no checkpoint
    shutil.rmtree(going, ignore_errors=True)


def _point(link: Path, to: Path) -> None:
    temporary = link.with_name(f"{link.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(to.name)
    temporary.replace(link)


class TrainingBar(L.Callback):
    """Optimizer steps out of all, and the newest loss."""

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.shown = bar(trainer.max_steps, "training", "steps", trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module.loss, float)
        self.shown.total = trainer.max_steps  # which a budget of time foretells anew in every step
        if trainer.global_step > self.shown.n:
            speed = trainer.callback_metrics.get("train/tokens_per_second")
            shown = f"loss {pl_module.loss:.3f}" + (f", {speed:,.0f} tokens/s" if speed else "")
            self.shown.update(trainer.global_step - self.shown.n, shown)

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if hasattr(self, "shown"):
            self.shown.close()
