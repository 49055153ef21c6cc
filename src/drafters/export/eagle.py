"""EAGLE-1 and 2: export to vLLM, SGLang and the authors' code, import of their files.

Follows `llama_eagle.py` of both engines and `eagle/model/cnets1.py` of SafeAILab/EAGLE. All feed
(embedding, feature) to `fc`, where the feature is the input of the target's head. The first layer has no
`input_layernorm`. `fc` has no bias in vLLM, a bias in SGLang, and the authors' depends on config.json.
Embedding and head are the target's; only the authors' files contain the embedding.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
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
    engine_biases,
    join_projections,
    serve_sglang,
    serve_vllm,
    split_biases,
    split_projections,
    without_confidence,
)
from drafters.export.llama_config import (
    architecture,
    check_embedding,
    check_head,
    check_no_window,
    check_target,
    check_tensor_names,
    check_window,
    config_of,
    sizes,
)
from drafters.export.shapes import embedding_of
from drafters.layers.rope import DEFAULT_THETA

LAYER = "layers.0."
TOKEN_MAP = "token_map.pt"  # list of token ids that SGLang may draft
REQUIRED = {
    "fc.weight",
    *(
        f"layer.{part}.weight"
        for part in ("qkv_proj", "o_proj", "post_attention_layernorm", "gate_up_proj", "down_proj")
    ),
}
OPTIONAL = ("fc.bias", "layer.qkv_proj.bias", "layer.o_proj.bias")
# Training settings, which the files do not contain.
TRAINING_SETTINGS = {"depth": 1, "feature_noise": 0.0, "feature_weight": 0.0}
SHARED = ("embed_tokens.weight", "lm_head.weight")
# Target classes of `eagle/model/ea_model.py`; it loads any other as a Mixtral.
AUTHORS_TARGETS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM")
INDEX_NOTE = (
    "Its loader finds the target's embedding through the target's model.safetensors.index.json and fails "
    "if there is none. For a target in a single file, write that index: "
    '{"weight_map": {"model.embed_tokens.weight": "model.safetensors"}}. '
    "Version 1.2.1 of the package reads the embedding from the drafter's file and needs no index."
)


def _check(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    del settings
    yield from check_embedding(target)
    yield from check_head(target)


def _check_sglang(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from _check(settings, target)
    if settings.get("window") is not None:
        reason = "SGLang's EAGLE applies a window only while it drafts, not while it reads the text"
        yield Refusal(reason, {"window": None, "sinks": 0})


def _check_vllm(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from _check(settings, target)
    yield from check_window(settings, target)
    if settings["bias"]:
        yield Refusal("its fusion has a bias, and vLLM's EAGLE has none", {"bias": False})


def check_authors(
    settings: Mapping[str, Any], target: Target, classes: Sequence[str] = AUTHORS_TARGETS
) -> Iterator[Refusal]:
    """Requirements of the authors' code for any EAGLE: a supported target class and rotary positions.

    Args:
        settings: of the drafter.
        target: of the drafter.
        classes: supported target classes.
    """
    yield from check_embedding(target)
    if (name := type(target.model).__name__) not in classes:
        known = f"{', '.join(classes[:-1])} and {classes[-1]}"
        yield Refusal(f"the target is a {name}, and the authors' code supports only {known}")
    yield from check_no_window(settings, "the authors' code")
    theta, rope = settings["rope_theta"], settings.get("rope") or {}
    kind = rope.get("rope_type", "default")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield Refusal("it rotates a part of each head, and the authors' code the whole head")
    # Its class for linear scaling ignores the base.
    if kind not in ("default", "linear") or (kind == "linear" and theta != DEFAULT_THETA):
        yield Refusal(
            f"its positions ({kind}, base {theta:g}) are not the authors'; their code has unscaled ones and "
            f"linear scaling with base {DEFAULT_THETA:g}"
        )


def _check_authors(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from check_authors(settings, target)
    yield from check_head(target)
    if settings.get("o_bias"):
        yield Refusal("the authors' EAGLE-1 has no bias of attention's output", {"o_bias": False})
    count, each, size = settings["heads"], settings["head_dim"], settings["hidden_size"]
    if count * each != size:
        yield Refusal(f"{count} heads of {each} are not {size} together, as the authors' EAGLE-1 needs")


def _to_vllm(saved: Saved, target: Target) -> Layout:
    """Files of `EagleLlamaForCausalLM`."""
    tensors = engine_biases(_tensors(saved), saved.settings)
    # vLLM prefixes the name with "Eagle". It reads `bias` as attention bias, so it must be false.
    config = _config(saved, target) | {"architectures": ["LlamaForCausalLM"], "bias": False}
    if "layer_types" in config:  # vLLM numbers a drafter's layers after the target's
        config["target_layer_count"] = len(target.layers)
    return Layout(config, tensors, serve_vllm("eagle", draft_length(saved.settings)))


def _to_sglang(saved: Saved, target: Target) -> Layout:
    """Files of `LlamaForCausalLMEagle`; a draft vocabulary is a separate file with a list of ids."""
    tensors = engine_biases(_tensors(saved), saved.settings)
    serve = serve_sglang("EAGLE", draft_length(saved.settings))
    ids, files = tensors.pop("d2t", None), {}
    if ids is not None:
        torch.save(ids.tolist(), buffer := io.BytesIO())
        serve += f" --speculative-token-map {{drafter}}/{TOKEN_MAP}"
        files = {TOKEN_MAP: buffer.getvalue()}
    if "fc.bias" not in tensors:  # SGLang's `fc` has a bias that would stay uninitialised
        tensors["fc.bias"] = torch.zeros_like(tensors["fc.weight"][:, 0])
    config = _config(saved, target) | {"architectures": ["LlamaForCausalLMEagle"]}
    return Layout(config, tensors, serve, files=files)


def _to_authors(saved: Saved, target: Target) -> Layout:
    """Files of `EaModel` (SafeAILab), with the embedding that versions with `strict=True` require."""
    tensors = with_embedding(_tensors(saved), target)
    config = authors_config(_config(saved, target)) | {"bias": "fc.bias" in tensors}
    config["qkv_bias"] = config.pop("attention_bias")
    note = f"{authors_call(use_eagle3=False)} {INDEX_NOTE}"
    return Layout(config | {"architectures": ["LlamaForCausalLM"]}, tensors, note=note)


def with_embedding(tensors: dict[str, Tensor], target: Target) -> dict[str, Tensor]:
    """Add the target's embedding to tensors, in the dtype of `fc.weight`."""
    return tensors | {"embed_tokens.weight": embedding_of(target).to(tensors["fc.weight"].dtype)}


