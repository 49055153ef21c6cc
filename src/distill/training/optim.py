"""Optimizers (Muon with AdamW) and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

HEADS = {"lm_head", "lm_heads", "head", "embed_out"}  # path components in parameter names of output heads


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers over disjoint parameters, stepped, scheduled and saved as one."""

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
        # Loading replaces the groups of each part; schedule and clipping must act on the new ones.
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def hidden_matrices(module: nn.Module) -> Iterator[nn.Parameter]:
    """Weight matrices that Muon trains: 2-D parameters other than embeddings and output heads."""
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
    fused: bool = False,
) -> CombinedOptimizer:
    """Muon (Jordan et al., 2024) for hidden matrices, AdamW for norms, embeddings and heads.

    Args:
        groups: parameter groups; `hidden` holds one bool per parameter, true where Muon trains it.
        lr: learning rate of both. Muon's orthogonal update is scaled to the RMS of AdamW's
            (Moonlight, arXiv:2502.16982, section 2.2).
        momentum: of Muon.
        betas: of AdamW.
        weight_decay: of both.
        fused: whether AdamW is one kernel for all weights.
    """
    hidden, rest = (
        [
            group | {"params": weights, "hidden": [is_hidden] * len(weights)}
            for group in groups
            if (
                weights := [
                    weight
                    for weight, flag in zip(group["params"], group["hidden"], strict=True)
                    if flag == is_hidden
                ]
            )
        ]
        for is_hidden in (True, False)
    )
    parts: list[torch.optim.Optimizer] = []
    if hidden:
        parts.append(
            torch.optim.Muon(hidden, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw"),
        )
    if rest:
        parts.append(torch.optim.AdamW(rest, lr, betas, weight_decay=weight_decay, fused=fused))
    return CombinedOptimizer(parts)


def warm_up_and_decay(
    optimizer: torch.optim.Optimizer,
    steps: int,
    warmup: float,
    final_lr: float,
    factors: Sequence[Callable[[float], float]] = (),
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then cosine decay.

    Args:
        optimizer: whose learning rates are scheduled.
        steps: of the run.
        warmup: share of the steps that warm up.
        final_lr: learning rate at the end, as a share of the peak.
        factors: one function per group, training progress in [0, 1] -> factor; empty: all 1.
    """
    warmup_steps = max(1, round(warmup * steps))

    def rate(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
        return final_lr + (1 - final_lr) * 0.5 * (1 + math.cos(math.pi * progress))

    def scaled(factor: Callable[[float], float]) -> Callable[[int], float]:
        return lambda step: rate(step) * factor(step / steps)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, [scaled(f) for f in factors] or rate)
