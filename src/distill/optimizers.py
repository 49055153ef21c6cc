"""Optimizers of several kinds as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

# Components of names, as drafters and Hugging Face models have them, that read or write tokens.
OUTER = {"lm_head", "lm_heads", "head", "emb", "embed_tokens", "embed_in", "embed_out", "wte", "wpe"}


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


def is_hidden_matrix(name: str, weight: torch.Tensor) -> bool:
    """Whether a weight is a matrix from hidden states to hidden states: what Muon is for."""
    return weight.ndim == 2 and not OUTER & set(name.split("."))


def muon(
    groups: Sequence[dict[str, Any]],
    lr: float,
    momentum: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> Joint:
    """Muon (Jordan et al., 2024) for hidden matrices, AdamW for norms, embeddings and heads.

    Args:
        groups: of parameters; those with a true "hidden" are Muon's.
        lr: of both: an orthogonal update is scaled to the size that AdamW's has (Moonlight,
            arXiv:2502.16982, section 2.2).
        momentum: Muon's.
        betas: AdamW's.
        weight_decay: of both.
    """
    hidden = [group for group in groups if group["hidden"]]
    rest = [group for group in groups if not group["hidden"]]
    parts: list[torch.optim.Optimizer] = []
    if hidden:
        parts.append(
            torch.optim.Muon(hidden, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw"),
        )
    if rest:
        parts.append(torch.optim.AdamW(rest, lr, betas, weight_decay=weight_decay))
    return Joint(parts)
