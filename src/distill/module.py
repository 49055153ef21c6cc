"""The one LightningModule: every drafter x every objective trains through it."""

from __future__ import annotations

import math
from collections.abc import Callable

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from decode.errors import UserError
from decode.target import Target
from distill.data import Micro
from distill.objectives import Objective, Scored
from drafters.base import Batch, Drafter


class DistillModule(L.LightningModule):
    """Reads the frozen target, unrolls the drafter, scores every depth.

    Args:
        target: frozen teacher; not a submodule (see `Target`).
        drafter: what is trained.
        objective: divergence x weights.
        optimizer: called with the trainable parameters.
        warmup: share of the steps over which the learning rate rises.
        final_lr: share of the learning rate that the cosine ends at.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        objective: Objective,
        optimizer: Callable[..., torch.optim.Optimizer],
        warmup: float,
        final_lr: float,
    ) -> None:
        super().__init__()
        self._target = (target,)  # in a tuple, so that nothing registers it
        self.drafter, self.objective, self.optimizer = drafter, objective, optimizer
        self.warmup, self.final_lr = warmup, final_lr

    @property
    def target(self) -> Target:
        """The teacher."""
        return self._target[0]

    @override
    def training_step(self, batch: Micro, batch_idx: int) -> Tensor:
        """One micro-batch; the sum of losses over the anchors of the whole optimizer step."""
        del batch_idx
        read = self.target.read(batch.tokens)
        rows = Batch(batch.tokens, batch.loss_mask, read.taps, read.last, batch.step)
        steps = self.drafter.unroll(rows, self.target)
        total, scored = self.objective(steps, read.last, self.target.head, self.drafter.aux_weights)
        loss = total / batch.anchors
        if not torch.isfinite(loss):
            raise UserError(
                f"training: the loss is {loss.item()} at step {batch.step}; lower optimizer.lr, or "
                "look at the rollouts. The last checkpoint is untouched"
            )
        self._log(loss, scored)
        # One denominator per optimizer step: Lightning divides by the accumulation and DDP by
        # the processes, and this is the one place that undoes both.
        return loss * self.trainer.accumulate_grad_batches * self.trainer.world_size

    def _log(self, loss: Tensor, scored: list[Scored]) -> None:
        values = {"train/loss": loss.detach()}
        for row in scored:
            values[f"train/divergence_{row.depth}"] = row.divergence / row.rows
            values[f"train/top1_{row.depth}"] = row.agreed / row.rows
            values[f"train/overlap_{row.depth}"] = row.overlap / row.rows
        self.log_dict(values)
        self.log("loss", loss.detach(), prog_bar=True, logger=False)

    @override
    def configure_optimizers(self):
        """AdamW or what the yaml says, with a linear warm-up and a cosine."""
        optimizer = self.optimizer([p for p in self.drafter.parameters() if p.requires_grad])
        steps = self.trainer.max_steps
        rise = max(1, round(self.warmup * steps))

        def rate(step: int) -> float:
            if step < rise:
                return (step + 1) / rise
            done = min(1.0, (step - rise) / max(1, steps - rise))
            return self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * done))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
