"""Tiny chat targets that only an engine can decode: linear attention, MLA, fp8 weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from families import BASE, EXPERTS
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from workbench import enlarge, make_target, make_tokenizer

HYBRID = BASE | EXPERTS | {"head_dim": 8, "num_hidden_layers": 4, "shared_expert_intermediate_size": 16}
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
HYBRID |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
MLA = BASE | {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
MLA |= {"qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
MLA |= {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
BLOCK = 128  # rows and columns of an fp8 weight that share a scale
REASONS = {
    "hybrid": "state cannot be rolled back",
    "mla": "keys and values of different shapes",
    "fp8": "quantised with fp8",
}


def make_class(folder: Path, kind: str, options: dict) -> Path:
    """A random model of a class with the tokenizer of `workbench`."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    options = options | sizes | {"eos_token_id": tokenizer.eos_token_id}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))
    enlarge(model, 6)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    return folder


def make_fp8(folder: Path) -> Path:
    """The Llama of `workbench`, its layers' weights in fp8 with a scale for each block."""
    make_target(folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in list(weights.items()):
        if name.endswith("_proj.weight"):
            assert max(weight.shape) <= BLOCK
            scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
            weights[name] = (weight / scale).to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    config = json.loads(path.read_text()) | {"quantization_config": settings}
    path.write_text(json.dumps(config))
    return folder


TARGETS: dict[str, Callable[[Path], Path]] = {
    "hybrid": lambda folder: make_class(folder, "qwen3_next", HYBRID),
    "mla": lambda folder: make_class(folder, "deepseek_v3", MLA),
    "fp8": make_fp8,
}
