"""Gradient norm and clipping; zero gradients for parameters that a batch does not use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drafters import optional
from drafters.base import Drafter


class Gradients:
    """Norms and clipping of a drafter's gradients.

    The confidence head is kept apart: its gradient is not clipped and must not shrink the others.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._norm: Tensor | None = None  # of the clipped gradients

    def norms(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """(2,) gradient norms of the drafter and of its confidence head, over all ranks; not synchronized."""
        drafter_norm, head_norm = (
            torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
            for weights in self._weights(optimizer)
        )
        self._norm = drafter_norm
        total = _full(drafter_norm)
        return torch.stack([total, _full(head_norm).to(total)])

    def clip(
        self,
        module: L.LightningModule,
        optimizer: torch.optim.Optimizer,
        value: float | None,
        algorithm: str | None,
    ) -> None:
        """Clip all gradients except the confidence head's.

        Clipping by norm uses the norm that `norms` computed. Lightning does the rest: clipping by value,
        and rejecting an optimizer that unscales gradients of fp16 itself.

        Args:
            module: whose trainer clips.
            optimizer: of the weights.
            value: threshold; None: no clipping.
            algorithm: `value` or `norm`; None means `norm`.
        """
        clipped, unclipped = self._weights(optimizer)
        scaled = getattr(module.trainer.precision_plugin, "scaler", None) is not None
        if algorithm != "value" and not (scaled and getattr(optimizer, "_step_supports_amp_scaling", False)):
            if value:
                assert self._norm is not None
                torch.nn.utils.clip_grads_with_norm_(clipped, value, self._norm)
            return
        gradients = [weight.grad for weight in unclipped]
        for weight in unclipped:
            weight.grad = None
        module.clip_gradients(optimizer, value, algorithm)
        for weight, gradient in zip(unclipped, gradients, strict=True):
            weight.grad = gradient

    def _weights(self, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[Tensor]]:
        """Weights whose gradients are clipped, and those of the confidence head."""
        head = self.drafter.confidence
        unclipped = {id(weight): weight for weight in head.parameters()} if head else {}
        every = [weight for group in optimizer.param_groups for weight in group["params"]]
        return [weight for weight in every if id(weight) not in unclipped], list(unclipped.values())


def _full(norm: Tensor) -> Tensor:
    """The norm over all ranks where gradients are sharded (FSDP2)."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class UnusedParameters:
    """Handles parameters that a step does not use, so that several processes train as one does.

    Answers may be too short for a deep head. In one process its gradient is then None, and the optimizer
    skips it. DDP waits for a gradient from every process; a zero gradient would let the optimizer
    step on momentum, and Muon take a full-size step.

    Args:
        weights: returns the trainable parameters as they are now: FSDP2 shows them unsharded during
            forward and backward, sharded elsewhere.
    """

    def __init__(self, weights: Callable[[], Sequence[nn.Parameter]]) -> None:
        self.weights = weights
        self.use_counts = torch.zeros(len(weights()))

    def attach(self, loss: Tensor) -> Tensor:
        """Attach unused parameters to the loss of a micro-batch with gradient zero."""
        used_ids, weights = _reached_leaves(loss), self.weights()
        used = torch.tensor([id(weight) in used_ids for weight in weights])
        self.use_counts += used
        sums = [w.sum() for w, is_used in zip(weights, used.tolist(), strict=True) if not is_used]
        return loss + 0.0 * torch.stack(sums).sum() if sums else loss

    def drop_gradients(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Set the gradient to None for weights that no process used in this optimizer step.

        Args:
            sum_over_ranks: sums a tensor over processes.
        """
        weights = self.weights()
        total = sum_over_ranks(self.use_counts.to(weights[0].device)).tolist() if weights else []
        self.use_counts.zero_()
        for weight, count in zip(weights, total, strict=True):
            if not count:
                weight.grad = None


def maybe_unused_parameters(drafter: Drafter) -> list[nn.Parameter]:
    """Trainable parameters outside the blocks that every unroll runs; short answers may not use them."""
    always_used = {id(w) for part in optional.shardable_modules(drafter) for w in part.parameters()}
    return [w for w in drafter.parameters() if w.requires_grad and id(w) not in always_used]


def _reached_leaves(loss: Tensor) -> set[int]:
    """Python ids of the leaf tensors in the autograd graph of a loss."""
    stack, seen, leaves = [loss.grad_fn], set(), set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves.add(id(getattr(node, "variable", None)))  # only AccumulateGrad nodes have a variable
        stack += [parent for parent, _ in node.next_functions]
    return leaves
