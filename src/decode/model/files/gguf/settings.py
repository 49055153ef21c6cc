"""Settings of a GGUF file: each is set in transformers' configuration, or accounted for.

transformers reads some keys of each architecture and ignores the others. Here every key is set in the
configuration (llama.cpp's default if it is missing), or equals the class's fixed behaviour, or is
refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from decode.errors import UserError
from decode.model.files.account import Account
from decode.model.files.gguf.header import Header
from decode.model.files.gguf.keys import shown
from decode.model.files.gguf.rope import Rope, Rotation

# Key without its architecture -> attributes with the same meaning; the first that the class has is used.
ATTRIBUTES = {
    "context_length": ("max_position_embeddings", "n_positions", "seq_length"),
    "embedding_length": ("hidden_size", "n_embd"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "vocab_size": ("vocab_size",),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "use_parallel_residual": ("use_parallel_residual",),
    "shortconv.l_cache": ("conv_L_cache",),
}
OF_CLASS: dict[str, dict[str, str]] = {
    "mamba": {
        "ssm.conv_kernel": "conv_kernel",
        "ssm.inner_size": "intermediate_size",
        "ssm.state_size": "state_size",
        "ssm.time_step_rank": "time_step_rank",
    },
    "qwen35": {
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
}
OF_CLASS["qwen35moe"] = OF_CLASS["qwen35"]
# Values that equal the behaviour of classes without such an attribute.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.head_count": (0,),
    "attention.head_count_kv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # softmax, as in all expert classes that transformers reads
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "ssm.dt_b_c_rms": (False,),
    "tensor_data_layout": (
        "Meta AI original pth",
        "reference",
    ),  # source of the file; llama.cpp never reads it
}
NEEDED = ("context_length", "embedding_length", "block_count")
EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
# llama.cpp's defaults (src/models).
ASSUMED: dict[str, dict[str, Any]] = {
    "gemma2": {
        "attention.sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}
HYBRID = ("lfm2",)  # number of heads per layer is 0 without attention; transformers reads it
GEMMAS = {"gemma2": 46, "gemma3": 62}  # layers of the 27B model, which scales queries differently
# Configuration switches; each is on if this tensor exists.
SWITCHES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}


def stated(header: Header) -> dict[str, Any]:
    """Settings of the architecture, completed with llama.cpp's defaults.

    Args:
        header: of the file.

    Raises:
        UserError: a size is missing or does not fit the tensors.
    """
    prefix = f"{header.architecture}."
    values = {
        key.removeprefix(prefix): _scalar(value)
        for key, value in header.keys.items()
        if key.startswith(prefix)
    }
    if header.architecture in HYBRID and isinstance(kv := values.get("attention.head_count_kv"), np.ndarray):
        values["attention.head_count_kv"] = kv.max().item()  # layers without attention have 0
    for name in ATTRIBUTES.keys() & values.keys():
        if isinstance(values[name], np.ndarray):
            raise UserError(f"{prefix}{name} differs from layer to layer; only one number is supported")
    for name in NEEDED:
        value = values.get(name)
        if type(value) is not int or value < 1:
            raise UserError(f"{prefix}{name} is {shown(value)}")
    layers = header.layers
    if layers != set(range(min(values["block_count"], len(layers) + 1))):
        raise UserError(
            f"{prefix}block_count is {values['block_count']:,}, and its tensors are of {len(layers):,} layers"
            + (f", to number {max(layers):,}" if layers else "")
        )
    rows = _vocabulary(header, values)
    heads = values.get("attention.head_count")
    if type(heads) is not int or heads < 0:
        raise UserError(f"{prefix}attention.head_count is {shown(heads)}; only one number is supported")
    if not any(type(values.get(name)) is float for name in EPSILONS):
        raise UserError(f"{prefix}{EPSILONS[0]} is missing")
    defaults: dict[str, Any] = {"vocab_size": rows}
    if heads:
        defaults["attention.head_count_kv"] = heads
        defaults["attention.key_length"] = values["embedding_length"] // heads
    return defaults | ASSUMED.get(header.architecture, {}) | values


def _vocabulary(header: Header, values: dict[str, Any]) -> int:
    """Rows of the embedding, after checking its width and vocabulary against the file's keys."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError("it has no token_embd.weight")
    rows, width = embedding.shape
    if values["embedding_length"] != width:
        raise UserError(
            f"embedding_length is {values['embedding_length']:,}, and token_embd.weight has {width:,}"
        )
    tokens = header.keys.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else 0
    for what, number in (("vocab_size is", values.get("vocab_size", rows)), ("its tokens are", count)):
        if number != rows:
            raise UserError(f"{what} {shown(number)}, and token_embd.weight has {rows:,} rows")
    for key, value in header.keys.items():
        if key.endswith("_token_id") and not (type(value) is int and 0 <= value < rows):
            raise UserError(f"{key} is {shown(value)}, of {rows:,} tokens")
    return rows


