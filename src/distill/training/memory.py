"""Memory of a training step: trial of the largest micro-batch, measurement, and advice when it runs out."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from decode.errors import TooLargeError
from decode.hardware import memory_bytes
from distill.data.datamodule import rollout_data
from distill.training.module import DistillModule
from distill.training.strategies import shards_weights
from distill.utils.progress import say
from distill.utils.run_folder import checkpoints
from drafters import optional

GIB, MIB = 2**30, 2**20
PROCESS = Path("/proc/self")
# Messages of allocators: torch on a CPU, CUDA, and libraries that allocate outside torch.
ALLOCATION_ERRORS = (
    "can't allocate memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
MIN_TOKENS = 3  # of a row


class Sizes(NamedTuple):
    """Options of a run that determine its memory."""

    batch_size: int
    depth: int
    gradient_checkpointing: bool


class MemoryWatch(L.Callback):
    """Measures peak memory, and runs the largest micro-batch forward before training starts.

    A batch that is too large then fails at once. Every rank runs the same micro-batch, and no training
    state changes. Skipped under ZeRO-3, whose engine records the order of modules in its first pass.

    Args:
        try_largest: whether to run the largest micro-batch.

    Attributes:
        peak: peak memory of any training step so far, in bytes.
        phase: of the current step, in words; "" between steps.
        step: number of the current optimizer step.
        longest: tokens of the longest remaining row.
    """

    def __init__(self, try_largest: bool) -> None:
        self.try_largest = try_largest
        self.phase, self.peak, self.step, self.longest = "", 0, 0, 0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, DistillModule)
        self.step = self._first_step = trainer.global_step
        if trainer.global_step >= trainer.max_steps:
            return
        micro = rollout_data(trainer).batches.of(self.step).largest(self.step)
        rows, self.longest = micro.tokens.shape
        strategy = trainer.strategy
        if not self.try_largest or (isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3):
            return
        self.phase = "a trial of the largest micro-batch ahead"
        device = pl_module.device
        reset_peak(device)
        on_policy, pl_module.on_policy = pl_module.on_policy, None
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                strategy.training_step(strategy.batch_to_device(micro), 0)
        finally:
            pl_module.on_policy = on_policy
            pl_module.forget()
        self.phase = ""
        gradients = num_bytes(weight for weight in pl_module.drafter.parameters() if weight.requires_grad)
        say(
            f"memory: {readable(peak(device))} of {readable(memory_bytes(device))} in a trial of the largest "
            f"micro-batch, {rows} x {self.longest} tokens; gradients ({readable(gradients)}) and the "
            "optimizer's state come on top"
        )

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.phase, self.step = "the forward pass", batch.step
        reset_peak(pl_module.device)

    @override
    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor
    ) -> None:
        self.phase = "the backward pass"

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.phase = "the optimizer's step"

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.phase = ""
        self.peak = max(self.peak, peak(pl_module.device))
        if self.step == self._first_step and trainer.global_step > self._first_step:
            rows, length = batch.tokens.shape
            say(f"memory: {readable(self.peak)} at the most in the first step, of {rows} x {length} tokens")


@contextlib.contextmanager
def explain_out_of_memory(
    trainer: L.Trainer, watch: MemoryWatch, module: DistillModule, sizes: Sizes
) -> Iterator[None]:
    """Turn an allocation failure in a training step into a `TooLargeError` with advice.

    Args:
        trainer: that runs inside the context.
        watch: one of its callbacks.
        module: being trained.
        sizes: of the run.

    Raises:
        TooLargeError: the device or the process is out of memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not (watch.phase and is_out_of_memory(error)):
            raise
        device = trainer.strategy.root_device
        most, requested = max(watch.peak, peak(device)), REQUESTED.search(str(error))
        traceback.clear_frames(error.__traceback__)  # they hold tensors
    else:
        return
    saved = checkpoints(Path(trainer.default_root_dir))
    resume = f"{saved[-1]} is whole (set drafter.init_from to it)" if saved else "nothing was saved yet"
    more = f", {requested[1]} more wanted" if requested else ""
    advice = smaller_options(trainer, watch, module, sizes)
    raise TooLargeError(
        f"out of memory in {watch.phase} of step {watch.step}: {readable(most)} in use at the most{more}, "
        f"of {readable(memory_bytes(device))} on {device}; "
        f"lower it with {'; '.join(advice) or 'another machine'}; {resume}"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is an allocation failure."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(message in str(error) for message in ALLOCATION_ERRORS)


def smaller_options(trainer: L.Trainer, watch: MemoryWatch, module: DistillModule, sizes: Sizes) -> list[str]:
    """Options that reduce memory; those that do not change the training step come first."""
    advice = _same_step(trainer, module, sizes)
    if watch.longest > MIN_TOKENS:
        advice.append(f"max_tokens={max(MIN_TOKENS, watch.longest // 2)} (cuts rows)")
    if sizes.depth > 1:
        advice.append(f"drafter.depth={sizes.depth // 2} (shallower drafts)")
    if module.target.dtype in (torch.float32, torch.float64):
        advice.append("target.dtype=bfloat16 (rounds the target)")
    return advice


def _same_step(trainer: L.Trainer, module: DistillModule, sizes: Sizes) -> list[str]:
    advice, batch = [], sizes.batch_size
    if batch > 1:
        parts = next(p for p in range(2, batch + 1) if batch % p == 0)
        accumulate = parts * trainer.accumulate_grad_batches
        advice.append(
            f"batch_size={batch // parts} trainer.accumulate_grad_batches={accumulate} (the same step)"
        )
    can_checkpoint = isinstance(module.drafter, optional.CheckpointsGradients)
    if can_checkpoint and not sizes.gradient_checkpointing:
        advice.append("gradient_checkpointing=true (the same step, slower)")
    rows = module.objective.rows(module.target.head)
    if rows > 1:
        advice.append(f"logits_rows={rows // 2} (the same step)")
    if rollout_data(trainer).memory_bytes():
        advice.append("taps=online (the same step, slower)")
    if module.device.type == "cuda":
        if trainer.world_size > 1 and not shards_weights(trainer):
            advice.append("trainer=deepspeed_3 (the same step)")
        if not isinstance(trainer.strategy, DeepSpeedStrategy):
            advice.append("trainer=deepspeed_offload (the same step, slower)")
    return advice


def readable(count: float) -> str:
    """Bytes in MiB or GiB."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors on this rank; of sharded ones (FSDP2, ZeRO-3) the local shard."""
    local = [t.to_local() if isinstance(t, DTensor) else getattr(t, "ds_tensor", t) for t in tensors]
    return sum(t.numel() * t.itemsize for t in local)


def peak(device: torch.device) -> int:
    """Peak bytes since `reset_peak`; on a CPU of the whole process, Python and libraries included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        lines = (PROCESS / "status").read_text().splitlines()
        if sizes := [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]:
            return sizes[0]
    # Peak since the process started: KiB on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak(device: torch.device) -> None:
    """Reset the peak; on systems without a reset (macOS) it stays the whole process's."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            (PROCESS / "clear_refs").write_text("5")
