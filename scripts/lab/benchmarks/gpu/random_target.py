"""Targets and drafters with random weights, in the shape of known models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig

from decode.errors import UserError
from decode.model.load import DTYPES, auto_class, target_of
from decode.model.target import Target
from distill.commands.planning.known_models import known, known_names
from distill.config.build import build_drafter
from distill.options.run import DrafterOptions
from drafters.base import Drafter, Text

SPREAD = 1.5  # of a matrix times the root of its inputs: rows of logits that differ from one another


def random_target(name: str, sizes: Mapping[str, Any], dtype: str, device: torch.device) -> Target:
    """A target of a known model's shape; its weights are drawn on the device, in its dtype.

    Args:
        name: id of the model on the Hub.
        sizes: of its configuration, instead of the model's.
        dtype: of the weights.
        device: where they are made.

    Raises:
        UserError: the model or the dtype is not known, or no model can be built of these sizes.
    """
    settings = known(name)
    if settings is None:
        raise UserError(f"like={name}: not known; choose one of {', '.join(known_names())}")
    if unknown := sizes.keys() - settings.keys():
        raise UserError(f"sizes.{min(unknown)}: no such size; choose one of {', '.join(settings)}")
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype}: choose one of {', '.join(DTYPES)}")
    try:
        config = AutoConfig.for_model(**settings | dict(sizes), bos_token_id=None, eos_token_id=None)
        with device:
            model = auto_class(config).from_config(config, dtype=DTYPES[dtype])
    except (ValueError, StrictDataclassError) as error:
        raise UserError(f"like={name}: no model of these sizes; {' '.join(str(error).split())}") from None
    model.eval().requires_grad_(False)
    if device.type == "meta":  # no numbers: nothing to draw, and no text to try it on
        return Target(model)
    draw(model)
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # as `load_target` does
    return target_of(model)


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """Draw all matrices again, so that texts are not all alike: transformers' initial rows are."""
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=1.0 if "embed" in name else SPREAD * weight.shape[1] ** -0.5)


def random_drafter(options: DrafterOptions, target: Target) -> Drafter:
    """An untrained drafter in fp32 on the target's device; its draft vocabulary is the first tokens."""
    if target.device.type == "meta":
        with target.device:
            return build_drafter(options, target)
    drafter = build_drafter(options, target)
    if drafter.needs_fit:
        tokens = list(range(target.vocab_size))
        drafter.fit([Text(tokens, [1] * len(tokens))], target)
    return drafter.to(target.device)


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Token ids of prompts that differ."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count, length), generator=dice).tolist()
