"""Drafters in llama.cpp's terms: EAGLE-3, DFlash, DSpark, MTP and draft models.

Follows llama.cpp b11549 (`src/models/eagle3.cpp`, `dflash.cpp`, `llama.cpp`, and `conversion/` for names). An
EAGLE-3 is one layer that reads three layers of the target; ids of layers in `target_layers` number inputs, as
ours do. A DSpark is a DFlash with a Markov head. Embedding, and the head of a full vocabulary, are the
target's for blocks. Classes with rotation "norm" (Llama, EAGLE-3) rotate dimensions 2i and 2i + 1 together.
An MTP layer is one more layer of the target's own class (`qwen35.cpp`), in a file with the target's keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.model.files.gguf.header import Header
from decode.model.files.gguf.rope import Rope
from decode.model.target import Target
from drafters.export import dflash, dspark, eagle3, hf_model
from drafters.export.eagle import draft_length
from drafters.export.layout import Format, Layout, Refusal, Saved, trained_depth, without_confidence
from drafters.export.llama_config import (
    SLIDING,
    check_embedding,
    check_head,
    check_no_window,
    check_plain_attention,
)
from drafters.export.llama_cpp.file import DRAFTER, NEXTN
from drafters.export.shapes import check_taps, sort_taps
from drafters.hf.mtp_weights import FAMILIES, arrangement_of, native
from drafters.layers.decoder_layer import LayerShape
from drafters.layers.rope import frequencies, rope_settings

TAPS = 3  # of an EAGLE-3 in llama.cpp
EAGLE3_CLASS, BLOCK_CLASS = "eagle3", "dflash"
NORM = (EAGLE3_CLASS, "llama")  # classes that rotate neighbours
LANGUAGE_MODELS = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # model_type
WITHOUT_STATES = ("qwen2",)  # model_type of targets whose hidden states it keeps to itself (`t_layer_inp`)
MTP_TARGETS = {"qwen3_5": "qwen35", "qwen3_5_text": "qwen35"}  # model_type, of dense layers
MTP_FAMILY = "qwen"  # whose form these layers have
MTP_SIZES = ("heads", "kv_heads", "head_dim", "intermediate_size")
NOTE = "TARGET.gguf is the target's GGUF file, whose tokenizer this one has."
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "hidden_norm": "attn_norm_2",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHERS = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "fc": "fc",
    "input_norm": "enc.output_norm",  # of an EAGLE-3: before fc
    "hidden_norm": "enc.output_norm",  # of a block drafter: after fc
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}
MTP_PARTS = {
    "fc": "nextn.eh_proj",
    "pre_fc_norm_embedding": "nextn.enorm",
    "pre_fc_norm_hidden": "nextn.hnorm",
    "norm": "nextn.shared_head_norm",
    **{f"layers.0.{name}": part for name, part in PARTS.items()},
    "layers.0.post_attention_layernorm": "post_attention_norm",
}


# -- what llama.cpp can serve --------------------------------------------------------------------


def _check_states(target: Target) -> Iterator[Refusal]:
    """Refuse a target whose graph gives no hidden states: its server ends at the first request."""
    if (kind := target.config.model_type) in WITHOUT_STATES:
        yield Refusal(
            f"llama.cpp b11549 gives a drafter no hidden states of a {kind} target (its server ends with "
            "'layer input tensor is null'); a draft model, drafter=lm or lm_given, reads none"
        )


def _check_eagle3(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from _check_states(target)
    yield from check_embedding(target)
    yield from check_taps(settings["taps"], target, exactly=TAPS)
    if settings["layers"] > 1:
        yield Refusal(f"{settings['layers']} layers, and llama.cpp reads one", {"layers": 1})
    if settings["fc_norm"]:
        yield Refusal(
            "llama.cpp has no fc_norm (a norm per tap); its norm_before_fc is one norm for all taps",
            {"fc_norm": False, "norm_before_fc": True},
        )
    yield from check_no_window(settings, "llama.cpp's EAGLE-3")
    yield from check_plain_attention(settings, "llama.cpp's EAGLE-3")
    if settings["norm_output"]:
        yield Refusal("llama.cpp feeds back the state before the final norm", {"norm_output": False})
    yield from _check_positions(settings, "EAGLE-3")


def _check_block(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from _check_states(target)
    yield from dflash.check_block(settings, target)
    if settings.get("window") is not None or settings.get("causal"):
        reason = "a window or a causal block, untested with llama.cpp's DFlash"
        yield Refusal(reason, {"window": None, "sinks": 0, "causal": False})
    if (settings.get("rope") or {}).get("rope_type") == "llama3":
        yield Refusal("llama3 scaling of positions, untested with llama.cpp's DFlash")
    yield from _check_positions(settings, "DFlash")


def _check_lm(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    config = settings["config"]
    yield from hf_model.VLLM.check(settings, target)
    if (kind := config["model_type"]) not in LANGUAGE_MODELS:
        yield Refusal(
            f"a draft model of the class {kind}, not one of {', '.join(LANGUAGE_MODELS)}; with to=hf, "
            "llama.cpp's own convert_hf_to_gguf.py may read the folder"
        )
        return
    if SLIDING in (config.get("layer_types") or ()) or (kind == "mistral" and config.get("sliding_window")):
        yield Refusal(f"a window in its layers, and llama.cpp's {kind} has none")
    if (act := config.get("hidden_act", "silu")) != "silu":
        yield Refusal(f"its hidden_act is {act}, and llama.cpp's {kind} has silu")
    yield from _check_positions(_lm_shape(config), LANGUAGE_MODELS[kind])


def _check_mtp(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    if target.config.model_type not in MTP_TARGETS:
        yield Refusal(
            "llama.cpp hands the last state of few classes to an MTP layer, and each has a form of its own; "
            f"of these Qwen3.5's is written here, and the target is {target.config.model_type!r}"
        )
        return
    yield from check_embedding(target)
    yield from check_head(target)
    if settings["family"] != MTP_FAMILY:
        yield Refusal("a new head, and llama.cpp's MTP of Qwen3.5 has the form of Qwen3.5's own")
        return
    expected = {"gate": True, "qk_norm": True, "zero_centred": True, "qkv_bias": False}
    shape = LayerShape.of(target)
    expected |= {name: getattr(shape, name) for name in MTP_SIZES}
    if different := [name for name, value in expected.items() if settings[name] != value]:
        yield Refusal(f"its {different[0]} differs from that of the target's layers")
    arrangement = arrangement_of(target)
    assert arrangement is not None
    for name, value in arrangement._asdict().items():
        if settings[name] != value:
            reason = f"drafter.{name}={str(settings[name]).lower()}, which differs from Qwen3.5's"
            yield Refusal(reason, {name: value})


def _check_positions(shape: Mapping[str, Any], what: str) -> Iterator[Refusal]:
    """Refuse positions that llama.cpp would compute from the file's keys differently."""
    rope = shape.get("rope") or {}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield Refusal(f"positions that rotate a part of each head, untested with llama.cpp's {what}")
    elif rope.get("rope_type") == "yarn":
        keys, _ = _positions("x", shape)
        theirs = Rope(Header({"general.architecture": "x"} | keys, {}, 0), shape["head_dim"], 0).everywhere()
        ours, scale = frequencies(shape["head_dim"], shape["rope_theta"], rope, torch.empty(0))
        if not np.allclose(theirs.frequencies, ours, rtol=1e-5) or abs(theirs.scale - scale) > 1e-6:
            yield Refusal("llama.cpp scales positions by YaRN with the usual settings alone")


