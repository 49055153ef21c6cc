"""Out of memory in a training step: one line that says where, how much, and what to change."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import lightning as L
import torch
from omegaconf import DictConfig
from typing_extensions import override

from decode.errors import TooLargeError
from distill.training.device_memory import available, peak, said
from distill.training.memory_estimate import Footprint, MemoryWatch, Sharding
from distill.training.module import DistillModule
from distill.utils.run_folder import checkpoints
from drafters.base import Drafter

# What allocators say: torch's on a CPU, CUDA's, and the libraries' that take memory beside torch.
SAYS = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
BLOCKS = 5  # (rows, V) blocks in fp32 that the objective holds at a time
REMADE = 0.3  # of what a backward pass needs, if layers are made again in it; docs/training_speed.md
SHORTEST = 3  # tokens of a row


class Change(NamedTuple):
    """An option that makes a run smaller, and by about how much."""

    options: str
    saves: float  # bytes
    note: str = ""

    @override
    def __str__(self) -> str:
        """As advice."""
        return f"{self.options} (about {said(self.saves)} less{self.note and f', {self.note}'})"


@contextmanager
def explained(
    trainer: L.Trainer, watch: MemoryWatch, cfg: DictConfig, module: DistillModule
) -> Iterator[None]:
    """Turn an allocation that failed within a training step into a `TooLargeError` with advice.

    Args:
        trainer: that runs inside.
        watch: one of its callbacks.
        cfg: of the run.
        module: that is trained.

    Raises:
        TooLargeError: the device, the machine or a limit of the process had no more.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not (watch.phase and exhausted(error)):
            raise
        device = trainer.strategy.root_device
        most, wanted = max(watch.peak, peak(device)), WANTED.search(str(error))
        traceback.clear_frames(error.__traceback__)  # they hold what was too much
    else:
        return
    found = checkpoints(Path(trainer.default_root_dir))
    kept = f"{found[-1]} is whole (drafter.init_from goes on from it)" if found else "nothing was saved yet"
    advice = changes(cfg, watch.footprint, module, Sharding.of(trainer))
    raise TooLargeError(
        f"out of memory in {watch.phase} of step {watch.step}: {said(most)} in use at the most"
        f"{f', {wanted[1]} more wanted' if wanted else ''}, of {said(available(device))} on {device}; "
        f"change, by effect: {'; '.join(map(str, advice)) or 'the machine'}; {kept}"
    )


def exhausted(error: BaseException) -> bool:
    """Whether this is an allocation that failed."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or any(words in str(error) for words in SAYS)


def changes(cfg: DictConfig, need: Footprint, module: DistillModule, sharding: Sharding) -> list[Change]:
    """What makes this run smaller, most first: options with values that halve something.

    Args:
        cfg: of the run.
        need: of one step; of a forward pass that failed, what it had come to.
        module: that is trained.
        sharding: that it has.
    """
    rows = module.objective.rows(module.target.head)
    logits = BLOCKS * 4 * module.target.head.weight.shape[0]  # of a row
    found = _of_batch(cfg, need, module, max(need.forward - rows * logits, need.kept))
    found += _of_device(module, need, sharding)
    if rows > 1:
        found.append(Change(f"logits_rows={rows // 2}", logits * (rows - rows // 2)))
    if need.taps:
        found.append(Change("taps=online", need.taps, "slower"))
    return sorted((change for change in found if change.saves > 0), key=lambda change: -change.saves)


def _of_batch(cfg: DictConfig, need: Footprint, module: DistillModule, most: float) -> list[Change]:
    """Of what a micro-batch makes: `most` bytes at a time, logits aside."""
    found, batch, longest = [], int(cfg.batch_size), need.length
    depth = cfg.drafter.get("depth") or 1
    if batch > 1:
        parts = next(p for p in range(2, batch + 1) if batch % p == 0)
        micros = parts * cfg.trainer.accumulate_grad_batches
        options = f"batch_size={batch // parts} trainer.accumulate_grad_batches={micros}"
        found.append(Change(options, most * (1 - 1 / parts), "the same step"))
    able = type(module.drafter).checkpoint_gradients is not Drafter.checkpoint_gradients
    if able and not cfg.gradient_checkpointing:
        found.append(Change("gradient_checkpointing=true", need.kept * REMADE, "the same step, slower"))
    if depth > 1:
        found.append(Change(f"drafter.depth={depth // 2}", need.kept * (1 - depth // 2 / depth)))
    if longest > SHORTEST:
        shorter = max(SHORTEST, longest // 2)
        found.append(Change(f"max_tokens={shorter}", most * (1 - shorter / longest), "cuts rows"))
    return found


def _of_device(module: DistillModule, need: Footprint, sharding: Sharding) -> list[Change]:
    """Of what stands there in every step."""
    found = []
    if module.target.dtype in (torch.float32, torch.float64):
        halves = 2 / module.target.dtype.itemsize
        found.append(Change("target.dtype=bfloat16", need.target * (1 - halves)))
    if module.device.type == "cuda":
        if sharding.world > 1 and sharding.stage < 3:
            stands = need.drafter + need.gradients + need.moments
            found.append(Change("trainer=deepspeed_3", stands * (1 - 1 / sharding.world)))
        if not sharding.offload:
            found.append(Change("trainer=deepspeed_offload", need.moments, "slower"))
    return found
