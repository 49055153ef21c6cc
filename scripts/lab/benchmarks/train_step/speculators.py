"""The EAGLE-3 training step of `speculators`, for `worker` in that package's own environment.

What its `Trainer.train_epoch` does with a batch, in fp32 or under bf16 autocast: forward with the
losses, backward, clipping, AdamW as its `build_optimizers` makes it. Flex attention, its default, has no
backward on a CPU, and its fused losses are Triton kernels: sdpa attention and the eager losses stand in
for them. Nothing of foredraft may be imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig  # pyright: ignore[reportMissingImports]
from speculators.losses import resolve_loss_config  # pyright: ignore[reportMissingImports]
from speculators.models.eagle3 import (  # pyright: ignore[reportMissingImports]
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
)
from speculators.models.eagle3.data import shift_batch  # pyright: ignore[reportMissingImports]
from speculators.proposals.greedy import GreedyTokenProposalConfig  # pyright: ignore[reportMissingImports]
from transformers import LlamaConfig


def build(case: dict[str, Any]) -> Callable[[Sequence[int]], Callable[[], float]]:
    """See `worker`."""
    shape = case["shape"]
    model = _model(shape).train()
    model.lm_head.weight.requires_grad_(case["train_head"])
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=case["optimizer"]["lr"], weight_decay=0.01)
    options = {
        "ttt_steps": shape["depth"],
        "ttt_step_loss_decay": case["decay"],
        "loss_config": resolve_loss_config("kl_div", "eager"),
    }

    def prepare(loss_mask: Sequence[int]) -> Callable[[], float]:
        size, width = len(loss_mask), shape["hidden_size"]
        sample = {
            "input_ids": torch.randint(shape["vocab_size"], (size,)),
            "hidden_states": torch.randn(size, shape["taps"] * width),
            "verifier_last_hidden_states": torch.randn(size, width),
            "loss_mask": torch.tensor(loss_mask),
            "lengths": torch.tensor([size]),
            "position_ids": torch.arange(size),
        }
        shifted = {k: v[None] for k, v in shift_batch(sample).items() if k != "lengths"}
        shifted["document_ids"] = torch.zeros(1, size - 1, dtype=torch.long)

        def step() -> float:
            with torch.autocast("cpu", torch.bfloat16, enabled=case["precision"] == "bfloat16"):
                _, loss, _ = model(**shifted, **options)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
            optimizer.step()
            return loss.item()

        return step

    return prepare


def _model(shape: dict[str, Any]) -> Eagle3DraftModel:
    layer = LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        num_hidden_layers=shape["layers"],
    )
    layer._attn_implementation = "sdpa"  # private API: speculators takes no attention kernel
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape["draft_vocab_size"],
        eagle_aux_hidden_state_layer_ids=list(range(shape["taps"])),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=shape["depth"])],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config)
    known = torch.arange(shape["vocab_size"]) < shape["draft_vocab_size"]
    if model.use_draft_vocab:
        model.load_vocab_mappings(known, torch.zeros(shape["draft_vocab_size"], dtype=torch.long))
    with torch.no_grad():  # weights that are otherwise read from the target's files
        for module in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
            module.weight.normal_(std=0.02)
    return model
