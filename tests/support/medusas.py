"""Medusa-2 drafters, fresh ones and such with random weights that matter."""

from __future__ import annotations

import torch
from drafter_checks import K, V
from torch import nn

from decode.model.target import LAST
from drafters.models.medusa import Medusa2

LORA = {"r": 2, "alpha": 4, "targets": "all-linear"}
OPTIONS = {"depth": K, "layers": 1, "own_head": True, "heads": 0.2, "warmup": 0.25, "lora_lr": 0.25}


def fresh(tiny_target, lora=LORA, dtype=torch.float64, **changes):
    target = tiny_target(vocab=V, layers=3, hidden=16, dtype=dtype)
    target.tap([LAST])
    return target, Medusa2.for_target(target, **{"lora": lora, **OPTIONS, **changes}).to(dtype)


def moved(tiny_target, **changes):
    """As if trained: every weight is random and matters."""
    target, drafter = fresh(tiny_target, **changes)
    for weight in drafter.parameters():
        nn.init.normal_(weight, std=0.5 * weight.shape[-1] ** -0.5)
    return target, drafter
