"""The norm of an optimizer step's gradient, and clipping by it."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from drafters.base import Drafter


class Gradients:
    """Of a drafter, and of its confidence head apart, which is not to shorten the others."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._norm: Tensor | None = None  # of what is clipped

    def norms(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """(2,) norms of the two, over all ranks; not yet waited for."""
        ours, apart = (
            torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
            for weights in self._weights(optimizer)
        )
        self._norm = ours
        return torch.stack([_whole(ours), _whole(apart).to(_whole(ours))])

    def clip(
        self,
        module: L.LightningModule,
        optimizer: torch.optim.Optimizer,
        value: float | None,
        algorithm: str | None,
    ) -> None:
        """Clip all but the confidence head's.

        By norm it takes the one that `norms` has made. The rest is Lightning's: clipping by value, and
        refusing an optimizer that takes the loss scale off by itself.

        Args:
            module: whose trainer clips.
            optimizer: whose weights it is.
            value: at which to clip; None: nowhere.
            algorithm: `value`, `norm` or None, which is `norm`.
        """
        ours, apart = self._weights(optimizer)
        if algorithm != "value" and not getattr(optimizer, "_step_supports_amp_scaling", False):
            if value:
                assert self._norm is not None
                torch.nn.utils.clip_grads_with_norm_(ours, value, self._norm)
            return
        gradients = [weight.grad for weight in apart]
        for weight in apart:
            weight.grad = None
        module.clip_gradients(optimizer, value, algorithm)
        for weight, gradient in zip(apart, gradients, strict=True):
            weight.grad = gradient

    def _weights(self, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[Tensor]]:
        """Weights whose gradient is clipped, and the confidence head's."""
        head = self.drafter.confidence
        apart = {id(weight): weight for weight in head.parameters()} if head else {}
        every = [weight for group in optimizer.param_groups for weight in group["params"]]
        return [weight for weight in every if id(weight) not in apart], list(apart.values())


def _whole(norm: Tensor) -> Tensor:
    """A norm over all ranks, where each has a part of every gradient (FSDP2)."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