def _scalar(value: Any) -> Any:
    """One number for all layers if they are equal."""
    if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
        return value[0].item()
    return value


def set_settings(header: Header, config: PreTrainedConfig, account: Account) -> dict[str, Rotation]:
    """Write a file's settings to the configuration that transformers built from it.

    Args:
        header: of the file.
        config: changed in place.
        account: of the file.

    Returns:
        Rotation of positions by kind of layer; the key is "" if all layers share one.

    Raises:
        UserError: rotary settings are not supported, or a size does not fit.
    """
    values, plain = stated(header), type(config)()
    values["block_count"] -= values.get("nextn_predict_layers", 0)  # the count includes drafting layers
    if hasattr(plain, "sliding_window") and getattr(config, "use_sliding_window", True):
        values.setdefault("attention.sliding_window", None)
    for switch, tensor in SWITCHES.items():
        if hasattr(plain, switch):
            setattr(config, switch, tensor in header.tensors)
    for name, value in values.items():
        if name.startswith("rope."):
            continue
        key = f"{header.architecture}.{name}"
        in_file = key in header.keys
        attribute = _attribute(name, value, config, plain, header)
        if attribute and _set(config, attribute, value):
            account.count("keys", in_file)
        elif in_file and isinstance(value, int | float | str) and value in NEUTRAL.get(name, ()):
            account.ignore("values that say what the class does anyway", [key])
        elif in_file and name == "context_length":
            account.ignore("a length that the class has no limit for", [key])
        elif in_file and not _same_size(name, values, header) and not _same_in_class(name, value, config):
            account.refuse(f"settings that transformers' {type(config).__name__} has no place for", [key])
        else:
            account.count("keys", in_file)
    _set_of_class(header, config, values)
    return _set_positions(header, config, values, account)


def _set_of_class(header: Header, config: Any, values: dict[str, Any]) -> None:
    """Set what llama.cpp derives from the class, not from the file.

    Raises:
        UserError: other layers have attention than in the file.
    """
    if header.architecture in HYBRID:
        heads = header.keys[f"{header.architecture}.attention.head_count_kv"]
        if [kind == "full_attention" for kind in config.layer_types] != [count > 0 for count in heads]:
            raise UserError("transformers has attention in other layers than the file")
    if layers := GEMMAS.get(header.architecture):
        wide = values["embedding_length"] // values["attention.head_count"]
        large = values["block_count"] == layers
        config.query_pre_attn_scalar = wide if large else values["attention.key_length"]


def _attribute(name: str, value: Any, config: Any, plain: Any, header: Header) -> str | None:
    """Attribute with the same meaning as a key; None if the class has none or ignores it."""
    if name == "attention.sliding_window" and value and not getattr(config, "use_sliding_window", True):
        return None
    if isinstance(value, np.ndarray) or (name == "feed_forward_length" and value == 0):
        return None
    if name == "attention.key_length" and value != _plain_size(header):
        return "head_dim"  # also works for classes that do not declare it; shapes are checked
    if name in (own := OF_CLASS.get(header.architecture, {})):
        return own[name]
    return next((other for other in ATTRIBUTES.get(name, ()) if hasattr(plain, other)), None)