def authors_config(config: dict[str, Any]) -> dict[str, Any]:
    """Convert rotary positions for `EConfig`: `rope_theta`, and `rope_scaling` with type and factor."""
    config = {name: value for name, value in config.items() if name != "rope_parameters"}
    if scaling := config.get("rope_scaling"):
        config["rope_scaling"] = {"type": scaling["rope_type"], "factor": float(scaling["factor"])}
    return config


def authors_call(use_eagle3: bool) -> str:
    """Text that describes how the authors' code loads a folder."""
    return (
        f"SafeAILab/EAGLE loads this folder by EaModel.from_pretrained(use_eagle3={use_eagle3}, "
        "base_model_path=<the target>, ea_model_path=<this folder>)."
    )


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
    """Draft length for serving: the trained depth, at least 3 (as in vLLM's examples)."""
    return max(3, int(settings["depth"]))


def _is_eagle(config: Mapping[str, Any]) -> bool:
    name = architecture(config)
    if "format" in config or "speculators_config" in config or "draft_vocab_size" in config:
        return False
    # The authors' files have the config of a Llama with one layer.
    plain = name == "LlamaForCausalLM" and config.get("num_hidden_layers") == 1
    return plain or name in ("LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle", "EagleLlamaForCausalLM")


def _read(layout: Layout, target: Target) -> Saved:
    config = layout.config
    tensors = {k.removeprefix("model."): v for k, v in layout.tensors.items() if "rotary_emb" not in k}
    if "fc.weight" not in tensors:
        raise UserError("a language model with one layer, no EAGLE (it has no fc.weight)")
    check_target(config, tensors, target)
    if config.get("num_hidden_layers", 1) != 1:
        raise UserError(f"it has {config['num_hidden_layers']} layers; EAGLE has 1 here")
    layers, biases = split_biases({k: v for k, v in tensors.items() if k not in SHARED}, config)
    weights = {k.replace(LAYER, "layer.", 1): v for k, v in join_projections(layers).items()}
    check_tensor_names(set(weights), REQUIRED, OPTIONAL)
    if "fc.bias" in weights and not weights["fc.bias"].any():  # SGLang's, of a drafter without a bias
        del weights["fc.bias"]
    settings = sizes(config, tensors, LAYER) | TRAINING_SETTINGS | biases | {"bias": "fc.bias" in weights}
    return Saved("eagle", settings, weights)


VLLM = Format(_to_vllm, _check_vllm, draft_length)
SGLANG = Format(_to_sglang, _check_sglang, draft_length)
AUTHORS = Format(_to_authors, _check_authors)
READER = Reader("EAGLE", _is_eagle, _read)
