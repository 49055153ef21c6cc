"""The settings in a GGUF file, each in the configuration of transformers, or accounted for.

transformers reads some keys of each architecture and passes over the others. Here every key is set in the
configuration, with what llama.cpp takes where a key is missing; or its value is what the class does anyway;
or it is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from decode.errors import UserError
from decode.model.files.account import Account
from decode.model.files.gguf.header import Header
from decode.model.files.gguf.keys import told
from decode.model.files.gguf.rope import Rope, Rotation

# Key without its architecture -> the attribute of a configuration that means the same; the first that the
# class has.
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
# Values that say what a class without such an attribute does anyway.
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
    "expert_gating_func": (0, 1),  # softmax, of all classes that transformers reads experts of
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
    ),  # where the file came from; llama.cpp reads it nowhere
}
NEEDED = ("context_length", "embedding_length", "block_count")
EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
# What llama.cpp (src/models) takes where a file does not say.
ASSUMED: dict[str, dict[str, Any]] = {
    "gemma2": {
        "attention.sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}
HYBRID = ("lfm2",)  # whose heads by layer say which layers have attention; transformers reads that
GEMMAS = {"gemma2": 46, "gemma3": 62}  # layers of the 27B model, whose queries are scaled otherwise
# Switches of a configuration, and the tensor that says whether they are on.
SWITCHES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}


def stated(header: Header) -> dict[str, Any]:
    """Settings of the architecture, and what llama.cpp takes where one is missing.

    Args:
        header: of the file.

    Raises:
        UserError: a size is missing, or does not fit the tensors.
    """
    prefix = f"{header.architecture}."
    said = {
        key.removeprefix(prefix): _scalar(value)
        for key, value in header.keys.items()
        if key.startswith(prefix)
    }
    if header.architecture in HYBRID and isinstance(kv := said.get("attention.head_count_kv"), np.ndarray):
        said["attention.head_count_kv"] = kv.max().item()  # 0 for layers without attention
    for name in ATTRIBUTES.keys() & said.keys():
        if isinstance(said[name], np.ndarray):
            raise UserError(f"{prefix}{name} differs from layer to layer, and one number is read")
    for name in NEEDED:
        value = said.get(name)
        if type(value) is not int or value < 1:
            raise UserError(f"{prefix}{name} is {told(value)}")
    layers = header.layers
    if layers != set(range(min(said["block_count"], len(layers) + 1))):
        raise UserError(
            f"{prefix}block_count is {said['block_count']:,}, and its tensors are of {len(layers):,} layers"
            + (f", to number {max(layers):,}" if layers else "")
        )
    rows = _vocabulary(header, said)
    heads = said.get("attention.head_count")
    if type(heads) is not int or heads < 0:
        raise UserError(f"{prefix}attention.head_count is {told(heads)}, and one number is read")
    if not any(type(said.get(name)) is float for name in EPSILONS):
        raise UserError(f"{prefix}{EPSILONS[0]} is missing")
    defaults: dict[str, Any] = {"vocab_size": rows}
    if heads:
        defaults["attention.head_count_kv"] = heads
        defaults["attention.key_length"] = said["embedding_length"] // heads
    return defaults | ASSUMED.get(header.architecture, {}) | said


def _vocabulary(header: Header, said: dict[str, Any]) -> int:
    """Rows of the embedding, which have to be as wide and as many as the file says."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError("it has no token_embd.weight")
    rows, width = embedding.shape
    if said["embedding_length"] != width:
        raise UserError(
            f"embedding_length is {said['embedding_length']:,}, and token_embd.weight has {width:,}"
        )
    tokens = header.keys.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else 0
    for what, number in (("vocab_size is", said.get("vocab_size", rows)), ("its tokens are", count)):
        if number != rows:
            raise UserError(f"{what} {told(number)}, and token_embd.weight has {rows:,} rows")
    for key, value in header.keys.items():
        if key.endswith("_token_id") and not (type(value) is int and 0 <= value < rows):
            raise UserError(f"{key} is {told(value)}, of {rows:,} tokens")
    return rows


def _scalar(value: Any) -> Any:
    """One number for all layers, where they have the same."""
    if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
        return value[0].item()
    return value


def set_settings(header: Header, config: PreTrainedConfig, account: Account) -> dict[str, Rotation]:
    """Set what a file says in the configuration that transformers has made of it.

    Args:
        header: of the file.
        config: is changed.
        account: of the file.

    Returns:
        How positions are rotated, by kind of layer; with the key "" where all layers are of one.

    Raises:
        UserError: positions are given in a way that is not read, or a size does not fit.
    """
    values, plain = stated(header), type(config)()
    values["block_count"] -= values.get("nextn_predict_layers", 0)  # layers that draft are counted, too
    if hasattr(plain, "sliding_window") and getattr(config, "use_sliding_window", True):
        values.setdefault("attention.sliding_window", None)
    for switch, tensor in SWITCHES.items():
        if hasattr(plain, switch):
            setattr(config, switch, tensor in header.tensors)
    for name, value in values.items():
        if name.startswith("rope."):
            continue
        key = f"{header.architecture}.{name}"
        said = key in header.keys
        attribute = _attribute(name, value, config, plain, header)
        if attribute and _set(config, attribute, value):
            account.count("keys", said)
        elif said and isinstance(value, int | float | str) and value in NEUTRAL.get(name, ()):
            account.ignore("values that say what the class does anyway", [key])
        elif said and name == "context_length":
            account.ignore("a length that the class has no limit for", [key])
        elif said and not _same_size(name, values, header) and not _same_in_class(name, value, config):
            account.refuse(f"settings that transformers' {type(config).__name__} has no place for", [key])
        else:
            account.count("keys", said)
    _set_of_class(header, config, values)
    return _set_positions(header, config, values, account)


def _set_of_class(header: Header, config: Any, values: dict[str, Any]) -> None:
    """What llama.cpp does with a class and its file does not say.

    Raises:
        UserError: layers with attention are others than the file's.
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
    """The attribute that means the same as a key; None where the class has none or does not look at it."""
    if name == "attention.sliding_window" and value and not getattr(config, "use_sliding_window", True):
        return None
    if isinstance(value, np.ndarray) or (name == "feed_forward_length" and value == 0):
        return None
    if name == "attention.key_length" and value != _plain_size(header):
        return "head_dim"  # classes that do not declare it take it, too; shapes tell
    if name in (own := OF_CLASS.get(header.architecture, {})):
        return own[name]
    return next((other for other in ATTRIBUTES.get(name, ()) if hasattr(plain, other)), None)


def _plain_size(header: Header) -> int:
    prefix = header.architecture
    return header.keys[f"{prefix}.embedding_length"] // header.keys[f"{prefix}.attention.head_count"]


def _set(config: PreTrainedConfig, attribute: str, value: Any) -> bool:
    """Set an attribute; whether it has the value then, since some are made from others."""
    try:
        setattr(config, attribute, value)
    except AttributeError:
        return getattr(config, attribute) == value
    return True


def _same_size(name: str, values: dict[str, Any], header: Header) -> bool:
    """Whether a size without an attribute is the one that the class takes from others."""
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
    """Whether a setting of Qwen 3.5 is what transformers has made of it and of others."""
    if not config.model_type.startswith("qwen3_5"):
        return False
    if name == "ssm.inner_size":
        return value == config.linear_num_value_heads * config.linear_value_head_dim
    if name == "nextn_predict_layers":
        return type(value) is int and value >= 0  # their tensors are named
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
        # Of images; in text all sections have the same positions.
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
