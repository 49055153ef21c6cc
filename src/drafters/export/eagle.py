"""EAGLE-1 and 2: export to vLLM and SGLang, import of theirs and of the authors' files.

After `llama_eagle.py` of both engines and `eagle/model/cnets1.py` of SafeAILab/EAGLE: all feed
(embedding, feature) to `fc`, where the feature is the input of the target's head, and have no
`input_layernorm` in the first layer; vLLM's `fc` has no bias, SGLang's has one. Embedding and head are
the target's.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from decode.errors import UserError
from decode.model.target import Target
from drafters.export.layout import (
    Format,
    Layout,
    Reader,
    Refusal,
    Saved,
    join_projections,
    serve_sglang,
    serve_vllm,
    split_projections,
    without_confidence,
)
from drafters.export.llama_config import (
    architecture,
    check_embedding,
    check_head,
    check_target,
    check_tensor_names,
    config_of,
    sizes,
)

LAYER = "layers.0."
TOKEN_MAP = "token_map.pt"  # tokens that SGLang may draft, a list of ids
OWN = {
    "fc.weight",
    *(
        f"layer.{part}.weight"
        for part in ("qkv_proj", "o_proj", "post_attention_layernorm", "gate_up_proj", "down_proj")
    ),
}
# Settings of training, which the files do not contain.
UNTOLD = {"depth": 1, "feature_noise": 0.0, "feature_weight": 0.0}
SHARED = ("embed_tokens.weight", "lm_head.weight")


def _check(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    del settings
    yield from check_embedding(target)
    yield from check_head(target)


def _check_vllm(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from _check(settings, target)
    if settings["bias"]:
        yield Refusal("its fusion has a bias, and that of vLLM's EAGLE has none", {"bias": False})


def _to_vllm(saved: Saved, target: Target) -> Layout:
    """Files of `EagleLlamaForCausalLM`."""
    tensors = _tensors(saved)
    # vLLM prefixes the name with "Eagle". It reads `bias` as attention bias, so it must be false.
    config = _config(saved, target) | {"architectures": ["LlamaForCausalLM"], "bias": False}
    return Layout(config, tensors, serve_vllm("eagle", draft_length(saved.settings)))


def _to_sglang(saved: Saved, target: Target) -> Layout:
    """Files of `LlamaForCausalLMEagle`; a draft vocabulary is a list of ids in a file of its own."""
    tensors, serve = _tensors(saved), serve_sglang("EAGLE", draft_length(saved.settings))
    ids, files = tensors.pop("d2t", None), {}
    if ids is not None:
        torch.save(ids.tolist(), buffer := io.BytesIO())
        serve += f" --speculative-token-map {{drafter}}/{TOKEN_MAP}"
        files = {TOKEN_MAP: buffer.getvalue()}
    if "fc.bias" not in tensors:  # SGLang's `fc` has a bias that would stay uninitialised
        tensors["fc.bias"] = torch.zeros_like(tensors["fc.weight"][:, 0])
    config = _config(saved, target) | {"architectures": ["LlamaForCausalLMEagle"]}
    return Layout(config, tensors, serve, files=files)


def _tensors(saved: Saved) -> dict[str, Tensor]:
    names = split_projections(without_confidence(saved), saved.settings).items()
    return {k.replace("layer.", LAYER, 1) if k.startswith("layer.") else k: v for k, v in names}


def _config(saved: Saved, target: Target) -> dict[str, Any]:
    config, head = config_of(saved.settings, 1, target, saved.weights["fc.weight"].dtype), target.head
    if head.scale != 1.0:
        config["logit_scale"] = head.scale
    if head.softcap is not None:
        config["final_logit_softcapping"] = head.softcap
    return config


def draft_length(settings: Mapping[str, Any]) -> int:
    """Draft length for serving: the trained depth, and at least 3 (as in vLLM's examples)."""
    return max(3, int(settings["depth"]))


def _knows(config: Mapping[str, Any]) -> bool:
    name = architecture(config)
    if "format" in config or "speculators_config" in config or "draft_vocab_size" in config:
        return False
    # The config of the authors' files is that of a Llama with one layer.
    plain = name == "LlamaForCausalLM" and config.get("num_hidden_layers") == 1
    return plain or name in ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM")


def _read(layout: Layout, target: Target) -> Saved:
    config = layout.config
    tensors = {k.removeprefix("model."): v for k, v in layout.tensors.items() if "rotary_emb" not in k}
    if "fc.weight" not in tensors:
        raise UserError("a language model of one layer, no EAGLE (it has no fc.weight)")
    check_target(config, tensors, target)
    if config.get("num_hidden_layers", 1) != 1:
        raise UserError(f"it has {config['num_hidden_layers']} layers; EAGLE has 1 here")
    layers = {k: v for k, v in tensors.items() if k not in SHARED}
    weights = {k.replace(LAYER, "layer.", 1): v for k, v in join_projections(layers).items()}
    check_tensor_names(set(weights), OWN, ("fc.bias",))
    if "fc.bias" in weights and not weights["fc.bias"].any():  # SGLang's, of a drafter without a bias
        del weights["fc.bias"]
    bias = "fc.bias" in weights
    return Saved("eagle", sizes(config, tensors, LAYER) | UNTOLD | {"bias": bias}, weights)


VLLM = Format(_to_vllm, _check_vllm, draft_length)
SGLANG = Format(_to_sglang, _check, draft_length)
READER = Reader("EAGLE", _knows, _read)
