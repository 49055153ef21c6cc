"""Our EAGLE-3 training step, for `worker`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decode.model.target import Target
from distill.losses.divergences import kl
from distill.losses.objective import Objective
from distill.losses.row_scores import Kernels
from distill.losses.weights import decay
from distill.utils.heap import keep_freed_memory
from drafters import optional
from drafters.base import Batch, Text
from drafters.models.eagle3 import Eagle3


def build(case: dict[str, Any]) -> Callable[[Sequence[int]], Callable[[], float]]:
    """See `worker`; the sizes are those of conf/lab/train.yaml."""
    shape = case["shape"]
    device = torch.device(case["device"])
    # Only the embedding and the head of the target take part: outputs of its layers are inputs.
    with device:
        target = Target(_target(shape))
    drafter = Eagle3.for_target(
        target,
        taps=[0] * shape["taps"],
        layers=shape["layers"],
        depth=shape["depth"],
        window=shape["window"],
        draft_vocab_size=shape["draft_vocab_size"],
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
    )
    if drafter.needs_fit:
        drafter.fit([Text(list(range(shape["vocab_size"])), [1] * shape["vocab_size"])], target)
    drafter.to(device)
    drafter.lm_head.requires_grad_(case["train_head"])
    if case["gradient_checkpointing"]:
        optional.checkpoint_gradients(drafter)
    kernels = Kernels() if case["compiled"] else None
    objective = Objective(kl, partial(decay, rate=case["decay"]), kernels=kernels)
    keep_freed_memory()  # as `distill.training.trainer.fit` does
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, **case["optimizer"])

    def prepare(loss_mask: Sequence[int]) -> Callable[[], float]:
        size, width = len(loss_mask), shape["hidden_size"]
        mask = torch.tensor([loss_mask], dtype=torch.bool)
        tokens = torch.randint(shape["vocab_size"], (1, size)).to(device)
        taps, last = torch.randn(1, size, shape["taps"], width), torch.randn(1, size, width)
        taps, last = taps.to(device), last.to(device)

        def step() -> float:
            optimizer.zero_grad()  # first, as `DistillModule` frees gradients after use
            batch = Batch(tokens, mask, taps, last)
            with torch.autocast(device.type, torch.bfloat16, enabled=case["precision"] == "bfloat16"):
                total, scored = objective(drafter.unroll(batch, target), last, target.head, {})
            loss = total / scored[0].rows
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, case["clip"])
            optimizer.step()
            return loss.item()

        return step

    return prepare


def _target(shape: dict[str, Any]) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape["vocab_size"],
            hidden_size=shape["hidden_size"],
            intermediate_size=shape["intermediate_size"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"],
            head_dim=shape["head_dim"],
            num_hidden_layers=1,
        )
    )
