"""MTP: export to vLLM and transformers, and import of vLLM's files or of a target's own head.

Follows vLLM 0.32. With `"method": "mtp"` and a `"model"`, the head is read from that folder instead of the
target's; embedding and output head are the target's and in no file. The head's class comes from
`architectures` of the folder, its sizes from the configuration of the *served target*, and its number of
layers from `num_nextn_predict_layers` there, which `--hf-overrides` adds. `MiMoForCausalLM` is a dense Llama
layer with biases of q, k, v (`mimo_mtp.py`). It reads the hidden state that the target's class returns: after
the final norm, except in MiMo. So a new head serves a target of any class.

transformers 5.24 (`MtpModel`, `generate(use_mtp=True)`) builds a head of the target's own layers, one for
each drafted token, if the target's class names tensors of a head. Our head is one dense layer, so a draft
there has one token. Mellum's class names them, and its layers can be dense and rolled back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from decode.errors import UserError
from decode.model.target import Target
from drafters.export.eagle import draft_length
from drafters.export.layout import Format, Layout, Reader, Refusal, Saved, serve_vllm, without_confidence
from drafters.export.llama_config import (
    architecture,
    check_embedding,
    check_head,
    check_target,
    config_of,
    sizes,
)
from drafters.export.shapes import dtype_of
from drafters.hf.build import portable_config
from drafters.hf.mtp_weights import (
    MIMO,
    PRODUCTS,
    architecture_of,
    arrangement_of,
    final_norm,
    mimo_arrangement,
    native,
    read,
)
from drafters.layers.decoder_layer import LayerShape

LAYERS = "num_nextn_predict_layers"
COUNTS = (LAYERS, "mtp_num_hidden_layers")
AS_MIMO = ("", "mimo")  # families that are written as MiMo's
SERVED = ("qwen",)  # other families with dense classes
SIZES = ("hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size", "eps")
MELLUM = "mellum"
POSITIONS = ("rope_theta", "rope", "window")
NOTE = (
    "In transformers: model = AutoModelForCausalLM.from_pretrained(<the target>, "
    "config=AutoConfig.from_pretrained(<this folder>)); model.config.name_or_path = <this folder>; "
    "model.generate(**inputs, use_mtp=True). A draft has one token."
)


def _check(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from check_embedding(target)
    yield from check_head(target)
    served = arrangement_of(target)
    if settings["family"] in AS_MIMO:
        yield from _check_layer(settings, target)
        served = mimo_arrangement(target)
    elif settings["family"] not in SERVED:
        yield Refusal(
            "vLLM's MTP layers with these names have experts or latent attention, and this one has neither"
        )
        return
    if served is None:
        yield Refusal(f"vLLM's order of inputs is unknown for an MTP of {target.config.model_type!r}")
        return
    for name, value in served._asdict().items():
        if settings[name] != value:
            reason = (
                f"drafter.{name}={str(settings[name]).lower()}, which differs from vLLM's MTP of this target"
            )
            yield Refusal(reason, {name: value})


def _check_layer(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    """Check that vLLM builds this layer from the served target's configuration, as MiMo's MTP."""
    if target.model.config is not target.config:
        yield Refusal(
            "vLLM's MTP of MiMo reads a flat configuration, and the target has a nested one for text"
        )
    shape = asdict(LayerShape.of(target))
    if different := [name for name in SIZES if settings[name] != shape[name]]:
        yield Refusal(f"vLLM gives the MTP layer the target's sizes, and its {different[0]} is another")
    if settings["heads"] * settings["head_dim"] != settings["hidden_size"]:
        yield Refusal("vLLM's MTP layer has heads of size hidden_size / heads, and the target's differ")
    if (act := getattr(target.config, "hidden_act", "silu")) != "silu":
        yield Refusal(f"vLLM gives the MTP layer the target's hidden_act, {act}, and ours has silu")
    for name in ("qk_norm", "gate", "zero_centred"):
        if settings[name]:
            yield Refusal(f"vLLM's MTP of MiMo has no {name}")


def _to_vllm(saved: Saved, target: Target) -> Layout:
    """Files of `MiMoMTP`, or of the class of the target's own MTP head."""
    weights = {n: w for n, w in without_confidence(saved).items() if n != "target_scale"}
    tensors = native(weights, saved.settings, len(target.layers))
    serve = serve_vllm("mtp", draft_length(saved.settings))
    if saved.settings["family"] not in AS_MIMO:
        config = portable_config(json.loads(target.model.config.to_json_string()))
        config["torch_dtype"] = str(weights["fc.weight"].dtype).removeprefix("torch.")
        return Layout(config | {"architectures": [architecture_of(target)]}, tensors, serve)
    layer = next(name for name in tensors if name.endswith(f"{PRODUCTS['qkv_proj'][0]}.weight"))
    stem = layer.removesuffix(f"{PRODUCTS['qkv_proj'][0]}.weight")
    for part in PRODUCTS["qkv_proj"]:  # vLLM would leave missing biases uninitialised
        tensors.setdefault(f"{stem}{part}.bias", torch.zeros_like(tensors[f"{stem}{part}.weight"][:, 0]))
    config = config_of(saved.settings, len(target.layers), target, weights["fc.weight"].dtype)
    config |= {"architectures": [MIMO], "model_type": "qwen2", LAYERS: 1}
    if not getattr(target.config, LAYERS, None):
        override = f"vllm serve {{target}} --hf-overrides '{{{{\"{LAYERS}\": 1}}}}' "
        serve = serve.replace("vllm serve {target} ", override)
    return Layout(config, tensors, serve)


