"""Build and run Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger

from distill.config.validate import refused
from distill.distributed.graceful_shutdown import Stop, Stopped
from distill.distributed.ranks import check_processes, check_world_size, watch_ranks
from distill.distributed.watchdog import Watchdog
from distill.options.run import OptimizerOptions, TrainerOptions
from distill.training.strategies import check_optimizer
from distill.utils.heap import keep_freed_memory


def build_trainer(
    options: TrainerOptions, loggers: Sequence[Logger], folder: Path, state: Path | None, **more: Any
) -> L.Trainer:
    """Build Lightning's Trainer, which decides the device of this process.

    Args:
        options: of the Trainer.
        loggers: of the run.
        folder: of the run.
        state: of the checkpoint that training is resumed from, or None.
        **more: arguments of the Trainer.

    Raises:
        UserError: invalid settings, or another number of processes than requested.
    """
    with refused():
        trainer = options.build(
            logger=list(loggers),
            default_root_dir=str(folder),
            enable_progress_bar=False,  # TrainingBar counts optimizer steps
            enable_checkpointing=False,  # ScoreCheckpoint saves
            enable_model_summary=False,
            use_distributed_sampler=False,  # batches are a function of the step and the rank
            **more,
        )
    check_world_size(trainer)
    if state:
        check_processes(trainer, state)
    watch_ranks(trainer)
    return trainer


def build_optimizer(options: OptimizerOptions, trainer: L.Trainer) -> Callable[..., torch.optim.Optimizer]:
    """The function that builds the optimizer from parameter groups, after a test on two parameters."""
    weights = [torch.nn.Parameter(torch.zeros(1, 1)) for _ in range(2)]
    # One kernel for all weights; not in fp16, where it would unscale gradients after they are clipped.
    fused = options.fuses and not str(trainer.precision).startswith("16")
    build = partial(options.build, fused=True) if fused else options.build
    check_optimizer(trainer, build([{"params": weights, "hidden": [True, False]}]))
    return build


def fit(
    trainer: L.Trainer,
    module: L.LightningModule,
    data: L.LightningDataModule,
    state: Path | None,
    stop: Stop,
    watchdog: Watchdog,
) -> None:
    """Train; an interruption leaves as KeyboardInterrupt or SystemExit, whatever Lightning makes of it."""
    keep_freed_memory()
    trainer.callbacks[:0] = [stop, watchdog]  # pyright: ignore[reportAttributeAccessIssue]
    try:
        trainer.fit(module, data, ckpt_path=state and str(state), weights_only=True)
    except Stopped:
        raise
    except SystemExit:  # what Lightning makes of Ctrl-C
        raise KeyboardInterrupt from None
    finally:
        watchdog.end()
        torch.set_flush_denormal(False)  # a backward pass that failed has left it on
    if stop.signal_name:
        stop.exit(trainer.global_step)
    if trainer.global_step < trainer.max_steps:
        raise KeyboardInterrupt
