"""Random models of many families, as folders, with seeds whose greedy text is no short loop."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB, LENGTH = 61, 24
PROMPTS = [[5, 9, 2, 7, 3, 11, 8, 30, 1], [4, 6, 10], [17, 44, 21, 60, 12, 2]]
NOBODY = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
UNTIED = NOBODY | {"vocab_size": VOCAB, "tie_word_embeddings": False}  # tied random weights repeat themselves
BASE = UNTIED | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
BASE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = [SLIDING, FULL, SLIDING, SLIDING]
SMALL_GPT = UNTIED | {"n_embd": 32, "n_layer": 3, "n_head": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
WINDOW = BASE | {"sliding_window": 6}
LAYERED = WINDOW | {"num_hidden_layers": 4, "layer_types": MIXED}
CAPPED = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
# name: model type, configuration, and a seed with which greedy text is no short loop
WORKS = {
    "llama": ("llama", BASE),
    "llama tied, biased": ("llama", BASE | {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen2": ("qwen2", BASE),
    "qwen3": ("qwen3", BASE | {"head_dim": 8}),
    "qwen3 experts": ("qwen3_moe", BASE | EXPERTS | {"head_dim": 8}),
    "gemma2, soft caps, eager": ("gemma2", WINDOW | CAPPED | {"head_dim": 8}),
    "gemma3, window 6": ("gemma3_text", LAYERED | {"head_dim": 8}),
    "mistral, window 6": ("mistral", WINDOW),
    "mistral, no window": ("mistral", BASE | {"sliding_window": None}),
    "phi3": ("phi3", BASE, 1),
    "phi3, window 6": ("phi3", WINDOW),
    "phi3, longrope": ("phi3", BASE | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 20}),
    "llama, dynamic rope": ("llama", BASE | {"max_position_embeddings": 20, "rope_parameters": DYNAMIC}),
    "cohere, logit scale": ("cohere", BASE | {"logit_scale": 0.25}),
    "cohere2, no positions in full layers": ("cohere2", LAYERED | {"logit_scale": 0.25}),
    "granite, logits scaled": ("granite", BASE | {"logits_scaling": 4.0}),
    "gpt_oss, sinks, window 6": (
        "gpt_oss",
        WINDOW | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt_neox": ("gpt_neox", BASE, 6),
    "phi, biased head": ("phi", BASE, 4),
    "gpt2": ("gpt2", SMALL_GPT | {"n_positions": 64}, 8),
    "gpt2, context ends": ("gpt2", SMALL_GPT | {"n_positions": 20}, 5),
    "opt": ("opt", BASE | {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}, 9),
    "falcon, rotary": ("falcon", BASE | {"alibi": False}, 2),
}


def save(folder, kind, options, seed=0, auto=AutoModelForCausalLM):
    """A model folder with random weights big enough that every error shows."""
    torch.manual_seed(seed)
    model = auto.from_config(AutoConfig.for_model(kind, **options))
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.mul_(12)
        elif weight.ndim == 1:  # norms and biases: none may be all ones or zeros
            weight.data.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return folder
