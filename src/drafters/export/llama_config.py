"""Write and read flat `config.json` files of Llama-like drafters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from decode.errors import UserError
from decode.model.target import Target
from drafters.export.layout import BIASES, Refusal, has_biases
from drafters.layers.decoder_layer import LayerShape
from drafters.layers.rope import SCALINGS, rope_settings

EOS = ("bos_token_id", "eos_token_id", "pad_token_id")
SLIDING = "sliding_attention"


def architecture(config: Mapping[str, Any]) -> str:
    """First entry of `architectures` in a config, or ""."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def config_of(settings: Mapping[str, Any], layers: int, target: Target, dtype: torch.dtype) -> dict[str, Any]:
    """A LlamaConfig with a drafter's sizes and its target's vocabulary, context length and special tokens.

    Rope settings are written twice: as `rope_parameters`, and for readers older than transformers 5.
    """
    longest = getattr(target.config, "max_position_embeddings", None) or target.max_positions
    return {
        "model_type": "llama",
        "hidden_size": settings["hidden_size"],
        "intermediate_size": settings["intermediate_size"],
        "num_hidden_layers": layers,
        "num_attention_heads": settings["heads"],
        "num_key_value_heads": settings["kv_heads"],
        "head_dim": settings["head_dim"],
        "hidden_act": "silu",
        "rms_norm_eps": settings["eps"],
        "attention_bias": has_biases(settings),
        "mlp_bias": False,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **({"max_position_embeddings": longest} if longest else {}),
        **{name: getattr(target.config, name, None) for name in EOS},
        **_positions(settings),
        **_window(settings, layers),
    }


