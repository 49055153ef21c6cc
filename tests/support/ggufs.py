"""A tiny Llama and its tokenizer as a GGUF file, written as llama.cpp's converter writes one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, TokenType, quants
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from workbench import enlarge

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGED = ["ĠĠ", "Ċ5"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADS, KV_HEADS, WIDTH = 4, 2, 64


def under(name: str, **keys: Any) -> dict[str, Any]:
    """Keys with a prefix; dots are written as __."""
    return {f"{name}.{key.replace('__', '.')}": value for key, value in keys.items()}


def _places(words: str) -> dict[str, str]:
    """Pairs of `name=place`."""
    return dict(word.split("=") for word in words.split())


# Where a Llama's weights are in a file; the others keep float32, as norms do.
LAYER = _places("""
    attn_q=self_attn.q_proj attn_k=self_attn.k_proj attn_v=self_attn.v_proj attn_output=self_attn.o_proj
    ffn_gate=mlp.gate_proj ffn_up=mlp.up_proj ffn_down=mlp.down_proj
    attn_norm=input_layernorm ffn_norm=post_attention_layernorm
""")
LAYERS = {
    "qwen3": _places("attn_q_norm=self_attn.q_norm attn_k_norm=self_attn.k_norm"),
    "gemma2": _places("""
        post_attention_norm=post_attention_layernorm ffn_norm=pre_feedforward_layernorm
        post_ffw_norm=post_feedforward_layernorm
    """),
    "phi3": _places("attn_qkv=self_attn.qkv_proj ffn_up=mlp.gate_up_proj"),
}
LAYERS["gemma3"] = LAYERS["gemma2"] | LAYERS["qwen3"]
LAYERS["qwen35"] = LAYERS["qwen3"] | _places("""
    post_attention_norm=post_attention_layernorm attn_qkv=linear_attn.in_proj_qkv
    attn_gate=linear_attn.in_proj_z ssm_alpha=linear_attn.in_proj_a ssm_beta=linear_attn.in_proj_b
    ssm_conv1d=linear_attn.conv1d ssm_norm=linear_attn.norm ssm_out=linear_attn.out_proj
    ssm_a=linear_attn.A_log ssm_dt=linear_attn.dt_bias
""")
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
QWEN35 = {"num_hidden_layers": 4, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 8}
QWEN35 |= {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
SECTIONS = {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
QWEN35 |= {"rope_parameters": PLAIN | SECTIONS}
STATE = {"conv_kernel": 4, "state_size": 16, "group_count": 2, "time_step_rank": 6, "inner_size": 48}
QWEN35_KEYS = under("qwen35.rope", dimension_count=8, dimension_sections=[2, 1, 1, 0])
QWEN35_KEYS |= under("qwen35.ssm", **STATE) | under("qwen35", full_attention_interval=4)
F32, F16, Q8_0, Q4_1 = (GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0", "Q4_1"))


def words() -> list[str]:
    """Tokens by id: special ones, all bytes, and what the merges make."""
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *MERGED]


def tiny_llama(layers: int = 2, seed: int = 0, **more: Any) -> LlamaForCausalLM:
    """A random Llama of this vocabulary in fp32; `more` are settings."""
    torch.manual_seed(seed)
    own: dict[str, Any] = {"vocab_size": len(words()), "hidden_size": WIDTH, "intermediate_size": 64}
    own |= {"num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    own |= {"max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**(own | {"bos_token_id": 1, "eos_token_id": 2} | more)))
    enlarge(model, 6)
    return model


def random_model(kind: str, **more: Any) -> Any:
    """A random model of a class, in fp32, whose norms are not all 1."""
    torch.manual_seed(0)
    shape = {"vocab_size": len(words()), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = AutoConfig.for_model(kind, **(shape | {"pad_token_id": None} | more))
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.float().parameters():
        weight.data.mul_(6) if weight.dim() > 1 else weight.data.add_(torch.randn(weight.shape) * 0.2)
    return model.eval()


def stored(weight: Any, kind: GGMLQuantizationType) -> np.ndarray:
    """What a file of this kind keeps of a weight, as float32."""
    value = np.asarray(weight, dtype=np.float32)
    return quants.dequantize(quants.quantize(value, kind), kind).astype(np.float32)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of llama.cpp's rotation."""
    rows, *columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, *columns).swapaxes(1, 2).reshape(weight.shape)


def converter_factors(factor, low, high, original, base, size) -> np.ndarray:
    """`rope_freqs.weight`, step by step as llama.cpp's converter makes it."""
    found = []
    for at in range(0, size, 2):
        wave = 2 * math.pi * base ** (at / size)
        smooth = (original / wave - low) / (high - low)
        if wave < original / high:
            found.append(1.0)
        elif wave > original / low:
            found.append(factor)
        else:
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


