"""Drafters whose heads read one feature (Medusa, Hydra, the speculators), fresh or with random weights."""

from __future__ import annotations

from typing import Any

import torch
from drafter_checks import K, V
from torch import nn

from decode.model.target import LAST, Target
from drafters.base import Drafter


def fresh(tiny_target, kind: Any, **options) -> tuple[Target, Drafter]:
    """As at the first step of training; Medusa's and Hydra's have one layer and a head of their own."""
    target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)
    target.tap([LAST])
    if kind.__name__ in ("Medusa", "Hydra"):
        options = {"layers": 1, "own_head": True, **options}
    return target, kind.for_target(target, **{"depth": K, **options}).eval()


def trained(tiny_target, kind: Any, **options) -> tuple[Target, Drafter]:
    """As if: every weight is random and matters."""
    target, drafter = fresh(tiny_target, kind, **options)
    for weight in drafter.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.5)
    if kind.__name__ in ("Medusa", "Hydra"):  # a distribution of visible masses
        target.model.lm_head.weight.data.mul_(0.3)
    return target, drafter
