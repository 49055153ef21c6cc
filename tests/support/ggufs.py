"""A tiny Llama and its tokenizer as a GGUF file, written as llama.cpp's converter writes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGED = ["ĠĠ", "Ċ5"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADS, KV_HEADS, WIDTH = 4, 2, 64
# Where a Llama's weights are in a file; the others keep float32, as norms do.
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
F16, Q8_0, Q4_1 = (GGMLQuantizationType[name] for name in ("F16", "Q8_0", "Q4_1"))


def words() -> list[str]:
    """Tokens by id: special ones, all bytes, and what the merges make."""
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *MERGED]


def tiny_llama(layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    """A random Llama of this vocabulary in fp32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words()),
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.mul_(6)
    return model


def stored(weight: Any, kind: GGMLQuantizationType) -> np.ndarray:
    """What a file of this kind keeps of a weight, as float32."""
    value = np.asarray(weight, dtype=np.float32)
    return quants.dequantize(quants.quantize(value, kind), kind).astype(np.float32)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of llama.cpp's rotation."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(
    path: Path,
    model: LlamaForCausalLM | None = None,
    kind: GGMLQuantizationType = Q4_1,
    pre: str = "smollm",
    tokenizer: bool = True,
    leave_out: str = "",
) -> Path:
    """Write a model to a GGUF file.

    Args:
        path: of the file.
        model: from `tiny_llama`; None: that of seed 0.
        kind: of matrices; the embedding is Q8_0 where they are Q4_1.
        pre: name of the split before merges.
        tokenizer: write one.
        leave_out: a tensor that is missing.
    """
    model = model or tiny_llama()
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        tokens = words()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([TokenType.CONTROL if t in SPECIAL else TokenType.NORMAL for t in tokens])
        writer.add_token_merges([f"{pair[0]} {pair[1]}" for pair in MERGED])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(False)
        writer.add_chat_template(TEMPLATE)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    named = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"} | {
        f"blk.{i}.{short}": f"model.layers.{i}.{long}"
        for i in range(config.num_hidden_layers)
        for short, long in LAYER.items()
    }
    for short, long in named.items():
        value = weights[f"{long}.weight"]
        if short == leave_out:
            continue
        if value.ndim == 1:
            writer.add_tensor(f"{short}.weight", value)
            continue
        if short.endswith(("attn_q", "attn_k")):
            value = interleaved(value, HEADS if short.endswith("q") else KV_HEADS)
        own = Q8_0 if kind == Q4_1 and short == "token_embd" else kind
        writer.add_tensor(f"{short}.weight", quants.quantize(value, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