def settings(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    """Keys of a model's sizes, as the converter writes them."""
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    names = _places("""
        block_count=num_hidden_layers context_length=max_position_embeddings embedding_length=hidden_size
        feed_forward_length=intermediate_size attention.head_count=num_attention_heads vocab_size=vocab_size
        attention.head_count_kv=num_key_value_heads attention.layer_norm_rms_epsilon=rms_norm_eps
    """)
    sizes = {name: getattr(config, own) for name, own in names.items()}
    sizes |= {"rope.freq_base": 10000.0, "rope.dimension_count": head}
    if head != config.hidden_size // config.num_attention_heads:
        sizes |= {"attention.key_length": head, "attention.value_length": head}
    return {f"{architecture}.{name}": value for name, value in sizes.items()}


def vocabulary(pre: str = "smollm") -> dict[str, Any]:
    """Keys of the tokenizer."""
    tokens = words()
    kinds = [int(TokenType.CONTROL if t in SPECIAL else TokenType.NORMAL) for t in tokens]
    about = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "add_bos_token": False}
    about |= {"merges": [" ".join(pair) for pair in MERGED], "bos_token_id": 1, "eos_token_id": 2}
    found = {f"tokenizer.ggml.{name}": value for name, value in about.items()}
    return found | {"tokenizer.chat_template": TEMPLATE}


def pieces(special: Sequence[str] = ("<unk>", "<s>", "</s>")) -> dict[str, Any]:
    """Keys of a tokenizer of SentencePiece, of as many tokens as `words`: special ones, bytes, blank."""
    count = len(words())
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"][:count]
    kinds = [int(TokenType.BYTE if t.startswith("<0x") else TokenType.NORMAL) for t in tokens]
    for number, token in enumerate(special):
        kinds[number] = int(TokenType.UNKNOWN if token == "<unk>" else TokenType.CONTROL)
    about = {"model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds, "merges": None}
    about |= {"scores": [-float(number) for number in range(count)], "add_bos_token": True}
    about |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{name}": value for name, value in about.items()}


def weights(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """Tensors by their names in a file."""
    config, state = model.config, {name: value.numpy() for name, value in model.state_dict().items()}
    layer = LAYER | LAYERS.get(architecture, {})
    if architecture == "qwen35":
        del layer["ffn_norm"]  # its norm before the MLP has another name
    named = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"} | {
        f"blk.{i}.{short}": f"model.layers.{i}.{long}"
        for i in range(config.num_hidden_layers)
        for short, long in layer.items()
    }
    if not config.tie_word_embeddings:
        named["output"] = "lm_head"
    found = {}
    for short, long in named.items():
        bare = "", ".bias" if "_dt" in short else ""
        for part, suffix in ((".weight", ".weight"), (".bias", ".bias"), bare):
            if (value := state.get(f"{long}{part}")) is not None:
                found[f"{short}{suffix}"] = converted(value, short.split(".")[-1], architecture, config)
    return found


def converted(value: np.ndarray, short: str, architecture: str, config: Any) -> np.ndarray:
    """A weight as the converter writes it."""
    if architecture == "llama" and short in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if short == "attn_q" else config.num_key_value_heads
        return interleaved(value, heads)
    if architecture.startswith(("gemma", "qwen35")) and short.endswith("norm") and short != "ssm_norm":
        return value + 1
    if architecture != "qwen35":
        return value
    size, before = config.linear_value_head_dim, 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if short == "ssm_out":
        return tiled(value.T, config, size).T
    if short in ("attn_qkv", "ssm_conv1d"):
        value = value[:, 0] if value.ndim == 3 else value
        return np.concatenate([value[:before], tiled(value[before:], config, size)])
    if short in ("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta", "attn_gate"):
        value = tiled(value, config, size if short == "attn_gate" else 1)
    return -np.exp(value) if short == "ssm_a" else value


def tiled(value: np.ndarray, config: Any, size: int) -> np.ndarray:
    """Rows of value heads in the order of Qwen 3.5's files: one head of each key head, then the next."""
    keys = config.linear_num_key_heads
    heads = value.reshape(keys, -1, size, *value.shape[1:])
    return heads.swapaxes(0, 1).reshape(value.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel | None = None,
    kind: GGMLQuantizationType = Q4_1,
    pre: str = "smollm",
    tokenizer: bool = True,
    leave_out: str = "",
    architecture: str = "llama",
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Write a model to a GGUF file.

    Args:
        path: of the file.
        model: from `tiny_llama`, or another with the same vocabulary; None: that of seed 0.
        kind: of matrices; the embedding is Q8_0 where they are Q4_1.
        pre: name of the split before merges.
        tokenizer: write one.
        leave_out: a tensor that is missing.
        architecture: as llama.cpp calls it.
        keys: others, instead of the model's; None leaves one out.
        tensors: others, in float32; None leaves one out.
    """
    model = model or tiny_llama()
    written = settings(model, architecture) | (vocabulary(pre) if tokenizer else {}) | dict(keys or {})
    found = weights(model, architecture) | {f"{leave_out}.weight": None} | dict(tensors or {})
    named = written.pop("general.architecture", architecture)
    writer = GGUFWriter(path, named)
    for name, value in written.items():
        if value is not None:
            add_key(writer, name, value)
    for name, value in found.items():
        if value is None:
            continue
        own = kind
        if value.ndim < 2 or name in (tensors or {}):
            own = GGMLQuantizationType.F32
        elif kind == Q4_1 and name.startswith("token_embd"):
            own = Q8_0
        value = np.ascontiguousarray(value, dtype=np.float32)
        writer.add_tensor(name, quants.quantize(value, own) if own != 0 else value, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: GGUFWriter, name: str, value: Any) -> None:
    """Write a key with the type that its value has."""
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    writer.add_key_value(name, value, GGUFValueType[kinds[type(value)]])
