"""Random models that fill in masks, as folders, and diffusion drafters of them."""

from __future__ import annotations

from pathlib import Path

from draft_models import LORA, save_random, with_random_adapters
from drafter_checks import K, V
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from drafters.models.hf_dllm import Dllm

BASE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BASE |= {"max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
WINDOW = {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4}
NO_ENDS = {"cls_token_id": None, "sep_token_id": None}
KINDS = {
    "llama": ("llama", BASE),
    "learned positions": ("gpt2", BASE | {"n_embd": 16, "n_head": 2, "n_positions": 64, "n_layer": 2}),
    "windows and soft caps": ("gemma2", BASE | WINDOW),
    "bert": ("bert", BASE | {"pad_token_id": 0}),
    "roberta": ("roberta", BASE | {"pad_token_id": 1}),
    "modernbert": ("modernbert", BASE | NO_ENDS | {"local_attention": 8, "num_hidden_layers": 4}),
}
CAUSAL = ("llama", "learned positions", "windows and soft caps")
MASK = V - 1


def filler(folder: Path, kind: str = "llama", vocab: int = V, spread: float = 3.0, **changes) -> str:
    """A folder with a random model that heeds every token."""
    name, shape = KINDS[kind]
    auto = AutoModelForCausalLM if kind in CAUSAL else AutoModelForMaskedLM
    return save_random(folder, auto, name, shape | changes, vocab, spread)


def drafter_for(target, path: str, **options) -> Dllm:
    settings = {"mask_token": MASK, "depth": K, "shift": 0, "steps": 1, "anchors": 2} | options
    return Dllm.for_target(target, path=path, **settings).eval()


def adapted(target, folder: Path, kind: str, **options) -> Dllm:
    return with_random_adapters(drafter_for(target, filler(folder, kind), lora=LORA, **options))


def count_passes(drafter: Dllm) -> list[int]:
    """Filled with the width of every forward pass of the model to come."""
    widths = []
    drafter.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1] if kwargs else 0),
        with_kwargs=True,
    )
    return widths