def _check_transformers(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    if (kind := target.config.model_type) != MELLUM:
        yield Refusal(
            "transformers 5.24 builds an MTP head of the target's own layers, where its class names a head's "
            f"tensors; ours is known to be the same only beside a Mellum, and the target is a {kind!r}"
        )
        return
    if settings["family"] not in ("", "qwen"):
        yield Refusal(f"transformers has no MTP layer with the names of {settings['family']!r} for a Mellum")
    if settings["before_norm"]:
        yield Refusal("transformers hands on the state after the final norm", {"before_norm": False})
    shape = asdict(LayerShape.of(target))
    if different := [name for name in (*SIZES, *POSITIONS) if settings.get(name) != shape[name]]:
        yield Refusal(f"transformers' MTP layer is the target's, and its {different[0]} is another")
    if not settings["qk_norm"]:
        yield Refusal("a Mellum's layers normalise queries and keys", {"qk_norm": True})
    if foreign := [name for name in ("qkv_bias", "gate", "zero_centred") if settings[name]]:
        yield Refusal(f"a Mellum's layers have no {foreign[0]}")
    if target.config.attention_bias or target.config.hidden_act != "silu":
        yield Refusal("the target's layers have biases, or another activation than silu")


def _to_transformers(saved: Saved, target: Target) -> Layout:
    """The target's configuration with one dense MTP layer, and only the tensors of the head."""
    names = dict(saved.settings) | {"family": "qwen"}  # Mellum's are the same
    tensors = native(without_confidence(saved), names, len(target.layers))
    config = portable_config(json.loads(target.model.config.to_json_string()))
    config |= {
        "dtype": dtype_of(tensors),
        "mtp_hidden_states_first": saved.settings["hidden_first"],
        "mtp_layer_types": ["full_attention"],
        "mtp_mlp_layer_types": ["dense"],
        LAYERS: 1,
    }
    return Layout(config, tensors, note=NOTE)


def _has_mtp_head(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config")
    parts = [config, text if isinstance(text, dict) else {}]
    return "format" not in config and any(part.get(name) for part in parts for name in COUNTS)


def _read(layout: Layout, target: Target) -> Saved:
    config = layout.config
    config = config.get("text_config") or config
    check_target(config, {}, target)
    head = read(layout.tensors, target)
    if head is None:
        raise UserError("no MTP head among its tensors")
    settings = sizes_of(config, head.settings)
    mimo = architecture(layout.config) == MIMO
    arrangement = arrangement_of(target)
    if mimo:
        arrangement = mimo_arrangement(target)
    if arrangement is None:
        raise UserError(
            f"the order of its inputs is unknown for {target.config.model_type!r}; "
            "train drafter=mtp drafter.path=<the folder>, which compares all orders"
        )
    norm = final_norm(target)
    weights = dict(head.weights)
    if arrangement.before_norm:
        assert norm is not None  # for MiMo
        weights["target_scale"] = norm.scale.to(weights["fc.weight"])
    settings |= arrangement._asdict() | {"family": head.family, "depth": 1}
    settings["zero_centred"] = norm is not None and norm.zero_centred
    return Saved("mtp", settings, weights)


def sizes_of(config: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of the layer: positions and norms from the config, all others from the tensors."""
    rows = torch.empty(found["heads"] * found["head_dim"], 0)
    return sizes(config, {"self_attn.q_proj.weight": rows}, "") | dict(found)


VLLM = Format(_to_vllm, _check, draft_length)
TRANSFORMERS = Format(_to_transformers, _check_transformers, lambda _: 1)
READER = Reader("MTP", _has_mtp_head, _read)
