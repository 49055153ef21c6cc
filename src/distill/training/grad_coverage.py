"""Which weights an optimizer step's losses reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from drafters.base import Drafter


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
    apart = {id(w) for part in drafter.self_contained() for w in part.parameters()}
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
