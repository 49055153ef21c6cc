"""Loggers of a run: always a CSV file; W&B and TensorBoard if configured.

All loggers use the same names (docs/tracking.md). A tracker that fails (network, full disk, server error)
prints one line and is skipped; the run continues.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from lightning.pytorch.loggers import CSVLogger, Logger

from decode.errors import FollowUpError, UserError
from distill.loggers.tensorboard_logger import TensorBoard
from distill.options.run import LoggerOptions
from distill.utils.run_record import RunRecord

WEIGHTS = ("end", "always", "never")


def loggers(options: LoggerOptions, record: RunRecord, first_step: int) -> list[Logger]:
    """Build the CSV logger and the configured loggers.

    Args:
        options: options of the loggers.
        record: folder and options of the run, for W&B without secrets.
        first_step: first step of this process.

    Raises:
        UserError: an unknown choice, or an extra that is not installed.
    """
    if options.weights not in WEIGHTS:
        raise UserError(f"logger.weights={options.weights}: choose {', '.join(WEIGHTS)}")
    # The CSV logger overwrites its file, so a resumed run uses a new one.
    part = f"from-{first_step}" if first_step else ""
    folder = record.folder
    run_loggers: list[Logger] = [CSVLogger(folder, name="csv", version=part)]
    if options.wandb:
        if find_spec("wandb") is None:
            raise UserError("logger=wandb: it is not installed; pip install wandb, or logger=csv")
        from distill.loggers.wandb_logger import Wandb  # wandb takes a second to import

        run_loggers.append(Wandb(record, options.project, options.weights))
    if options.tensorboard:
        if find_spec("tensorboard") is None:
            raise UserError("logger=tensorboard: it is not installed; pip install 'foredraft[tensorboard]'")
        run_loggers.append(TensorBoard(folder, first_step))
    return run_loggers


@contextmanager
def ending() -> Iterator[None]:
    """Finish the W&B run of the block, so that the next run of this process gets its own."""
    failed = True
    try:
        yield
        failed = False
    except FollowUpError:
        failed = False
        raise
    finally:
        module = sys.modules.get("distill.loggers.wandb_logger")  # imported by a run that logs to it
        if module is not None and module.wandb.run:
            module.finish(failed)
