"""Shapes of known models, for a plan without a network.

Each row is as in the model's config.json on the Hub, in the order of `NAMES`. Rows were compared with the
copies of these files in LitGPT's litgpt/config.py (Lightning-AI/litgpt 293089e). That file has other numbers
only for `vocab_size`, which it pads, and for the experts of Qwen3-30B-A3B. The multimodal Gemma 3 are here
with their language model only.
"""

from __future__ import annotations

from typing import Any

NAMES = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings"),
)
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
ENDINGS = ("-instruct", "-base", "-it", "-chat", "-pt")  # of names of models with one shape

_SHAPES = {
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960, True),
    "Qwen/Qwen3-1.7B": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, 40960, True),
    "Qwen/Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, 40960, True),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 40960, False),
    "Qwen/Qwen3-14B": ("qwen3", 5120, 17408, 40, 40, 8, 128, 151936, 40960, False),
    "Qwen/Qwen3-32B": ("qwen3", 5120, 25600, 64, 64, 8, 128, 151936, 40960, False),
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", 2048, 6144, 48, 32, 4, 128, 151936, 40960, False),
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, 64, 151936, 32768, True),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, 32768, True),
    "Qwen/Qwen2.5-3B": ("qwen2", 2048, 11008, 36, 16, 2, 128, 151936, 32768, True),
    "Qwen/Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 32768, False),
    "Qwen/Qwen2.5-14B": ("qwen2", 5120, 13824, 48, 40, 8, 128, 152064, 32768, False),
    "Qwen/Qwen2.5-32B": ("qwen2", 5120, 27648, 64, 40, 8, 128, 152064, 32768, False),
    "Qwen/Qwen2.5-72B": ("qwen2", 8192, 29568, 80, 64, 8, 128, 152064, 32768, False),
    "meta-llama/Llama-3.2-1B": ("llama", 2048, 8192, 16, 32, 8, 64, 128256, 131072, True),
    "meta-llama/Llama-3.2-3B": ("llama", 3072, 8192, 28, 24, 8, 128, 128256, 131072, True),
    "meta-llama/Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, 131072, False),
    "meta-llama/Llama-3.1-70B": ("llama", 8192, 28672, 80, 64, 8, 128, 128256, 131072, False),
    "meta-llama/Llama-3.3-70B": ("llama", 8192, 28672, 80, 64, 8, 128, 128256, 131072, False),
    "mistralai/Mistral-7B-v0.3": ("mistral", 4096, 14336, 32, 32, 8, 128, 32768, 32768, False),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral", 4096, 14336, 32, 32, 8, 128, 32768, 32768, False),
    "HuggingFaceTB/SmolLM2-135M": ("llama", 576, 1536, 30, 9, 3, 64, 49152, 8192, True),
    "HuggingFaceTB/SmolLM2-360M": ("llama", 960, 2560, 32, 15, 5, 64, 49152, 8192, True),
    "HuggingFaceTB/SmolLM2-1.7B": ("llama", 2048, 8192, 24, 32, 32, 64, 49152, 8192, True),
    "google/gemma-2-2b": ("gemma2", 2304, 9216, 26, 8, 4, 256, 256000, 8192, True),
    "google/gemma-2-9b": ("gemma2", 3584, 14336, 42, 16, 8, 256, 256000, 8192, True),
    "google/gemma-2-27b": ("gemma2", 4608, 36864, 46, 32, 16, 128, 256000, 8192, True),
    "google/gemma-3-1b": ("gemma3_text", 1152, 6912, 26, 4, 1, 256, 262144, 32768, True),
    "google/gemma-3-4b": ("gemma3_text", 2560, 10240, 34, 8, 4, 256, 262208, 131072, True),
    "google/gemma-3-12b": ("gemma3_text", 3840, 15360, 48, 16, 8, 256, 262208, 131072, True),
    "google/gemma-3-27b": ("gemma3_text", 5376, 21504, 62, 32, 16, 128, 262208, 131072, True),
    "microsoft/phi-4": ("phi3", 5120, 17920, 40, 40, 10, 128, 100352, 16384, False),
    "microsoft/Phi-4-mini": ("phi3", 3072, 8192, 32, 24, 8, 128, 200064, 131072, True),
}


def known(name: str) -> dict[str, Any] | None:
    """Settings of a known model's configuration, `model_type` included; None for another model.

    Args:
        name: its id on the Hub, in any case. `-Instruct`, `-Base` and the like have the shape of the rest.
    """
    shapes = {key.lower(): shape for key, shape in _SHAPES.items()}
    short = name.lower()
    ending = next((end for end in ENDINGS if short.endswith(end)), "")
    shape = shapes.get(short) or shapes.get(short.removesuffix(ending))
    if shape is None:
        return None
    found: dict[str, Any] = dict(zip(NAMES, shape, strict=True))
    return found | (EXPERTS if found["model_type"].endswith("_moe") else {})


def known_names() -> list[str]:
    """Ids of all known models."""
    return list(_SHAPES)
