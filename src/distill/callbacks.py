"""What happens at a save point."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from typing_extensions import override

from distill.files import sync, write_json
from distill.module import DistillModule
from distill.runs import checkpoints
from drafters import hub

log = logging.getLogger(__name__)
Scorer = Callable[[Path, int], dict[str, Any]]
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
    """

    def __init__(self, folder: Path, every: int, scorer: Scorer | None, target_name: str) -> None:
        self.root = folder / "checkpoints"
        self.every, self.scorer, self.target_name = every, scorer, target_name

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.root.mkdir(parents=True, exist_ok=True)
            for stale in self.root.glob("*.tmp"):
                shutil.rmtree(stale)
            for path in checkpoints(self.root.parent):  # a kill may have come before the score
                self._score(trainer, path)
        trainer.strategy.barrier()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        due = step % self.every == 0 or step == trainer.max_steps
        if due and not (self.root / str(step)).exists():
            self.save(trainer, pl_module, step)

    def save(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Make the save point of `step`."""
        assert isinstance(module, DistillModule)
        final, temporary = self.root / str(step), self.root / f"{step}.tmp"
        (temporary / STATE.parent).mkdir(parents=True, exist_ok=True)
        trainer.save_checkpoint(temporary / STATE)  # on every rank: sharded states need all of them
        if trainer.is_global_zero:
            hub.save(module.drafter, module.target, temporary, self.target_name)
            for path in (*temporary.rglob("*"), temporary):
                sync(path)
            temporary.replace(final)
            sync(self.root)
            _point(self.root / "last", final)
            for older in checkpoints(self.root.parent)[:-1]:
                shutil.rmtree(older / STATE.parent, ignore_errors=True)
            self._score(trainer, final)
        trainer.strategy.barrier()

    def _score(self, trainer: L.Trainer, path: Path) -> None:
        if self.scorer is None or (path / "score.json").exists():
            return
        card = self.scorer(path, int(path.name))
        write_json(path / "score.json", card)
        if not card["audit_passed"]:
            log.error("audit failed at step %s: %s", path.name, card["audit"])
        best = max(
            (p for p in checkpoints(self.root.parent) if (p / "score.json").exists()),
            key=lambda p: json.loads((p / "score.json").read_text())["tau"],
        )
        _point(self.root / "best", best)
        numbers = {k: v for k, v in card.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        for j, value in enumerate(card["survival"], 1):
            numbers[f"survival_{j}"] = value
        for logger in trainer.loggers:
            logger.log_metrics({f"score/{k}": v for k, v in numbers.items()}, step=int(path.name))


def _point(link: Path, to: Path) -> None:
    temporary = link.with_name(f"{link.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(to.name)
    temporary.replace(link)
