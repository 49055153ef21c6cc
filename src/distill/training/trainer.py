"""Lightning's Trainer: built, run, and left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from distill.config.validate import refused
from distill.distributed.graceful_shutdown import Stop, Stopped
from distill.distributed.ranks import check_state, check_world, lost_ranks, watched
from distill.loggers.loggers import loggers
from distill.training.strategies import check_optimizer


def build_trainer(cfg: DictConfig, folder: Path, state: Path | None, **options: Any) -> L.Trainer:
    """Lightning's Trainer as cfg.trainer says, which settles this process's device.

    Args:
        cfg: with `trainer` and `logger`.
        folder: of the run.
        state: of the checkpoint that it goes on from, if it does.
        **options: more of the Trainer's.

    Raises:
        UserError: what it has against its settings, or processes that are not those asked for.
    """
    first_step = int(state.parents[1].name) if state else 0
    with refused():
        trainer: L.Trainer = instantiate(
            cfg.trainer,
            logger=loggers(cfg, folder, first_step),
            default_root_dir=str(folder),
            enable_progress_bar=False,  # TrainingBar counts optimizer steps
            **options,
        )
    check_world(trainer)
    if state:
        check_state(trainer, state)
    watched(trainer)
    return trainer


def build_optimizer(cfg: DictConfig, trainer: L.Trainer) -> Callable[..., torch.optim.Optimizer]:
    """What makes the optimizer that cfg.optimizer names from groups of weights; it is tried on two."""
    optimizer = instantiate(cfg.optimizer.optimizer)
    weights = [torch.nn.Parameter(torch.zeros(1, 1)) for _ in range(2)]
    made = optimizer([{"params": weights, "hidden": [True, False]}])
    check_optimizer(trainer, made)
    return optimizer


def fit(
    trainer: L.Trainer,
    module: L.LightningModule,
    data: L.LightningDataModule,
    state: Path | None,
    stop: Stop,
) -> None:
    """Train; an interruption leaves as KeyboardInterrupt or SystemExit, whatever Lightning makes of it."""
    trainer.callbacks.insert(0, stop)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with lost_ranks(Path(trainer.default_root_dir)):
            trainer.fit(module, data, ckpt_path=state and str(state), weights_only=True)
    except Stopped:
        raise
    except SystemExit:  # what Lightning makes of Ctrl-C
        raise KeyboardInterrupt from None
    finally:
        torch.set_flush_denormal(False)  # a backward pass that failed has left it on
    if stop.by:
        stop.leave(trainer.global_step)
    if trainer.global_step < trainer.max_steps:
        raise KeyboardInterrupt
