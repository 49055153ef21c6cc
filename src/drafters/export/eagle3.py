"""EAGLE-3 and P-EAGLE: export to vLLM, SGLang and SafeAILab's code, import of their and SpecForge's files.

Follows `llama_eagle3.py` of both engines. `midlayer.*` is the first layer. `d2t` holds offsets,
target id - draft id, for a reduced draft vocabulary only. Layer ids at the top level (vLLM) number inputs
of layers, as ours; ids in `eagle_config` (SGLang, SpecForge) number outputs of layers: ours minus 1.
Without ids both use [2, n / 2, n - 3] in our numbering, as SafeAILab's `modeling_llama_kv.py` always does.
The embedding is the target's; only SafeAILab's files contain it, and P-EAGLE's: those are an EAGLE-3's for
vLLM with `mask_hidden` and the id of a token whose row in the embedding is the other mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from decode.errors import UserError
from decode.model.target import Target
from drafters.export.eagle import authors_call, authors_config, check_authors, draft_length, with_embedding
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
    trained_depth,
    without_confidence,
)
from drafters.export.llama_config import (
    architecture,
    check_embedding,
    check_no_window,
    check_plain_attention,
    check_qwen3_bias,
    check_sinks,
    check_target,
    check_tensor_names,
    check_window,
    config_of,
    sizes,
)
from drafters.export.shapes import check_taps, default_taps, read_vocab_maps, sort_taps, taps_of, vocab_maps
from drafters.export.speculators_read import read_masks
from drafters.export.speculators_write import check_masks, split_masks

FIRST_LAYER = "midlayer."
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
IDS = "eagle_aux_hidden_state_layer_ids"
QWEN3 = "Eagle3Qwen3ForCausalLM"  # vLLM's class whose layers have norms of queries and keys
P_EAGLES = ("PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM")  # names in vLLM
QK_NORMS = ("q_norm", "k_norm")
PRODUCTS = {"qkv_proj": "qkv_bias", "o_proj": "o_bias"}  # part of a layer -> setting of its bias
LAYER = ("qkv_proj", "o_proj", "post_attention_layernorm", "input_layernorm", "gate_up_proj", "down_proj")
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")  # keys in the order of vLLM
PARALLEL_DEPTH = 8  # speculators' default in training; the files do not contain it
PARALLEL_NOTE = "only for vLLM's parallel drafting: any other program would take it for an EAGLE-3"
SHARED = ("embed_tokens.weight", "d2t", "t2d")
AUTHORS_TARGETS = ("LlamaForCausalLM", "Qwen3ForCausalLM")  # their classes there return the three taps


def _check_vllm(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from check_embedding(target)
    yield from check_taps(settings["taps"], target)
    yield from check_window(settings, target)
    yield from check_qwen3_bias(settings)


def _check_sglang(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from check_embedding(target)
    yield from check_taps(settings["taps"], target, lowest=1, least=2)
    yield from check_sinks(settings)
    yield from check_plain_attention(settings, "SGLang's EAGLE-3")
    if settings.get("window") == 1:
        yield Refusal("SGLang's windows hold at least one token before the newest", {"window": 2})
    if settings["norm_before_residual"]:
        yield Refusal("SGLang ignores norm_before_residual", {"norm_before_residual": False})
    if settings["layers"] > 1:
        yield Refusal(
            f"{settings['layers']} layers, and SGLang names their norms differently; older versions read one",
            {"layers": 1},
        )


def _to_vllm(saved: Saved, target: Target) -> Layout:
    """Files of `Eagle3LlamaForCausalLM` or, with norms of queries and keys, `Eagle3Qwen3ForCausalLM`."""
    return _layout(saved, target, serve_vllm("eagle3", draft_length(saved.settings)))


def _check_p_eagle(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from _check_vllm(settings, target)
    yield from check_masks(settings)


def _p_eagle_to_vllm(saved: Saved, target: Target) -> Layout:
    """Files of the same classes for `parallel_drafting`."""
    saved, taps = sort_taps(saved)
    saved = saved._replace(settings={**saved.settings, "taps": taps, "norm_output": False})
    token, masks, rest = split_masks(saved, target, "vllm")
    layout = _layout(rest, target, serve_vllm("eagle3", trained_depth(saved.settings), parallel=True))
    config = layout.config | {"pard_token": token}
    return layout._replace(config=config, tensors=layout.tensors | masks, note=PARALLEL_NOTE)


def _to_sglang(saved: Saved, target: Target) -> Layout:
    """Files of `LlamaForCausalLMEagle3`; the same as vLLM's."""
    serve = serve_sglang("EAGLE3", draft_length(saved.settings))
    if (window := saved.settings.get("window")) is not None:  # SGLang excludes the newest
        serve += f" --speculative-draft-window-size {window - 1}"
    return _layout(saved, target, serve)


