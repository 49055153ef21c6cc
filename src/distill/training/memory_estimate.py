"""What a training step will take of the memory, before the first one; and what it has taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from torch import nn
from typing_extensions import override

from distill.data.batches import Micro
from distill.data.datamodule import served
from distill.training.device_memory import Made, available, held, peak, reset_peak, said, size
from distill.training.module import DistillModule
from distill.training.optim import hidden_matrices
from distill.utils.progress import say

SIDE = 32  # of the matrix that an optimizer's state is counted on


class Sharding(NamedTuple):
    """How a strategy spreads what an optimizer needs.

    Attributes:
        stage: ZeRO's: 1 divides the optimizer's state, 2 gradients too, 3 weights too (FSDP2 is that).
        world: processes that share.
        master: whether an fp32 copy of the weights belongs to the state (DeepSpeed).
        offload: whether the state is in the host's memory.
        buckets: whether gradients exist twice, once to be sent (DDP).
    """

    stage: int = 0
    world: int = 1
    master: bool = False
    offload: bool = False
    buckets: bool = False

    @classmethod
    def of(cls, trainer: L.Trainer) -> Sharding:
        """That of the trainer's strategy."""
        strategy: Any = trainer.strategy
        if isinstance(strategy, DeepSpeedStrategy):
            zero = (strategy.config or {}).get("zero_optimization", {})
            offload = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
            return cls(zero.get("stage", 0), trainer.world_size, True, offload)
        if isinstance(strategy, ModelParallelStrategy):
            return cls(3, trainer.world_size)
        return cls(buckets=isinstance(strategy, DDPStrategy))


@dataclass
class Footprint:
    """Bytes on this rank's device; 0 where it is not known.

    Attributes:
        held: before the first step.
        target: of that, the target's weights.
        drafter: of that, the drafter's.
        taps: of that, what is kept of the target's rows.
        gradients: of all that trains.
        moments: of the optimizer, and its own copy of the weights if it has one.
        forward: the most that a forward pass over the largest micro-batch makes.
        kept: what is left of it for the backward pass.
        rows: of that micro-batch.
        length: of its rows, in tokens.
        accumulates: whether gradients are there when a forward pass begins.
    """

    held: int = 0
    target: int = 0
    drafter: int = 0
    taps: int = 0
    gradients: int = 0
    moments: int = 0
    forward: int = 0
    kept: int = 0
    rows: int = 0
    length: int = 0
    accumulates: bool = False

    @property
    def total(self) -> int:
        """The most at one time: at the end of a forward pass, or of the backward pass behind it."""
        forward = self.forward + self.gradients * self.accumulates
        return self.held + self.moments + max(forward, self.kept + self.gradients)

    def line(self, room: int) -> str:
        """For people, of a device with `room` bytes."""
        pass_ = f"a forward pass of {self.rows} x {self.length} tokens {said(self.forward)}"
        parts = (
            f"memory: about {said(self.total)} of {said(room)}: {said(self.held)} now (target "
            f"{said(self.target)}, drafter {said(self.drafter)}, kept taps {said(self.taps)}), gradients "
            f"{said(self.gradients)}, optimizer {said(self.moments)}, "
            f"{pass_ if self.forward else 'activations aside'}"
        )
        return parts + (". That is more than there is" if self.total > room else "")


def state_per_weight(make: Callable[..., torch.optim.Optimizer]) -> tuple[float, float]:
    """Numbers that an optimizer keeps for a weight of a hidden matrix, and of any other: it is asked.

    Args:
        make: called with groups of parameters, as `DistillModule` does.
    """
    weights = [nn.Parameter(torch.zeros(SIDE, SIDE)) for _ in range(2)]
    made = make([{"params": weights, "hidden": [True, False]}])
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    made.step()
    parts = getattr(made, "parts", [made])
    states = [next((part.state[w] for part in parts if w in part.state), {}) for w in weights]
    first, second = (
        sum(t.numel() for t in state.values() if isinstance(t, torch.Tensor)) // SIDE**2 for state in states
    )
    return float(first), float(second)


class MemoryWatch(L.Callback):
    """Says before the first step what one will take, measures it, and knows where training is.

    The forward pass of the largest micro-batch of the epoch runs once before anything is trained, so
    that what it makes is counted and not guessed, and a batch that is too large shows at once. It is
    the same micro-batch on every rank, and leaves nothing behind. Under ZeRO-3 it is left out: the
    engine records the order of its first pass, and would take this one for a training step.

    Args:
        try_largest: whether it runs.

    Attributes:
        footprint: of a step.
        peak: bytes, the most in any training step so far.
        phase: of a step, in words; "" between steps.
        step: the optimizer step that it is of.
    """

    def __init__(self, try_largest: bool) -> None:
        self.try_largest, self.footprint = try_largest, Footprint()
        self.peak, self.phase, self.step = 0, "", 0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, DistillModule)
        device, data = pl_module.device, served(trainer)
        sharding = Sharding.of(trainer)
        self.step = self._begin = trainer.global_step
        if trainer.global_step >= trainer.max_steps:
            return
        largest: Micro = data.batches.of(self.step).largest(self.step)
        self.footprint = standing(pl_module, sharding, trainer.accumulate_grad_batches > 1)
        self.footprint.taps = data.kept_bytes()
        self.footprint.rows, self.footprint.length = largest.tokens.shape
        if self.try_largest and not (sharding.stage == 3 and sharding.master):
            self.phase = "a trial of the largest micro-batch ahead"
            reset_peak(device)
            self._try(trainer, pl_module, trainer.strategy.batch_to_device(largest))
            self.phase = ""
        say(self.footprint.line(available(device)))

    def _try(self, trainer: L.Trainer, module: DistillModule, micro: Micro) -> None:
        on_policy, module.on_policy = module.on_policy, None
        made = Made()
        try:
            with torch.random.fork_rng([module.device] if module.device.type == "cuda" else []), made:
                loss = trainer.strategy.training_step(micro, 0)
                self.footprint.kept = made.now
                del loss
        finally:
            self.footprint.forward = made.peak
            module.on_policy = on_policy
            module.forget()

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
        if self.step == self._begin and trainer.global_step > self._begin:
            rows, length = batch.tokens.shape
            say(f"memory: {said(self.peak)} at the most in the first step, of {rows} x {length} tokens")


def standing(module: DistillModule, sharding: Sharding, accumulates: bool) -> Footprint:
    """What is there whatever the batch: weights, gradients and the optimizer's state."""
    trained = [weight for weight in module.drafter.parameters() if weight.requires_grad]
    whole = sum(getattr(weight, "ds_numel", weight.numel()) for weight in trained)
    hidden = {id(weight) for weight in hidden_matrices(module.drafter)}
    matrices = sum(getattr(w, "ds_numel", w.numel()) for w in trained if id(w) in hidden)
    itemsize = trained[0].itemsize
    first, other = state_per_weight(module.optimizer)
    state = (itemsize if not sharding.master else 4) * (first * matrices + other * (whole - matrices))
    moments = (state + 4 * whole * sharding.master) / (sharding.world if sharding.stage else 1)
    gradients = whole * itemsize / (sharding.world if sharding.stage > 1 else 1)
    return Footprint(
        held=held(module.device),
        target=size(module.target.model.parameters()),
        drafter=size(module.drafter.parameters()),
        gradients=int(gradients * (2 if sharding.buckets else 1)),
        moments=0 if sharding.offload else int(moments),
        accumulates=accumulates,
    )