def _plain_size(header: Header) -> int:
    prefix = header.architecture
    return header.keys[f"{prefix}.embedding_length"] // header.keys[f"{prefix}.attention.head_count"]


def _set(config: PreTrainedConfig, attribute: str, value: Any) -> bool:
    """Set an attribute; returns whether it has the value, since some attributes are derived."""
    try:
        setattr(config, attribute, value)
    except AttributeError:
        return getattr(config, attribute) == value
    return True


def _same_size(name: str, values: dict[str, Any], header: Header) -> bool:
    """Whether a size without an attribute equals the one that the class derives from other sizes."""
    same = {
        "attention.key_length": values.get("attention.key_length"),
        "attention.value_length": values.get("attention.key_length"),
        "attention.head_count_kv": values["attention.head_count"],
    }
    if up := header.tensors.get("blk.0.ffn_up.weight"):
        same["feed_forward_length"] = up.shape[0]
    elif name == "feed_forward_length":
        return values[name] == 0
    return name in same and values[name] == same[name]


def _same_in_class(name: str, value: Any, config: Any) -> bool:
    """Whether a setting of Qwen 3.5 equals the one that transformers derived."""
    if not config.model_type.startswith("qwen3_5"):
        return False
    if name == "ssm.inner_size":
        return value == config.linear_num_value_heads * config.linear_value_head_dim
    if name == "nextn_predict_layers":
        return type(value) is int and value >= 0  # their tensors are checked
    attends = [(at + 1) % value == 0 for at in range(config.num_hidden_layers)]
    return name == "full_attention_interval" and attends == [
        kind == "full_attention" for kind in config.layer_types
    ]


def _set_positions(
    header: Header, config: PreTrainedConfig, values: dict[str, Any], account: Account
) -> dict[str, Rotation]:
    prefix = f"{header.architecture}.rope."
    if getattr(config, "rope_parameters", None) is None:
        named = [key for key in (*header.keys, *header.tensors) if key.startswith((prefix, "rope_f"))]
        account.refuse(f"positions that {type(config).__name__} does not rotate", named)
        return {}
    rope = Rope(header, values.get("attention.key_length", 0), values["context_length"])
    if (sections := config.rope_parameters.get("mrope_section")) is not None:
        # For images; in text all sections have the same positions.
        fits = sections == rope.sections() and len(sections) == 3 and 2 * sum(sections) == rope.width
        rope.keys |= {"dimension_sections"} if fits else set()
    unread = sorted(rope.values.keys() - rope.keys)
    account.refuse("settings of positions that are not read", [f"{prefix}{name}" for name in unread])
    account.count("keys", len(rope.keys))
    account.count("tensors", len(rope.tensors))
    everywhere = rope.everywhere()
    if "sliding_attention" not in config.rope_parameters:
        if "freq_base_swa" in rope.values:
            account.refuse("positions of layers with windows", [f"{prefix}freq_base_swa"])
        own = {name: value for name, value in config.rope_parameters.items() if name.startswith("mrope")}
        if "partial_rotary_factor" in config.rope_parameters:
            own["partial_rotary_factor"] = 1.0
        config.rope_parameters = own | everywhere.parameters
        if hasattr(config, "original_max_position_embeddings"):
            original = everywhere.parameters.get("original_max_position_embeddings")
            config.original_max_position_embeddings = original or config.max_position_embeddings
        return {"": everywhere}
    windows = rope.in_windows()
    config.rope_parameters = {
        "full_attention": dict(everywhere.parameters),
        "sliding_attention": dict(windows.parameters),
    }
    return {"full_attention": everywhere, "sliding_attention": windows}