def _check_authors(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from check_authors(settings, target, AUTHORS_TARGETS)
    yield from _check_ignored(settings, target)


def _check_ignored(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    """Settings that the authors' code ignores without an error, since it loads with `strict=False`."""
    yield from check_plain_attention(settings, "the authors' code")
    for name in SWITCHES:
        if settings[name]:
            yield Refusal(f"the authors' code has no {name}", {name: False})
    if settings["layers"] > 1:
        yield Refusal(f"{settings['layers']} layers, and the authors' code has one", {"layers": 1})
    taps, fixed = settings["taps"], default_taps(len(target.layers))
    if fixed != sorted(set(fixed)):
        yield Refusal(f"the authors' taps {fixed} are not three layers of this target")
    elif set(taps) != set(fixed) or len(taps) != len(fixed):
        yield Refusal(f"drafter.taps={list(taps)}: the authors' code always reads {fixed}", {"taps": fixed})


def _note(settings: Mapping[str, Any], target: Target) -> str:
    """Warning for files of engines that the authors' code would load and misread; "" if it would not."""
    departures = [*_check_ignored(settings, target), *check_no_window(settings, "the authors' code")]
    reasons = [refusal.reason for refusal in departures]
    if not reasons:
        return ""
    return f"not for SafeAILab's EAGLE code, which would draft wrongly ({'; '.join(reasons)}): to=authors is"


def _layout(saved: Saved, target: Target, command: str) -> Layout:
    saved, taps = sort_taps(saved)
    settings, weights = saved.settings, without_confidence(saved)
    ids = weights.pop("d2t", None)
    named = engine_biases(split_projections(weights, settings), settings)
    tensors = {_exported_name(k): v for k, v in named.items()} | vocab_maps(ids, target.vocab_size)
    config = config_of(settings, settings["layers"], target, tensors["fc.weight"].dtype)
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(weights["lm_head.weight"]),
    }
    if settings.get("qk_norm"):
        config |= {"architectures": [QWEN3], "model_type": "qwen3"}
    config |= {name: settings[name] for name in SWITCHES}
    if taps != default_taps(len(target.layers)):
        config[IDS], config["num_aux_hidden_states"] = taps, len(taps)
        config["eagle_config"] = {"use_aux_hidden_state": True, IDS: [tap - 1 for tap in taps]}
    return Layout(config, tensors, command, _note(settings, target))


def _to_authors(saved: Saved, target: Target) -> Layout:
    """Files of `EaModel` (SafeAILab).

    With `target_hidden_size` its loader reads the embedding from these files. Without it, the loader
    requires an index of the target's weights, which a target in one file does not have.
    """
    layout = _layout(saved, target, "")
    config = {name: value for name, value in authors_config(layout.config).items() if name not in SWITCHES}
    config |= {"bias": False, "target_hidden_size": target.hidden_size}
    return Layout(config, with_embedding(layout.tensors, target), note=authors_call(use_eagle3=True))


def _exported_name(name: str) -> str:
    if name == "hidden_norm.weight":
        return FIRST_LAYER + name
    return name.replace("layers.0.", FIRST_LAYER, 1)


def _is_eagle3(config: Mapping[str, Any]) -> bool:
    name = architecture(config)
    if "format" in config or "speculators_config" in config or "speculators_model_type" in config:
        return False
    if "Eagle3" in name or name in P_EAGLES:
        return True
    return name == "LlamaForCausalLM" and "draft_vocab_size" in config


def _read(layout: Layout, target: Target) -> Saved:
    config, more = layout.config, layout.config.get("eagle_config") or {}
    names = ((k.removeprefix("model."), v) for k, v in layout.tensors.items() if "rotary_emb" not in k)
    tensors = {k.replace(FIRST_LAYER, "layers.0.", 1): v for k, v in names}
    parallel = "mask_hidden" in tensors  # its embedding has another row for the mask
    check_target(config, {} if parallel else tensors, target)
    if more.get("use_aux_hidden_state") is False:
        raise UserError("it reads only the target's last hidden state, which no EAGLE-3 here does")
    layers, taps = config.get("num_hidden_layers", 1), _taps(config, more, target)
    switches = {name: bool(config.get(name, more.get(name, False))) for name in SWITCHES}
    own = {k: v for k, v in tensors.items() if k not in (*SHARED, "mask_hidden")}
    own, biases = split_biases(own, config)
    weights = join_projections(own)
    if "layers.0.hidden_norm.weight" in weights:
        weights["hidden_norm.weight"] = weights.pop("layers.0.hidden_norm.weight")
    if "lm_head.weight" not in weights and "d2t" not in tensors:
        weights["lm_head.weight"] = (target.head.weight * target.head.scale).cpu()
    if layers > len(weights):  # an untrusted number must not become a loop count
        raise UserError(f"num_hidden_layers is {layers}, for {len(weights)} tensors")
    qk_norm = "layers.0.q_norm.weight" in weights
    parts = [f"{part}.weight" for part in ((*LAYER, *QK_NORMS) if qk_norm else LAYER)]
    parts += [f"{part}.bias" for part in PRODUCTS if biases[PRODUCTS[part]]]
    check_tensor_names(set(weights), _weight_names(layers, len(taps), switches, parts))
    read_vocab_maps(tensors, weights, target.vocab_size)
    settings = sizes(config, tensors, "layers.0.") | switches | biases
    settings |= {"vocab_size": target.vocab_size, "taps": taps, "layers": layers, "qk_norm": qk_norm}
    settings["draft_vocab_size"] = len(weights["lm_head.weight"])
    if parallel:
        del settings["norm_output"]  # no output is fed back
        weights |= read_masks(tensors, weights, settings, _mask_token(config), target)
        return Saved("p_eagle", settings | {"depth": PARALLEL_DEPTH}, weights)
    return Saved("eagle3", settings | {"depth": 1}, weights)  # the files do not contain the trained depth


def _mask_token(config: Mapping[str, Any]) -> int:
    token = next((config[name] for name in MASK_TOKENS if config.get(name) is not None), None)
    if token is None:
        raise UserError(f"it has mask_hidden, and its config no id of a mask ({', '.join(MASK_TOKENS)})")
    return int(token)


def _taps(config: Mapping[str, Any], more: Mapping[str, Any], target: Target) -> list[int]:
    if entering := config.get(IDS):
        return taps_of(entering, target)
    outputs = [output + 1 for output in more.get(IDS) or ()]
    return taps_of(outputs or default_taps(len(target.layers)), target)


def _weight_names(layers: int, taps: int, switches: Mapping[str, bool], parts: Sequence[str]) -> set[str]:
    """Names of the weights of our drafter."""
    names = {"fc.weight", "hidden_norm.weight", "norm.weight", "lm_head.weight"}
    names |= {f"layers.{i}.{part}" for i in range(layers) for part in parts}
    if switches["norm_before_fc"]:
        names.add("input_norm.weight")
    if switches["fc_norm"]:
        names |= {f"fc_norm.{i}.weight" for i in range(taps)}
    return names


VLLM = Format(_to_vllm, _check_vllm, draft_length)
P_EAGLE_VLLM = Format(_p_eagle_to_vllm, _check_p_eagle, trained_depth)
SGLANG = Format(_to_sglang, _check_sglang, draft_length)
AUTHORS = Format(_to_authors, _check_authors)
READER = Reader("EAGLE-3", _is_eagle3, _read)
