"""Save, score and link checkpoints during training."""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from typing_extensions import override

from decode.errors import UserError
from decode.evaluation.scorecard import Scorecard, Training, read_scorecard, read_training
from decode.model.target import Target
from distill.data.datamodule import rollout_data
from distill.distributed.graceful_shutdown import Stop
from distill.distributed.ranks import write_processes
from distill.distributed.watchdog import Watchdog
from distill.loggers.base import scalars, trackers
from distill.training import trainer_state
from distill.training.module import DistillModule
from distill.training.strategies import gather_weights
from distill.training.trainer_state import STATE
from distill.utils.atomic_files import clean, write_json
from distill.utils.cpu_threads import fit_threads
from distill.utils.phase_log import PhaseLog
from distill.utils.progress import bar, say
from distill.utils.reports import NO_REPORTS, Reports
from distill.utils.run_folder import checkpoints
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.checkpoint.atomic import rename_into_place, writing

log = logging.getLogger(__name__)
Scorer = Callable[[Path, int, bool], Scorecard]  # folder, step, early (others follow)
REPORT_EVERY = 60.0  # seconds between updates of the report while training


class ScoreCheckpoint(L.Callback):
    """Save a checkpoint, reload and score its folder, and update the links `best` and `last`.

    A checkpoint gets its final name only when it is complete. The saved folder is scored as a user
    would load it. Scoring changes no training state.

    Args:
        phases: log that times saving and scoring.
        every: optimizer steps between save points.
        scorer: called with early=False at step 0 and the last step; None: save only.
        target_name: written into the checkpoint.
        start: whether step 0 is a save point.
        stop: graceful shutdown. A checkpoint saved early, for it or for `save_early`, is not scored. It is
            removed once two others have a trainer state, or the last step is saved.
        watchdog: told of the work at a save point, which takes longer than a step.
        reports: report writers.
    """

    def __init__(
        self,
        phases: PhaseLog,
        every: int,
        scorer: Scorer | None,
        target_name: str,
        start: bool = False,
        stop: Stop | None = None,
        watchdog: Watchdog | None = None,
        reports: Reports = NO_REPORTS,
    ) -> None:
        self.phases, folder = phases, phases.folder
        self.watchdog = watchdog or Watchdog(0, folder)
        self.root = folder / "checkpoints"
        self.every, self.scorer, self.target_name, self.start = every, scorer, target_name, start
        self.stop, self.reports = stop or Stop(), reports
        self.save_early = False  # set by a callback before this one: save at the end of this step
        self.trained = self.trained_cpu = 0.0  # wall and CPU seconds of steps, without scoring
        self._reported = time.monotonic()  # time of the last report
        self._last_step = 0  # newest save point; other ranks may see its folder late

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"trained": self.trained, "trained_cpu": self.trained_cpu}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.trained = state_dict["trained"]
        self.trained_cpu = state_dict["trained_cpu"]

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last_step = trainer.global_step
        # Each rank has chosen a state by itself, and by now has loaded it.
        if (first := trainer.strategy.broadcast(trainer.global_step)) != trainer.global_step:
            raise UserError(
                f"resume: rank {trainer.global_rank} has read the state of step {trainer.global_step}, and "
                f"rank 0 chose step {first}; do all machines see the same files in {self.root}?"
            )
        if trainer.is_global_zero:
            trainer_state.drop_newer(checkpoints(self.root.parent), trainer.global_step)
        begins = self.start and trainer.global_step == 0
        if begins and trainer.strategy.broadcast(not (self.root / "0").exists()):  # rank 0 decides
            with self.watchdog.working():
                self.save(trainer, pl_module, 0)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch_start = time.monotonic(), time.process_time()

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, DistillModule)
        with self.watchdog.working():
            self._score_unscored(trainer, pl_module.target)

    def _score_unscored(self, trainer: L.Trainer, target: Target) -> None:
        if trainer.is_global_zero:
            self.root.mkdir(parents=True, exist_ok=True)
            clean(self.root)
            clean(self.root.parent, deep=False)
            # The process may have been killed after saving a checkpoint, before linking or scoring it.
            self._link(trainer)
            for path in checkpoints(self.root.parent):
                if self.scorer and self._due(trainer, int(path.name)):
                    _remove_damaged_score(path)
                if self._score(trainer, path):
                    self.rescore_best(trainer, path)
                    self._track(trainer, path)
        target.join()  # only rank 0 scores
        trainer.strategy.barrier()

    def _due(self, trainer: L.Trainer, step: int) -> bool:
        return step % self.every == 0 or step == trainer.max_steps

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        begun, begun_cpu = self._batch_start
        self.trained += time.monotonic() - begun
        self.trained_cpu += time.process_time() - begun_cpu
        step = trainer.global_step
        # With gradient accumulation several micro-batches have the same step.
        if step > self._last_step and (self._due(trainer, step) or self._due_early()):
            with self.watchdog.working():  # on all ranks: they wait for rank 0
                self.save(trainer, pl_module, step)
        if self.stop.signal_name:
            trainer.should_stop = True

    def _due_early(self) -> bool:
        """Whether to save a step that is not due."""
        return self.save_early or bool(self.stop.signal_name)

    def save(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Save and score the checkpoint of `step`."""
        assert isinstance(module, DistillModule)
        self._last_step, self.save_early = step, False
        rollout_data(trainer).join()  # the target scores, and may be reading ahead
        with self.phases.time("checkpoints") as part, bar(1, f"checkpoint {step}", "", leave=False):
            self._publish(trainer, module.drafter, module.target, step)
            part["checkpoints"] = 1
        module.target.join()
        if trainer.is_global_zero:
            say(_summary(step, trainer.max_steps, module.loss, self.root / str(step)))
        self.stop.synchronize(trainer)  # other ranks wait here while rank 0 scores

    def save_untrained(self, trainer: L.Trainer, drafter: Drafter, target: Target) -> None:
        """Save checkpoint 0 of a drafter without trainable parameters."""
        self._score_unscored(trainer, target)
        if trainer.is_global_zero and not (self.root / "0").exists():
            self._publish(trainer, drafter, target, 0)
        target.join()

    def _publish(self, trainer: L.Trainer, drafter: Drafter, target: Target, step: int) -> None:
        final, temporary = self.root / str(step), self.root / f"{step}.tmp"
        weights = gather_weights(trainer, drafter)
        finite = all(bool(w.isfinite().all()) for w in weights.values())
        if not (trainer.strategy.broadcast(finite) if drafter.trains else finite):  # rank 0 has all weights
            raise UserError(
                f"training: weights are not finite after step {step}; lower optimizer.optimizer.lr"
            )
        temporary.mkdir(parents=True, exist_ok=True)
        try:
            with writing(temporary):
                if drafter.trains and step:  # at step 0 there is nothing to resume
                    (temporary / STATE.parent).mkdir(exist_ok=True)
                    trainer.save_checkpoint(temporary / STATE)  # on every rank: the state may be sharded
                    write_processes(trainer, temporary / STATE.parent)
                if trainer.is_global_zero:
                    checkpoint_io.save(drafter, target, temporary, self.target_name, weights)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if drafter.trains:
            trainer.strategy.barrier()  # all ranks have written their shards
        if trainer.is_global_zero:
            _place(temporary, final)
            self._link(trainer)
            if self._score(trainer, final):
                self.rescore_best(trainer, final)
            if self._due(trainer, step):
                self._track(trainer, final)

    def _link(self, trainer: L.Trainer) -> None:
        """Point `last` to the newest checkpoint; remove early saves and all but two trainer states."""
        paths = checkpoints(self.root.parent)
        if paths:
            _link_to(self.root / "last", paths[-1])
        for path in [p for p in paths[:-1] if not self._due(trainer, int(p.name))]:
            others = [p for p in paths if p != path and trainer_state.has_state(p)]
            if len(others) >= trainer_state.KEPT or int(paths[-1].name) == trainer.max_steps:
                _remove(path)
                paths.remove(path)
        trainer_state.keep_newest(paths)

    def _track(self, trainer: L.Trainer, path: Path) -> None:
        for tracker in trackers(trainer.loggers):
            tracker.saved(self.root.parent, path)

    def _score(self, trainer: L.Trainer, path: Path) -> bool:
        """Score a checkpoint that is due and has no score; return whether it was scored."""
        scorer, step = self.scorer, int(path.name)
        if scorer is None or (path / "score.json").exists() or not self._due(trainer, step):
            return False
        card = self._write_score(trainer, path, scorer, early=step not in (0, trainer.max_steps))
        if card is None:
            return False
        _link_to(self.root / "best", max(checkpoints(self.root.parent), key=_rank))
        for logger in trainer.loggers:
            logger.log_metrics(scalars(card), step=step)
            logger.save()  # flush what loggers buffer
        if time.monotonic() - self._reported > REPORT_EVERY:
            self.reports.page(self.root.parent)
            self._reported = time.monotonic()
        return True

    def rescore_best(self, trainer: L.Trainer, newest: Path) -> None:
        """If `newest` is the last checkpoint, score the best in full too, because it is reported."""
        if self.scorer is None or int(newest.name) != trainer.max_steps or not (self.root / "best").exists():
            return
        best = self.root / (self.root / "best").readlink()
        if best != newest:
            self._write_score(trainer, best, self.scorer, early=False)

    def _write_score(self, trainer: L.Trainer, path: Path, scorer: Scorer, early: bool) -> Scorecard | None:
        """Score a checkpoint and log failed checks; None if the run was stopped meanwhile."""
        step, training = int(path.name), read_training(path / "score.json")
        if training.seconds is None:
            training = Training(step, self.trained, self.trained_cpu, trainer.precision)
        with torch.random.fork_rng():  # loading a drafter draws random weights first
            card = self.stop.run_unless_stopped(lambda: scorer(path, step, early))
        if card is None:
            return None
        card = card.after(training)
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
        return card


def _rank(checkpoint: Path) -> tuple[bool, float]:
    """Sort key of `best`: acceptance length, on the selection prompts if there are any.

    If decode=auto found plain decoding the fastest, the acceptance length is from another row than the
    headline, and the checkpoint ranks lower. Those without a readable scorecard rank lowest.
    """
    try:
        card = read_scorecard(checkpoint / "score.json")
    except UserError:
        return False, -math.inf
    row = card.compared
    drafts = row is card.rows[0] or row.decode == card.conditions.served_plan
    return drafts, row.replay.selection_tau if row.replay else row.tau


def _remove_damaged_score(checkpoint: Path) -> None:
    file = checkpoint / "score.json"
    if file.exists():
        try:
            read_scorecard(file)
        except UserError:
            say(f"{file}: damaged; step {checkpoint.name} is scored again")
            file.unlink()


def _summary(step: int, steps: int, loss: float, checkpoint: Path) -> str:
    text = f"step {step:>{len(str(steps))}}/{steps}" + ("" if math.isnan(loss) else f"  loss {loss:.3f}")
    if not (checkpoint / "score.json").exists():
        return text
    card = read_scorecard(checkpoint / "score.json")
    drift = card.checkpoint.target_drift
    note = f"  target moved by KL {drift.kl:.2g}" if drift else ""
    fastest, head = card.fastest, card.headline
    if card.conditions.elsewhere:  # nothing was timed
        pass
    elif len(card.drafts) > 1 and not card.pays:
        note = "  no draft faster than plain" + note
    elif fastest is not card.compared:
        note = f"  fastest: {fastest.decode} {fastest.speed:.2f}x{note}"
    return f"{text}  {head.tau_text}  {head.speedup_text}  {head.setting}  audit {card.audited}{note}"


def _place(temporary: Path, final: Path) -> None:
    """Hash a complete checkpoint's trainer state and give it its name."""
    if (temporary / STATE).exists():
        trainer_state.seal(temporary / STATE.parent)
    if final.exists():  # from a run that continued from an older trainer state
        _remove(final)
    rename_into_place(temporary, final)


def _remove(checkpoint: Path) -> None:
    # Rename first: a killed removal must not leave a partial checkpoint under its name.
    renamed = checkpoint.replace(checkpoint.with_name(f"{checkpoint.name}.old.tmp"))
    shutil.rmtree(renamed, ignore_errors=True)


def _link_to(link: Path, to: Path) -> None:
    temporary = link.with_name(f"{link.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(to.name)
    temporary.replace(link)


class TrainingBar(L.Callback):
    """Progress bar of training: optimizer steps, loss and throughput."""

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.bar = bar(trainer.max_steps, "training", "steps", trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        fit_threads()
        assert isinstance(pl_module.loss, float)
        self.bar.total = trainer.max_steps  # a callback may change it
        if trainer.global_step > self.bar.n:
            speed = trainer.callback_metrics.get("train/tokens_per_second")
            note = f"loss {pl_module.loss:.3f}" + (f", {speed:,.0f} tokens/s" if speed else "")
            self.bar.update(trainer.global_step - self.bar.n, note)

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close()

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._close()  # Lightning skips `teardown`; in a notebook, the process continues

    def _close(self) -> None:
        if hasattr(self, "bar"):
            self.bar.close()
