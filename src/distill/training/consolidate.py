"""Whole weights of a drafter, however a strategy has cut them up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from distill.training.strategies import FSDP, DeepSpeed
from drafters.base import Drafter


def consolidated(trainer: L.Trainer, drafter: Drafter) -> Mapping[str, Tensor]:
    """Whole weights and buffers of a drafter, however they are cut up; to be called on every rank.

    Returns:
        The drafter's state dict, in fp32 where the optimizer has masters; what it borrows may be in parts,
        and other ranks than the first may get less.
    """
    strategy = trainer.strategy
    if isinstance(strategy, DeepSpeed):
        return _of_zero(drafter)
    if isinstance(strategy, FSDP):
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: Any = get_model_state_dict(drafter, options=whole)
        return weights
    return drafter.state_dict()


def _of_zero(drafter: Drafter) -> dict[str, Tensor]:
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    found = dict(drafter.state_dict())  # buffers, and names that share a weight
    known: dict[int, Tensor] = {}
    for name, value in drafter.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.nn.Parameter) or name in drafter.borrowed:
            continue
        if id(value) not in known:
            master = safe_get_full_fp32_param(value) if value.requires_grad else None
            if master is None:
                with GatheredParameters([value]):
                    master = value.detach().clone()
            known[id(value)] = master
        found[name] = known[id(value)]
    return found
