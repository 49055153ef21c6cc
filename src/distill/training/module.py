"""The LightningModule that trains any drafter with any objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from typing_extensions import override

from decode.errors import UserError
from decode.model.target import Target
from distill.data.batches import MicroBatch
from distill.data.on_policy import OnPolicy
from distill.data.states_ahead import read_states
from distill.distributed.graceful_shutdown import SIGNALS, Stop
from distill.losses.objective import Objective, Scored
from distill.losses.weights import weighted
from distill.training.grad_norm import Gradients, UnusedParameters, maybe_unused_parameters
from distill.training.nonfinite import NonFiniteGuard
from distill.training.optim import hidden_matrices, warm_up_and_decay
from drafters import optional
from drafters.base import Batch, Drafter, supervised_anchors

DEPTHS = 33  # rows per depth in the table of sums, depth 0 first; no drafter unrolls deeper


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Flush denormals to zero inside this context; on a CPU they are about 100x slower.

    Streak weights are products of probabilities and produce many. Only the training step uses this.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class DistillModule(L.LightningModule):
    """Runs the frozen target, unrolls the drafter, and computes the loss at every depth.

    Args:
        target: frozen teacher; not a submodule (see `Target`).
        drafter: what is trained.
        objective: divergence x weights.
        optimizer: called with the trainable parameters.
        warmup: share of the steps over which the learning rate rises.
        final_lr: share of the learning rate that the cosine ends at.
        on_policy: replaces answers by the drafter's own; None: none.
        stop: is told, at every optimizer step, which signals any rank has had.
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
    ) -> None:
        super().__init__()
        self._target = (target,)  # in a tuple, so that nothing registers it
        self.drafter, self.objective, self.optimizer = drafter, objective, optimizer
        self.warmup, self.final_lr, self.on_policy = warmup, final_lr, on_policy
        self.stop = stop or Stop()
        self._mixed: list[MicroBatch] = []  # micro-batches of this optimizer step that are still to come
        self._sums: Tensor | None = None  # (1 + DEPTHS, 6 + 2 T) of this optimizer step so far, of T terms
        self._micros = 0  # micro-batches of this optimizer step that are done
        self._unused: UnusedParameters | None = None  # in one process of several
        self._guard = NonFiniteGuard()
        self._gradients = Gradients(drafter)
        self.loss = math.nan  # of the newest optimizer step, over micro-batches and ranks
        self.strict_loading = not optional.unsaved_names(drafter)  # see `on_save_checkpoint`

    @property
    def target(self) -> Target:
        """The teacher."""
        return self._target[0]

    @override
    def configure_model(self) -> None:
        """Shard the weights under FSDP2."""
        if self.device_mesh is None:
            return
        mesh = self.device_mesh["data_parallel"]
        for block in optional.shardable_modules(self.drafter):
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)
        register_fsdp_forward_method(self, "training_step")

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The loss mask stays on the host, where drafters plan what their layers index."""
        moved = super().transfer_batch_to_device(batch._replace(loss_mask=None), device, dataloader_idx)
        return moved._replace(loss_mask=batch.loss_mask)

    @override
    @flush_denormals()
    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """One micro-batch: its sum of losses over the number of anchors of the whole optimizer step."""
        del batch_idx
        # Seed the global generator (dropout, for example), so that a resumed run draws the same numbers.
        torch.manual_seed(batch.seed)
        if self.on_policy:
            batch = self._mix(batch, self.on_policy)
        self._guard.add(batch)
        # Hidden states of the target: last (B, T, D), taps (B, T, L, D).
        states = batch.target_states
        if states is None:
            states = read_states(self.target, batch.tokens, batch.lengths)
        self.target.join()
        progress = batch.step / self.trainer.max_steps
        rows = Batch(batch.tokens, batch.loss_mask, states.taps, states.last, batch.seed, progress)
        steps = self.drafter.unroll(rows, self.target)
        if batch.weight is not None:
            steps = weighted(steps, batch.weight, batch.tokens.shape[1])
        total, scored = self.objective(
            steps,
            states.last,
            self.target.head,
            self.drafter.aux_weights_at(progress),
            progress,
            batch.tokens,
            self.drafter.confidence,
        )
        loss = total / batch.anchors
        if self.trainer.world_size > 1:
            if self._unused is None:
                self._unused = UnusedParameters(lambda: maybe_unused_parameters(self.drafter))
            loss = self._unused.attach(loss)
        self._micros += 1
        self._add(loss, scored, batch.on_policy / batch.anchors, batch.anchors)
        # The loss is already divided by the anchors of the whole step. Lightning divides it again by the
        # accumulation, and DDP averages gradients over processes; undo both here.
        return loss * self.trainer.accumulate_grad_batches * self.trainer.world_size

    @override
    def on_before_backward(self, loss: Tensor) -> None:
        """Set here and not around `backward`, which DeepSpeed overrides."""
        del loss
        torch.set_flush_denormal(True)

    @override
    def on_after_backward(self) -> None:
        """See `flush_denormals`."""
        torch.set_flush_denormal(False)

    def _mix(self, batch: MicroBatch, on_policy: OnPolicy) -> MicroBatch:
        """Replace answers by the drafter's own, before the first backward pass."""
        if not self._mixed:
            trainer: Any = self.trainer
            micros = [trainer.strategy.batch_to_device(m) for m in trainer.datamodule.micros(batch.step)]
            micros = on_policy(micros, self.drafter, self.target)
            self.target.join()  # ranks have different numbers of rows to run the target on
            local_anchors = torch.stack([supervised_anchors(m.loss_mask, 1).sum() for m in micros]).sum()
            # The loss divides by the anchors of the whole step, so all its answers must be known first.
            anchors = int(trainer.strategy.reduce(local_anchors.to(self.device), reduce_op="sum"))
            self._mixed = [m._replace(anchors=anchors) for m in micros]
        return self._mixed.pop(0)

    def _add(self, loss: Tensor, scored: list[Scored], on_policy: float, anchors: int) -> None:
        sums = torch.zeros(1 + DEPTHS, 6 + 2 * len(self.objective.terms), device=loss.device)
        sums[0, 0], sums[0, 1] = loss.detach(), on_policy
        for row in scored:
            sums[1 + row.depth, 0] = row.rows
            scalars = torch.stack(row[2:-2])
            sums[1 + row.depth, 1:] = torch.cat([scalars, row.divergences, row.losses / anchors])
        self._sums = sums if self._sums is None else self._sums + sums

    def forget(self) -> None:
        """Discard the partial sums of the current optimizer step."""
        self._sums, self._unused, self._micros = None, None, 0
        self._guard.clear()

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check and log loss and gradient norm, equal on every rank, before weights are updated."""
        if self._micros < self.trainer.accumulate_grad_batches:  # DeepSpeed calls it for each micro-batch
            return
        assert self._sums is not None
        self._micros = 0
        if self._unused:
            self._unused.drop_gradients(lambda t: self.trainer.strategy.reduce(t, reduce_op="sum"))
        norms = self._gradients.norms(optimizer) if self._engine is None else self._sums.new_zeros(2)
        for i, number in enumerate(self.stop.received):
            if number:  # a number that is written is no copy to the device; zeros are there
                self._sums[0, 2 + i] = number
        sums, self._sums = self.trainer.strategy.reduce(self._sums, reduce_op="sum"), None
        assert isinstance(sums, Tensor)
        # The only read of a step: the host waits here for the device.
        numbers = torch.cat([sums.flatten(), norms]).tolist()
        norm, head_norm = numbers[-2:]
        (self.loss, on_policy, *rest), *depths = (
            numbers[i : i + sums.shape[1]] for i in range(0, sums.numel(), sums.shape[1])
        )
        self.stop.update(rest[: len(SIGNALS)])
        self._guard.check(self.trainer, self.loss, norm + head_norm)
        values = {"train/loss": self.loss, "train/lr": max(group["lr"] for group in optimizer.param_groups)}
        if self._engine is None:
            values["train/grad_norm"] = norm
        if self.on_policy:
            values["train/on_policy"] = on_policy
        self.log_dict(values | self._by_depth(depths))

    def _by_depth(self, depths: Sequence[Sequence[float]]) -> dict[str, float]:
        """Means to log, from sums of the rows of depth 0, 1, ..."""
        values = {}
        first = max((rows for rows, *_ in depths[1:]), default=0.0)
        names = [term.name for term in self.objective.terms if term.name]
        for number, name in enumerate(names, 6 + len(names)):
            values[f"train/loss_{name}"] = sum(sums[number] for sums in depths)
        for depth, (rows, divergence, top1, alpha, survival, confidence_loss, *parts) in enumerate(depths):
            if rows:
                for name, part in zip(names, parts, strict=False):  # the terms' losses follow
                    values[f"train/divergence_{name}_{depth}"] = part / rows
                values[f"train/divergence_{depth}"] = divergence / rows
                values[f"train/top1_{depth}"] = top1 / rows
                values[f"train/alpha_{depth}"] = alpha / rows
                if depth:
                    values[f"train/survival_{depth}"] = survival / first
                    if self.drafter.confidence:
                        values[f"train/confidence_{depth}"] = confidence_loss / rows
        return values

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
        """DeepSpeed's engine, which clips and steps itself; None under other strategies."""
        return getattr(self.trainer.strategy, "deepspeed_engine", None)

    @override
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Free gradients after the step; Lightning would keep them through the next forward pass."""
        engine = self._engine
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self._micros:
            return
        if engine is not None:  # it knows the norm only after its step
            norm = float(engine.get_global_grad_norm() or 0.0)
            self._guard.check(self.trainer, self.loss, norm)
            self.log("train/grad_norm", norm)
        self._guard.clear()
        optimizer.zero_grad()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave out frozen weights that belong to another model."""
        checkpoint["base"] = self.drafter.settings.get("base")
        for name in optional.unsaved_names(self.drafter):
            checkpoint.get("state_dict", {}).pop(f"drafter.{name}", None)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse adapters whose base model has changed."""
        if checkpoint.get("base") != self.drafter.settings.get("base"):
            raise UserError(
                "drafter.lora: the model that the adapters belong to has changed since this run began; "
                "put it back, or set resume=never"
            )

    @override
    def configure_optimizers(self) -> Any:
        """The configured optimizer with warm-up and cosine decay."""
        groups = self.drafter.param_groups()
        hidden = {id(w) for w in hidden_matrices(self.drafter)}
        optimizer = self.optimizer(
            [
                {"params": g.weights, "hidden": [id(w) in hidden for w in g.weights], "group": number}
                for number, g in enumerate(groups)
            ]
        )
        steps, factors = self.trainer.max_steps, self.rate_factors(optimizer)
        schedule = warm_up_and_decay(optimizer, steps, self.warmup, self.final_lr, factors=factors)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def rate_factors(self, optimizer: torch.optim.Optimizer) -> list[Callable[[float], float]]:
        """Factor of the learning rate of each parameter group: training progress in [0, 1] -> factor."""
        groups = self.drafter.param_groups()
        return [groups[part["group"]].rate for part in optimizer.param_groups]
