"""What happens at a save point."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors import SafetensorError
from typing_extensions import override

from decode.errors import UserError
from distill.files import clean, sync, write_json
from distill.module import DistillModule
from distill.progress import bar, say
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
            clean(self.root)
            # A kill may have come between a checkpoint and its links or its score.
            self._link()
            for path in checkpoints(self.root.parent):
                self._score(trainer, path)
        trainer.strategy.barrier()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        due = step > 0 and (step % self.every == 0 or step == trainer.max_steps)
        # Micro-batches of the next step come with the same number.
        if due and not (self.root / str(step)).exists():
            self.save(trainer, pl_module, step)

    def save(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Make the save point of `step`."""
        assert isinstance(module, DistillModule)
        if not all(p.isfinite().all() for p in module.drafter.parameters()):
            raise UserError(f"training: weights are not finite after step {step}; lower optimizer.lr")
        final, temporary = self.root / str(step), self.root / f"{step}.tmp"
        (temporary / STATE.parent).mkdir(parents=True, exist_ok=True)
        try:
            trainer.save_checkpoint(temporary / STATE)  # on every rank: sharded states need all of them
            if trainer.is_global_zero:
                hub.save(module.drafter, module.target, temporary, self.target_name)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError):
                raise
            raise OSError(errno.EIO, str(error), str(temporary)) from error  # its words for a full disk
        if trainer.is_global_zero:
            for path in (*temporary.rglob("*"), temporary):
                sync(path)
            temporary.replace(final)
            sync(self.root)
            self._link()
            self._score(trainer, final)
            say(_line(step, trainer.max_steps, module.loss, final))
        trainer.strategy.barrier()

    def _link(self) -> None:
        """Point `last` to the newest checkpoint; it alone keeps the trainer's state."""
        found = checkpoints(self.root.parent)
        if found:
            _point(self.root / "last", found[-1])
        for older in found[:-1]:
            shutil.rmtree(older / STATE.parent, ignore_errors=True)

    def _score(self, trainer: L.Trainer, path: Path) -> None:
        if self.scorer is None or (path / "score.json").exists():
            return
        with torch.random.fork_rng():  # loading a drafter first makes a random one
            card = self.scorer(path, int(path.name))
        write_json(path / "score.json", card)
        if not card["audit_passed"]:
            log.error("audit failed at step %s: %s", path.name, card["audit"])
        scored = [p for p in checkpoints(self.root.parent) if (p / "score.json").exists()]
        _point(self.root / "best", max(scored, key=_tau))
        numbers = {k: v for k, v in card.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        for j, value in enumerate(card["survival"], 1):
            numbers[f"survival_{j}"] = value
        for logger in trainer.loggers:
            logger.log_metrics({f"score/{k}": v for k, v in numbers.items()}, step=int(path.name))


def _tau(checkpoint: Path) -> float:
    return json.loads((checkpoint / "score.json").read_text())["tau"]


def _line(step: int, steps: int, loss: float, checkpoint: Path) -> str:
    text = f"step {step:>{len(str(steps))}}/{steps}  loss {loss:.3f}"
    if not (checkpoint / "score.json").exists():
        return text
    card = json.loads((checkpoint / "score.json").read_text())
    verdict = "pass" if card["audit_passed"] else "FAIL"
    return f"{text}  tau {card['tau']:.2f}  speedup {card['speedup']:.2f}x  audit {verdict}"


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
        if trainer.global_step > self.shown.n:
            self.shown.set_postfix_str(f"loss {pl_module.loss:.3f}", refresh=False)
            self.shown.update(trainer.global_step - self.shown.n)

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if hasattr(self, "shown"):
            self.shown.close()
