"""Tiny random models of every causal class of transformers that can be made from only its configuration."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

WINDOW = 16
CLASSES = {config.model_type: config for config in MODEL_FOR_CAUSAL_LM_MAPPING}
LARGEST = 10**8  # parameters
_FOUR = (
    "num_hidden_layers num_attention_heads n_layer n_head num_layers num_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts decoder_layers decoder_attention_heads encoder_attention_heads "
    "rope_head_dim qk_rope_head_dim qk_nope_head_dim linear_num_value_heads laurel_rank"
)
_EIGHT = (
    "head_dim global_head_dim q_lora_rank kv_lora_rank v_head_dim linear_key_head_dim linear_value_head_dim "
    "mamba_d_state mamba_n_heads mamba_d_head state_size rotary_dim index_head_dim "
    "hidden_size_per_layer_input kv_channels dim_head attention_head_size"
)
_WIDE = (
    "hidden_size n_embd d_model attention_hidden_size word_embed_proj_dim lru_width embedding_size dim_model"
)
_INNER = (
    "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size d_ff "
    "feed_forward_size shared_intermediate_size intermediate_size_mlp dim_ff d_inner dff "
    "moe_intermediate_size moe_hidden_size expert_ffn_hidden_size shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size"
)
_TWO = (
    "num_key_value_heads num_experts_per_tok moe_topk moe_k linear_num_key_heads num_global_key_value_heads "
    "altup_num_inputs encoder_layers num_query_groups num_experts_per_token"
)
_ONE = "n_group topk_group mamba_n_groups n_shared_experts moe_num_shared_experts first_k_dense_replace"
SIZES: dict[str, Any] = {
    name: value
    for names, value in ((_FOUR, 4), (_EIGHT, 8), (_WIDE, 32), (_INNER, 48), (_TWO, 2), (_ONE, 1))
    for name in names.split()
}
SIZES |= {"vocab_size": 61, "vocab_size_per_layer_input": 61, "tie_word_embeddings": False}
SIZES |= {"max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256}
SIZES |= {"is_decoder": True, "use_sliding_window": True, "max_window_layers": 1}
SIZES |= {"index_n_heads": 32}  # with few, many places are equally good, and any of them may be chosen
TWICE = ["sliding_attention", "full_attention"]
MORE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"layer_types": TWICE * 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 5,
        "activation_sparsity_pattern": [0.0] * 10,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2,
    },
    "gemma4_text": {"num_hidden_layers": 6, "layer_types": TWICE * 3, "num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global"], 3], [["local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "minimax_m3_vl_text": {"index_topk_blocks": 1, "index_local_blocks": 1},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}
IN_TOKENS = re.compile(
    "window|block_size|chunk|local_attention$|stride|index_?topk$|budget|span|segment_size"
)
NOT_IN_TOKENS = re.compile("layer|expert|moe|mlp|feed_forward|lm_head|num_|use_|kernel|prob")


def options_of(kind: str) -> dict[str, Any]:
    """Small sizes for what a configuration of this type has, and windows of `WINDOW` tokens."""
    defaults = CLASSES[kind]().to_dict()
    options = {name: size for name, size in SIZES.items() if name in defaults}
    options = {name: size for name, size in options.items() if not isinstance(defaults[name], list)}
    for name, value in defaults.items():
        counts = type(value) is int or (value is None and name == "sliding_window")
        if counts and IN_TOKENS.search(name) and not NOT_IN_TOKENS.search(name):
            options[name] = min(WINDOW, value) if value else WINDOW
    if "kv_lora_rank" in defaults or kind == "dots3_note_text":
        options["num_key_value_heads"] = 4
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(defaults.get(name), int):
            options[name] = 0
    return options | MORE.get(kind, {})


def tiny_model(kind: str) -> PreTrainedModel | None:
    """A random model in fp32; None where this type cannot be made from these sizes."""
    try:
        config = CLASSES[kind](**options_of(kind))
        auto = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("meta"):
            size = sum(weight.numel() for weight in auto(config).parameters())
        if size > LARGEST:
            return None
        torch.manual_seed(0)
        model = auto(CLASSES[kind](**options_of(kind))).float().eval()
    except Exception:  # each class has conditions of its own on its sizes
        return None
    dice = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.mul_(8)
        else:
            weight.data.add_(0.3 * torch.randn(weight.shape, generator=dice))
    return model
