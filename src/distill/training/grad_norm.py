"""Gradient norm and clipping, and weights that no answer of a step reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import lightning as L
import torch
from torch import Tensor, nn
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


class Reached:
    """Makes weights that no answer reaches the same to several processes as to one.

    Answers may be too short for a deep head. One process then has no gradient for it, and its optimizer
    leaves it alone. DDP waits for one from every process; given a zero, an optimizer would step on its
    momentum, Muon at full size.

    Args:
        weights: gives all that train, as they are now: within a step FSDP2 shows them whole, and its own
            part of them elsewhere.
    """

    def __init__(self, weights: Callable[[], Sequence[nn.Parameter]]) -> None:
        self.weights = weights
        self.marks = torch.zeros(len(weights()))

    def join(self, loss: Tensor) -> Tensor:
        """The loss of a micro-batch, which now reaches every weight: those that it did not, with zero."""
        known, weights = _leaves(loss), self.weights()
        hit = torch.tensor([id(weight) in known for weight in weights])
        self.marks += hit
        missed = [w.sum() for w, there in zip(weights, hit.tolist(), strict=True) if not there]
        return loss + 0.0 * torch.stack(missed).sum() if missed else loss

    def leave_out(self, add_up: Callable[[Tensor], Tensor]) -> None:
        """Take the gradient from weights that no process reached in this optimizer step.

        Args:
            add_up: sums a tensor over processes.
        """
        weights = self.weights()
        total = add_up(self.marks.to(weights[0].device)).tolist() if weights else []
        self.marks.zero_()
        for weight, count in zip(weights, total, strict=True):
            if not count:
                weight.grad = None


def exposed(drafter: Drafter) -> list[nn.Parameter]:
    """What trains and an answer may fail to reach: not what every unroll runs."""
    apart = {id(w) for part in drafter.shardable_modules() for w in part.parameters()}
    return [w for w in drafter.parameters() if w.requires_grad and id(w) not in apart]


def _leaves(loss: Tensor) -> set[int]:
    """Ids of the leaves that a backward pass would reach."""
    waiting, seen, found = [loss.grad_fn], set(), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.add(id(getattr(node, "variable", None)))  # what accumulates gradients has one
        waiting += [below for below, _ in node.next_functions]
    return found
