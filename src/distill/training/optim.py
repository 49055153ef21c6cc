"""Optimizers (Muon beside AdamW) as one, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

HEADS = {"lm_head", "lm_heads", "head", "embed_out"}  # components of their names


class Joint(torch.optim.Optimizer):
    """Optimizers that share out a model's parameters, stepped, scheduled and saved as one."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure else None
        for part in self.parts:
            part.step()
        return loss

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        # The parts have new groups now; schedule and clipping are to act on those.
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def hidden_matrices(module: nn.Module) -> Iterator[nn.Parameter]:
    """Matrices from hidden states to hidden states, which Muon is for: no embedding and no head."""
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    for name, weight in module.named_parameters():
        if weight.ndim == 2 and id(weight) not in embeddings and not HEADS & set(name.split(".")):
            yield weight


def muon(
    groups: Sequence[dict[str, Any]],
    lr: float,
    momentum: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> Joint:
    """Muon (Jordan et al., 2024) for hidden matrices, AdamW for norms, embeddings and heads.

    Args:
        groups: of parameters; "hidden" says of each whether it is Muon's.
        lr: of both: an orthogonal update is scaled to the size that AdamW's has (Moonlight,
            arXiv:2502.16982, section 2.2).
        momentum: Muon's.
        betas: AdamW's.
        weight_decay: of both.
    """
    hidden, rest = (
        [
            group | {"params": some, "hidden": [kind] * len(some)}
            for group in groups
            if (some := [w for w, own in zip(group["params"], group["hidden"], strict=True) if own == kind])
        ]
        for kind in (True, False)
    )
    parts: list[torch.optim.Optimizer] = []
    if hidden:
        parts.append(
            torch.optim.Muon(hidden, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw"),
        )
    if rest:
        parts.append(torch.optim.AdamW(rest, lr, betas, weight_decay=weight_decay))
    return Joint(parts)


def warm_up_and_decay(
    optimizer: torch.optim.Optimizer,
    steps: int,
    warmup: float,
    final_lr: float,
    factors: Sequence[Callable[[float], float]] = (),
) -> torch.optim.lr_scheduler.LambdaLR:
    """A linear rise over `warmup` of the steps, then a cosine to `final_lr` of the rate.

    Args:
        optimizer: whose groups it drives.
        steps: of the run.
        warmup: share of them.
        final_lr: share of the learning rate.
        factors: of each group, from the share of the steps that are done; none: all 1.
    """
    rise = max(1, round(warmup * steps))

    def rate(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        done = min(1.0, (step - rise) / max(1, steps - rise))
        return final_lr + (1 - final_lr) * 0.5 * (1 + math.cos(math.pi * done))

    def times(factor: Callable[[float], float]) -> Callable[[int], float]:
        return lambda step: rate(step) * factor(step / steps)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, [times(f) for f in factors] or rate)
