"""The table of docs/targets.md: what can be done with current families of targets, asked of the probe.

    python scripts/lab/target_table.py            print it
    python scripts/lab/target_table.py --write    put it into docs/targets.md

Each family is a random model of its class in transformers, a few layers small.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from decode.errors import UserError
from decode.model.abilities import Abilities
from decode.model.load import kernels
from decode.model.probe import find_abilities
from decode.model.target import Target

PAGE = Path(__file__).resolve().parents[2] / "docs" / "targets.md"
BEGIN, END = "<!-- families -->", "<!-- /families -->"
NOBODY = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
BASE: dict[str, Any] = NOBODY | {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
DIM = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
GROUPS = {"n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
ROUTED = GROUPS | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED_MLA = BASE | LATENT | ROUTED | {"num_key_value_heads": 4, "first_k_dense_replace": 1}
# With few heads, many places have the index 0, and any of them may be chosen.
INDEX = {"index_topk": 64, "index_head_dim": 8, "index_n_heads": 32, "head_dim": 4}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
SSM = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
WINDOW = {"sliding_window": 8}
# name in the table -> model type and configuration
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2, 3": ("llama", BASE),
    "Mistral": ("mistral", BASE | WINDOW),
    "Ministral 3": ("ministral3", BASE | DIM),
    "Mixtral": ("mixtral", BASE | LOCAL),
    "Qwen2, Qwen2.5": ("qwen2", BASE),
    "Qwen3": ("qwen3", BASE | DIM),
    "Qwen3-MoE": ("qwen3_moe", BASE | EXPERTS | DIM),
    "Qwen3-Next": ("qwen3_next", BASE | EXPERTS | DIM | LINEAR | {"shared_expert_intermediate_size": 16}),
    "Qwen3.5": ("qwen3_5_text", BASE | DIM | LINEAR),
    "Qwen3.5-MoE": (
        "qwen3_5_moe_text",
        BASE | EXPERTS | DIM | LINEAR | {"shared_expert_intermediate_size": 16},
    ),
    "Gemma 2": ("gemma2", BASE | DIM | WINDOW),
    "Gemma 3": ("gemma3_text", BASE | DIM | WINDOW),
    "Phi-2": ("phi", BASE),
    "Phi-3, Phi-4": ("phi3", BASE),
    "gpt-oss": ("gpt_oss", BASE | DIM | LOCAL | WINDOW),
    "OLMo 3": ("olmo3", BASE | WINDOW),
    "SmolLM3": ("smollm3", BASE),
    "Granite": ("granite", BASE),
    "Granite 4 (hybrid)": (
        "granitemoehybrid",
        BASE | LOCAL | SSM | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 16},
    ),
    "GLM-4": ("glm4", BASE | DIM),
    "GLM-4.5": ("glm4_moe", BASE | DIM | ROUTED | {"n_shared_experts": 1, "first_k_dense_replace": 1}),
    "GLM-DSA (GLM-5)": ("glm_moe_dsa", ROUTED_MLA | INDEX),
    "DeepSeek-V2": ("deepseek_v2", ROUTED_MLA | {"topk_method": "greedy"}),
    "DeepSeek-V3, R1, Kimi-K2": ("deepseek_v3", ROUTED_MLA),
    "DeepSeek-V3.2": ("deepseek_v32", ROUTED_MLA | INDEX),
    "Kimi-Linear": (
        "kimi_linear",
        BASE
        | LATENT
        | LOCAL
        | GROUPS
        | {"moe_intermediate_size": 16, "q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 4}
        | {"num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "MiniMax-M1": ("minimax", BASE | DIM | LOCAL),
    "MiniMax-M2": ("minimax_m2", BASE | DIM | LOCAL),
    "Llama 4": (
        "llama4_text",
        BASE | DIM | {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 8},
    ),
    "Nemotron-H": (
        "nemotron_h",
        NOBODY
        | DIM
        | {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1}
        | {"ssm_state_size": 8, "layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
    ),
    "Mamba": ("mamba", BASE | {"state_size": 8}),
    "Mamba-2": ("mamba2", BASE | {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1}),
    "Falcon-H1": ("falcon_h1", BASE | SSM | {"mamba_d_ssm": 64}),
    "Bamba": ("bamba", BASE | SSM | {"attn_layer_indices": [1]}),
    "Jamba": (
        "jamba",
        BASE | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8},
    ),
    "LFM2": ("lfm2", BASE | {"layer_types": ["conv", "full_attention"] * 2}),
    "BLOOM": ("bloom", NOBODY | {"vocab_size": 61, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
}


def abilities_of(name: str) -> tuple[str, Abilities]:
    """Class of a family's models, and what can be done with them."""
    kind, options = FAMILIES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **options)
    model = AutoModelForCausalLM.from_config(config, **kernels(config))
    try:
        found = find_abilities(Target(model))
    except UserError as error:  # no drafter can be trained for it
        reason = str(error).removeprefix("target: ")
        found = Abilities(reason, reason, reason)
    return type(model).__name__, found


def line(name: str) -> str:
    """Row of the table."""
    kind, found = abilities_of(name)
    why = "; ".join(dict.fromkeys(reason for reason in (*found[:2], found.decode) if reason))
    cells = [
        name,
        f"`{kind}`",
        *("no" if no else "yes" for no in found[:3]),
        why and f"{why[0].upper()}{why[1:]}",
    ]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """The whole table, families that can do all first."""
    lines = sorted((line(name) for name in FAMILIES), key=lambda row: row.count("| no |"))
    return "\n".join(
        ["| family | class | train | replay | decode | why not |", "|---|---|---|---|---|---|", *lines]
    )


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser("target_table", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into docs/targets.md")
    made = table()
    if not parser.parse_args().write:
        print(made)
        return
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{made}\n{END}", text, flags=re.DOTALL),
        encoding="utf-8",
    )


if __name__ == "__main__":
    sys.exit(main())
