"""Where a run's numbers go: a CSV file always, W&B and TensorBoard where the configuration says so.

Every run logs the same under the same names (docs/tracking.md). A tracker that fails, for want of a
network, of a disk or of a server that works, says so in one line and is left alone: no run ends for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import wandb
from lightning.pytorch.loggers import CSVLogger, Logger
from omegaconf import DictConfig

from decode.errors import UserError
from distill.loggers.tensorboard_logger import TensorBoard
from distill.loggers.wandb_logger import Wandb, finish
from distill.utils import redact
from distill.utils.provenance import commit

WEIGHTS = ("end", "always", "never")


def loggers(cfg: DictConfig, folder: Path, first_step: int) -> list[Logger]:
    """The CSV file, and what the configuration names beside it.

    Args:
        cfg: with `logger`.
        folder: of the run.
        first_step: that this process makes.

    Raises:
        UserError: a choice that is none, or an extra that is not installed.
    """
    options = cfg.logger
    if options.weights not in WEIGHTS:
        raise UserError(f"logger.weights={options.weights}: choose {', '.join(WEIGHTS)}")
    # The CSV logger begins its file anew, so a resumed run has another.
    part = f"from-{first_step}" if first_step else ""
    made: list[Logger] = [CSVLogger(folder, name="csv", version=part)]
    if options.wandb:
        config = redact.resolved(cfg) | {"commit": commit()}
        made.append(Wandb(folder, options.project, config, options.weights))
    if options.tensorboard:
        if find_spec("tensorboard") is None:
            raise UserError("logger=tensorboard: it is not installed; pip install 'foredraft[tensorboard]'")
        made.append(TensorBoard(folder, first_step))
    return made


@contextmanager
def ending() -> Iterator[None]:
    """End what W&B began in here, so that another run of this process does not go on in it."""
    failed = True
    try:
        yield
        failed = False
    finally:
        if wandb.run:
            finish(failed)