def _window(settings: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Window in transformers' terms: a query sees its own key and the `sliding_window` - 1 before it."""
    if (window := settings.get("window")) is None:
        return {}
    return {"sliding_window": window, "layer_types": [SLIDING] * layers, "use_sliding_window": True}


def window_of(config: Mapping[str, Any]) -> int | None:
    """Window of a config; engines ignore `sliding_window` without `layer_types`.

    Raises:
        UserError: only some of the layers have a window, or its size is invalid.
    """
    kinds = config.get("layer_types") or ()
    if SLIDING not in kinds:
        return None
    if set(kinds) != {SLIDING}:
        raise UserError(
            "some of its layers see a window and others the whole text (layer_types); ours are alike"
        )
    window = config.get("sliding_window")
    if type(window) is not int or window < 1:
        raise UserError(f"its layers have a window, but its sliding_window is {window!r}")
    return window


def _positions(settings: Mapping[str, Any]) -> dict[str, Any]:
    theta, rope = settings["rope_theta"], settings.get("rope") or {}
    kind, part = rope.get("rope_type", "default"), rope.get("partial_rotary_factor")
    positions: dict[str, Any] = {
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": kind, **rope},
    }
    if kind != "default":
        positions["rope_scaling"] = {k: v for k, v in rope.items() if k != "partial_rotary_factor"}
    return positions if part is None else positions | {"partial_rotary_factor": part}


def sizes(config: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: str) -> dict[str, Any]:
    """The inverse of `config_of`: the `LayerShape` part of a drafter's settings.

    Args:
        config: content of the file.
        tensors: by Llama's names.
        layer: name prefix of the first decoder layer.

    Raises:
        UserError: rope scaling that depends on the text's length.
    """
    heads, rope = (
        config["num_attention_heads"],
        config.get("rope_parameters") or config.get("rope_scaling") or {},
    )
    if (scaled := rope.get("rope_type", rope.get("type", "default"))) not in ("default", "mrope", *SCALINGS):
        raise UserError(f"its rotary positions are scaled ({scaled}), which drafters here do not support")
    theta, rope = rope_settings(dict(config))
    shape = LayerShape(
        hidden_size=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        # Not from the config: some files have a `head_dim` that their own readers ignore.
        head_dim=len(tensors[f"{layer}self_attn.q_proj.weight"]) // heads,
        intermediate_size=config["intermediate_size"],
        eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope=rope,
        window=window_of(config),
    )
    return asdict(shape)


def check_target(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target) -> None:
    """Check that files belong to a drafter of this target with Llama's layers.

    Raises:
        UserError: another hidden size, vocabulary, embedding or activation.
    """
    for name, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        check_size(name, size, config[name])
    if (other := config.get("target_hidden_size")) is not None:
        check_size("target_hidden_size", target.hidden_size, other)
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise UserError(f"hidden_act is {act}; drafters here have silu")
    if "embed_tokens.weight" in tensors and not _same(tensors["embed_tokens.weight"], target.embed):
        raise UserError("its embedding is not the target's, which drafters here share; use its own target")


def _same(weight: Tensor, embed: nn.Module) -> bool:
    """Whether an embedding equals the target's up to rounding, in a sample of rows."""
    ours = embed.weight
    assert isinstance(ours, Tensor)
    if ours.shape != weight.shape:
        return False
    step = max(1, len(weight) // 64)
    rows, other_rows = (w[::step].detach().cpu().float() for w in (ours, weight))
    return bool((rows - other_rows).abs().max() <= 2**-6 * rows.abs().max())


def check_embedding(target: Target) -> Iterator[Refusal]:
    """Refuse a target with scaled embeddings: engines share the table with a drafter without the scale."""
    if getattr(target.embed, "embed_scale", 1.0) != 1.0:
        kind = type(target.embed).__name__
        yield Refusal(f"the target scales its embeddings ({kind}), which no engine does for a drafter")


def check_head(target: Target) -> Iterator[Refusal]:
    """Refuse a bias of the target's head: engines share the head with a drafter without the bias."""
    if target.head.bias is not None:
        yield Refusal("the target's head has a bias, which no engine adds for a drafter")


def check_window(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    """Refuse sinks, and a missing window if the target has one, which vLLM would apply."""
    yield from check_sinks(settings)
    config = target.config
    theirs = getattr(config, "sliding_window", None)
    uniform = set(getattr(config, "layer_types", None) or ()) <= {SLIDING}  # condition of vLLM 0.32
    if settings.get("window") is None and theirs and uniform and theirs < (target.max_positions or 2**31):
        yield Refusal(f"vLLM gives a drafter without a window the target's, of {theirs}", {"window": theirs})


def check_no_window(settings: Mapping[str, Any], program: str) -> Iterator[Refusal]:
    """Refuse a window, for a program without windows for drafters."""
    if settings.get("window") is not None:
        yield Refusal(f"{program} has no window for a drafter", {"window": None, "sinks": 0})


def check_plain_attention(settings: Mapping[str, Any], program: str) -> Iterator[Refusal]:
    """Refuse norms of queries and keys, and biases, for a program without them."""
    if settings.get("qk_norm"):
        yield Refusal(f"{program} has no norms of queries and keys", {"qk_norm": False})
    if has_biases(settings):
        yield Refusal(f"{program} has no biases in attention", dict.fromkeys(BIASES, False))


def check_qwen3_bias(settings: Mapping[str, Any]) -> Iterator[Refusal]:
    """Refuse a bias of attention's output in layers with norms of queries and keys, for vLLM."""
    if settings.get("qk_norm") and settings.get("o_bias"):
        yield Refusal("in vLLM a layer with norms of queries and keys has no o_bias", {"o_bias": False})


def check_sinks(settings: Mapping[str, Any]) -> Iterator[Refusal]:
    """Refuse attention sinks, which no engine has for a drafter."""
    if settings.get("sinks"):
        yield Refusal("engines keep no attention sinks for a drafter with a window", {"sinks": 0})


def check_size(name: str, expected: Any, actual: Any) -> None:
    """Check a size against the target's.

    Raises:
        UserError: they differ.
    """
    if expected != actual:
        raise UserError(f"it was made for another target: its {name} is {actual}, the target's {expected}")


def check_tensor_names(names: Iterable[str], required: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Check that all required tensors exist, and that all others are optional.

    Raises:
        UserError: number and first name of missing or unknown tensors.
    """
    names, required = set(names), set(required)
    if missing := sorted(required - names):
        raise UserError(f"{len(missing)} tensors are missing, {missing[0]} first")
    if unknown := sorted(names - required - set(optional)):
        raise UserError(f"{len(unknown)} tensors have no place in such a drafter, {unknown[0]} first")
