"""The one LightningModule: every drafter x every objective trains through it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from typing_extensions import override

from decode.errors import UserError
from decode.model.target import Target
from distill.data.batches import Micro
from distill.data.on_policy import OnPolicy
from distill.distributed.graceful_shutdown import SIGNALS, Stop
from distill.losses.objective import Objective, Scored
from distill.losses.weights import weighted
from distill.training.grad_norm import Gradients, Reached, exposed
from distill.training.nonfinite import Watched
from distill.training.optim import hidden_matrices, warm_up_and_decay
from distill.training.time_budget import Budget
from drafters.base import Batch, Drafter, supervised_anchors

DEPTHS = 33  # rows of the table of sums that ranks add up, depth 0 first; no drafter unrolls more


@contextmanager
def flushed() -> Iterator[None]:
    """Numbers too small for the exponent are 0 within: on a CPU each of them costs a hundred others.

    Streak weights are products of chances, and make many. Nothing else runs so, decoding least of all.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class DistillModule(L.LightningModule):
    """Reads the frozen target, unrolls the drafter, scores every depth.

    Args:
        target: frozen teacher; not a submodule (see `Target`).
        drafter: what is trained.
        objective: divergence x weights.
        optimizer: called with the trainable parameters.
        warmup: share of the steps over which the learning rate rises.
        final_lr: share of the learning rate that the cosine ends at.
        on_policy: replaces answers by the drafter's own; None: none.
        stop: is told, at every optimizer step, which signals any rank has had.
        budget: ends the run, and says what the learning rate is until then; None: the number of steps does.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        objective: Objective,
        optimizer: Callable[..., torch.optim.Optimizer],
        warmup: float,
        final_lr: float,
        on_policy: OnPolicy | None = None,
        stop: Stop | None = None,
        budget: Budget | None = None,
    ) -> None:
        super().__init__()
        self._target = (target,)  # in a tuple, so that nothing registers it
        self.drafter, self.objective, self.optimizer = drafter, objective, optimizer
        self.warmup, self.final_lr, self.on_policy = warmup, final_lr, on_policy
        self.stop, self.budget = stop or Stop(), budget
        self._mixed: list[Micro] = []  # micro-batches of this optimizer step that are still to come
        self._sums: Tensor | None = None  # (1 + DEPTHS, 6) of this optimizer step so far
        self._micros = 0  # micro-batches of this optimizer step that are done
        self._reached: Reached | None = None  # in one process of several
        self._watched = Watched()
        self._gradients = Gradients(drafter)
        self.loss = math.nan  # of the newest optimizer step, over micro-batches and ranks
        self.strict_loading = not drafter.unsaved_names  # see `on_save_checkpoint`

    @property
    def target(self) -> Target:
        """The teacher."""
        return self._target[0]

    @override
    def configure_model(self) -> None:
        """Under FSDP2, cut the weights up; elsewhere, nothing."""
        if self.device_mesh is None:
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.drafter.shardable_modules():
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)
        register_fsdp_forward_method(self, "training_step")

    @override
    @flushed()
    def training_step(self, batch: Micro, batch_idx: int) -> Tensor:
        """One micro-batch; the sum of losses over the anchors of the whole optimizer step."""
        del batch_idx
        # What draws from the global generator (dropout, say) gives the same again after a resume.
        torch.manual_seed(batch.seed)
        if self.on_policy:
            batch = self._mix(batch, self.on_policy)
        self._watched.add(batch)
        read = batch.read or self.target.read(batch.tokens, batch.lengths)
        self.target.join()
        progress = batch.step / self.trainer.max_steps
        rows = Batch(batch.tokens, batch.loss_mask, read.taps, read.last, batch.seed, progress)
        steps = self.drafter.unroll(rows, self.target)
        if batch.weight is not None:
            steps = weighted(steps, batch.weight, batch.tokens.shape[1])
        total, scored = self.objective(
            steps,
            read.last,
            self.target.head,
            self.drafter.aux_weights_at(progress),
            progress,
            batch.tokens,
            self.drafter.confidence,
        )
        loss = total / batch.anchors
        if self.trainer.world_size > 1:
            if self._reached is None:
                self._reached = Reached(lambda: exposed(self.drafter))
            loss = self._reached.join(loss)
        self._micros += 1
        self._add(loss, scored, batch.on_policy / batch.anchors)
        # One denominator per optimizer step: Lightning divides by the accumulation and DDP by
        # the processes, and this is the one place that undoes both.
        return loss * self.trainer.accumulate_grad_batches * self.trainer.world_size

    @override
    def on_before_backward(self, loss: Tensor) -> None:
        """Not `backward`, which DeepSpeed's engine does in its own way."""
        del loss
        torch.set_flush_denormal(True)

    @override
    def on_after_backward(self) -> None:
        """See `flushed`."""
        torch.set_flush_denormal(False)

    def _mix(self, batch: Micro, on_policy: OnPolicy) -> Micro:
        """The drafter answers before the first backward of a step: only then are its anchors known."""
        if not self._mixed:
            trainer: Any = self.trainer
            micros = [trainer.strategy.batch_to_device(m) for m in trainer.datamodule.micros(batch.step)]
            micros = on_policy(micros, self.drafter, self.target)
            self.target.join()  # ranks have other numbers of rows to read
            own = torch.stack([supervised_anchors(m.loss_mask, 1).sum() for m in micros]).sum()
            anchors = int(trainer.strategy.reduce(own, reduce_op="sum"))
            self._mixed = [m._replace(anchors=anchors) for m in micros]
        return self._mixed.pop(0)

    def _add(self, loss: Tensor, scored: list[Scored], on_policy: float) -> None:
        sums = torch.zeros(1 + DEPTHS, 6, device=loss.device)
        sums[0, 0], sums[0, 1] = loss.detach(), on_policy
        for row in scored:
            sums[1 + row.depth] = torch.tensor(row[1:])
        self._sums = sums if self._sums is None else self._sums + sums

    def forget(self) -> None:
        """Drop what there is of an optimizer step, which then begins anew."""
        self._sums, self._reached, self._micros = None, None, 0
        self._watched.clear()

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check and log loss and gradient: the same on every rank, before any weight moves."""
        if self._micros < self.trainer.accumulate_grad_batches:  # DeepSpeed's engine is asked every time
            return
        assert self._sums is not None
        self._micros = 0
        if self._reached:
            self._reached.leave_out(lambda t: self.trainer.strategy.reduce(t, reduce_op="sum"))
        norms = self._gradients.norms(optimizer) if self._engine is None else torch.zeros(2)
        self._sums[0, 2 : 2 + len(SIGNALS)] = torch.tensor(self.stop.heard)
        sums, self._sums = self.trainer.strategy.reduce(self._sums, reduce_op="sum"), None
        assert isinstance(sums, Tensor)
        (self.loss, on_policy, *rest), *depths = sums.tolist()
        self.stop.agree(rest[: len(SIGNALS)])
        norm, apart = norms.tolist()  # already there: the sums have waited for all that came before
        self._watched.check(self.trainer, self.loss, norm + apart)
        values = {"train/loss": self.loss}
        if self._engine is None:
            values["train/grad_norm"] = norm
        if self.on_policy:
            values["train/on_policy"] = on_policy
        first = max((rows for rows, *_ in depths[1:]), default=0.0)
        for depth, (rows, divergence, agreed, alpha, kept, unsure) in enumerate(depths):
            if rows:
                values[f"train/divergence_{depth}"] = divergence / rows
                values[f"train/top1_{depth}"] = agreed / rows
                values[f"train/alpha_{depth}"] = alpha / rows
                if depth:
                    values[f"train/survival_{depth}"] = kept / first
                    if self.drafter.confidence:
                        values[f"train/confidence_{depth}"] = unsure / rows
        self.log_dict(values)

    @override
    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """See `Gradients.clip`."""
        if self._engine is None:
            self._gradients.clip(self, optimizer, gradient_clip_val, gradient_clip_algorithm)

    @property
    def _engine(self) -> Any:
        """DeepSpeed's, which clips and steps by itself."""
        return getattr(self.trainer.strategy, "deepspeed_engine", None)

    @override
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Lightning would keep the gradients until the objective has made the next ones."""
        engine = self._engine
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self._micros:
            return
        if engine is not None:  # it says what the norm was when it has stepped
            norm = float(engine.get_global_grad_norm() or 0.0)
            self._watched.check(self.trainer, self.loss, norm)
            self.log("train/grad_norm", norm)
        self._watched.clear()
        optimizer.zero_grad()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Without what is another model's and frozen."""
        checkpoint["base"] = self.drafter.settings.get("base")
        for name in self.drafter.unsaved_names:
            checkpoint.get("state_dict", {}).pop(f"drafter.{name}", None)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Beside the same one."""
        if checkpoint.get("base") != self.drafter.settings.get("base"):
            raise UserError(
                "drafter.lora: the model that the adapters belong to has changed since this run began; "
                "put it back, or set resume=never"
            )

    @override
    def configure_optimizers(self) -> Any:
        """AdamW or what the yaml says, with a linear warm-up and a cosine."""
        groups = self.drafter.param_groups()
        hidden = {id(w) for w in hidden_matrices(self.drafter)}
        optimizer = self.optimizer(
            [
                {"params": g.weights, "hidden": [id(w) in hidden for w in g.weights], "group": number}
                for number, g in enumerate(groups)
            ]
        )
        factors = [groups[part["group"]].rate for part in optimizer.param_groups]
        if self.budget:
            schedule = self.budget.schedule(optimizer, self.warmup, self.final_lr, factors)
        else:
            steps = self.trainer.max_steps
            schedule = warm_up_and_decay(optimizer, steps, self.warmup, self.final_lr, factors=factors)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
