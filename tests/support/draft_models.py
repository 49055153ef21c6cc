"""Independent draft models: random ones of several kinds, as folders, plain or with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from drafter_checks import V
from transformers import AutoConfig, AutoModelForCausalLM
from workbench import Bench, enlarge

from drafters.models.lm import DraftLM

BASE = {"num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA = BASE | {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
GROUPED = LLAMA | {"num_key_value_heads": 1}
KINDS = {
    "window": ("mistral", GROUPED | {"sliding_window": 4}),
    "windows and soft caps, eager": ("gemma2", GROUPED | {"head_dim": 8, "sliding_window": 4}),
    "learned positions": ("gpt2", BASE | {"n_embd": 16, "n_head": 2, "n_positions": 64, "n_layer": 2}),
    "tied": ("llama", LLAMA | {"tie_word_embeddings": True}),
}


def draft_model(folder: Path, kind: str = "tied", vocab: int = V, spread: float = 3.0, **changes) -> str:
    name, shape = KINDS[kind]
    return save_random(folder, AutoModelForCausalLM, name, shape | changes, vocab, spread)


def save_random(folder: Path, auto: Any, name: str, shape: dict, vocab: int, spread: float) -> str:
    """A folder with a random model, whose rows heed every token."""
    torch.manual_seed(4)
    model = auto.from_config(AutoConfig.for_model(name, vocab_size=vocab, **shape))
    enlarge(model, spread)
    model.save_pretrained(folder)
    return str(folder)


LORA = {"r": 3, "alpha": 5, "targets": "all-linear"}


def adapted(target, folder, kind="tied", **options) -> DraftLM:
    return with_random_adapters(
        DraftLM.for_target(target, path=draft_model(folder, kind), lora=LORA | options)
    )


def with_random_adapters(drafter: Any) -> Any:
    """Its adapters change something; fresh ones add nothing."""
    for name, weight in drafter.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return drafter


@torch.no_grad()
def logits(model, texts):
    return model(input_ids=texts, use_cache=False).logits


def quick(bench: Bench, *more: str, drafter: str = "lm") -> list[str]:
    """The quick run's overrides for a drafter without a depth."""
    return [a for a in bench.command if not a.startswith("drafter.depth")] + [f"drafter={drafter}", *more]