# -- keys and tensors ----------------------------------------------------------------------------


def _eagle3(saved: Saved, target: Target) -> Layout:
    layout, settings = eagle3.VLLM.write(saved, target), saved.settings
    keys = {
        "target_layers": sort_taps(saved)[1],
        "target_hidden_size": target.hidden_size,
        "norm_before_residual": settings["norm_before_residual"],
        "norm_before_fc": settings["norm_before_fc"],
    }
    names = {name.replace(eagle3.FIRST_LAYER, "layers.0."): value for name, value in layout.tensors.items()}
    return _layout(
        EAGLE3_CLASS, settings, settings["layers"], keys, names, "draft-eagle3", draft_length(settings)
    )


def _dflash(saved: Saved, target: Target) -> Layout:
    """All positions of the block, since in a shorter one the masks would see fewer masks."""
    layout = dflash.VLLM.write(saved, target)
    return _block(saved, layout, layout.config["dflash_config"]["target_layer_ids"], {}, "draft-dflash")


def _dspark(saved: Saved, target: Target) -> Layout:
    layout = dspark.VLLM.write(saved, target)
    keys = {
        "sample_from_anchor": saved.settings["sample_from_anchor"],
        "has_confidence_head": saved.confidence,
    }
    return _block(saved, layout, layout.config["target_layer_ids"], keys, "draft-dspark")


def _block(saved: Saved, layout: Layout, outputs: list[int], more: Mapping[str, Any], kind: str) -> Layout:
    keys = {"block_size": layout.config["block_size"], "target_layers": [i + 1 for i in outputs]}
    keys |= {"attention.causal": False, **more}
    settings = saved.settings
    made = _layout(BLOCK_CLASS, settings, settings["layers"], keys, layout.tensors, kind, settings["depth"])
    return made._replace(config=made.config | {"tokenizer.ggml.mask_token_id": saved.settings["mask_id"]})


def _mtp(saved: Saved, target: Target) -> Layout:
    """One more layer of the target, behind its own."""
    kind, number = MTP_TARGETS[target.config.model_type], len(target.layers)
    keys = {f"{kind}.block_count": number + 1, f"{kind}.{NEXTN}": 1}
    found = {}
    for name, value in native(without_confidence(saved), saved.settings, number).items():
        stem, _, end = name.removeprefix(FAMILIES[MTP_FAMILY].prefix).rpartition(".")
        centred = value.dim() == 1  # these norms multiply by 1 + weight, llama.cpp's by the weight
        found[f"blk.{number}.{MTP_PARTS[stem]}.{end}"] = value.float() + 1 if centred else value
    keys = {"general.architecture": kind, **keys}
    return Layout(keys, found, _command("draft-mtp", draft_length(saved.settings)), NOTE)


