"""What a run shows while it works: bars on a terminal, a line at each save point, from rank 0 alone."""

from __future__ import annotations

import os
import sys

from lightning.pytorch.utilities import rank_zero_only
from torch import distributed
from tqdm import tqdm

FORMAT = "{desc}: {percentage:3.0f}%|{bar:24}| {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}{postfix}]"
switch = {"on": True}  # trainer.enable_progress_bar, for every bar of the process


def rank_and_world() -> tuple[int, int]:
    """Of this process, whoever launched it: torchrun, SLURM, or Lightning, whose processes have no RANK."""
    for rank, world in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def first_rank() -> bool:
    """Whether this process is the one that speaks and writes."""
    return not getattr(rank_zero_only, "rank", 0)


def bar(total: int, what: str, unit: str, done: int = 0, leave: bool = True) -> tqdm:
    """A bar for `what`; nothing where no terminal shows it."""
    off = None if switch["on"] and first_rank() else True  # None asks whether it is a terminal
    return tqdm(
        total=total,
        initial=done,
        desc=what,
        unit=unit,
        leave=leave,
        disable=off,
        bar_format=FORMAT,
        dynamic_ncols=True,
    )


def say(text: str) -> None:
    """Print a line, above whatever bars are showing."""
    if first_rank():
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