def _lm(saved: Saved, target: Target) -> Layout:
    """A draft model with the target's vocabulary size; a model from a GGUF file of this size is that file."""
    model = hf_model.VLLM.write(saved, target).model
    assert model is not None
    config = model.config.to_dict()
    tensors = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    kind, layers = LANGUAGE_MODELS[config["model_type"]], config["num_hidden_layers"]
    shape = _lm_shape(config)
    keys = {"vocab_size": target.vocab_size}
    layout = _layout(kind, shape, layers, keys, tensors, "draft-simple", hf_model.TOKENS)
    as_given = saved.settings["config"]["vocab_size"] == target.vocab_size
    return layout._replace(file=saved.settings.get("file", "")) if as_given else layout


def _lm_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """A draft model's sizes by the names of `LayerShape`."""
    heads, (theta, rope) = config["num_attention_heads"], rope_settings(dict(config))
    return {
        "hidden_size": config["hidden_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "intermediate_size": config["intermediate_size"],
        "eps": config["rms_norm_eps"],
        "rope_theta": theta,
        "rope": rope,
    }


def _layout(
    architecture: str,
    shape: Mapping[str, Any],
    layers: int,
    more: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    kind: str,
    tokens: int,
) -> Layout:
    """Keys and tensors by llama.cpp's names, and the command that serves them.

    Args:
        architecture: llama.cpp's class.
        shape: sizes, as in `LayerShape`.
        layers: their number.
        more: keys of this class, without its name.
        tensors: by the names of the other formats.
        kind: of the draft, for the server.
        tokens: draft length.
    """
    positions, factors = _positions(architecture, shape)
    keys = {
        "block_count": layers,
        "embedding_length": shape["hidden_size"],
        "feed_forward_length": shape["intermediate_size"],
        "attention.head_count": shape["heads"],
        "attention.head_count_kv": shape["kv_heads"],
        "attention.key_length": shape["head_dim"],
        "attention.value_length": shape["head_dim"],
        "attention.layer_norm_rms_epsilon": float(shape["eps"]),
        **more,
    }
    named = {f"{architecture}.{name}": value for name, value in keys.items()} | positions
    found = {} if factors is None else {"rope_freqs.weight": factors}
    for name, value in tensors.items():
        if name == "t2d":
            continue
        if name == "d2t":  # their table has target ids
            found[name] = value.long().cpu() + torch.arange(len(value))
            continue
        new, part = _name(name)
        if architecture in NORM and part in ("attn_q", "attn_k"):
            value = _neighbours(value, shape["heads" if part == "attn_q" else "kv_heads"])
        found[new] = value
    return Layout({"general.architecture": architecture} | named, found, _command(kind, tokens), NOTE)


def _command(kind: str, tokens: int) -> str:
    """The server's command, for drafts of a kind and length."""
    return (
        f"llama-server -m TARGET.gguf -md {{drafter}}/{DRAFTER} --spec-type {kind} "
        f"--spec-draft-n-max {tokens}"
    )


def _name(name: str) -> tuple[str, str]:
    """A tensor's name in the file, and its part of a layer ("" outside layers)."""
    stem, _, end = name.rpartition(".")
    if stem.startswith("layers."):
        _, number, part = stem.split(".", 2)
        return f"blk.{number}.{PARTS[part]}.{end}", PARTS[part]
    return f"{OTHERS[stem]}.{end}", ""


def _neighbours(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys, dimensions i and i + half of a head next to each other."""
    rows, *columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, *columns).transpose(1, 2).reshape(weight.shape)


def _positions(architecture: str, shape: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """Keys of rotary positions, and Llama 3's divisors of frequencies."""
    rope, size, base = shape.get("rope") or {}, shape["head_dim"], float(shape["rope_theta"])
    keys: dict[str, Any] = {"freq_base": base, "dimension_count": size}
    kind, factors = rope.get("rope_type", "default"), None
    if kind == "llama3":
        plain, scaled = (frequencies(size, base, of, torch.empty(0))[0] for of in (None, rope))
        factors = (plain / scaled).float()
    elif kind != "default":
        keys |= {"scaling.type": kind, "scaling.factor": float(rope["factor"])}
        if kind == "yarn":
            keys["scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
    return {f"{architecture}.rope.{name}": value for name, value in keys.items()}, factors


EAGLE3 = Format(_eagle3, _check_eagle3, draft_length)
DFLASH = Format(_dflash, _check_block, trained_depth)
DSPARK = Format(_dspark, _check_block, trained_depth)
MTP = Format(_mtp, _check_mtp, draft_length)
LM = Format(_lm, _check_lm, lambda _: hf_model.TOKENS)
