"""Export and import of DFlash in its authors' format, for vLLM and SGLang (z-lab/dflash, SpecForge).

Also export to transformers: 5.24 has one class of DFlash, Muse Glimmer's assistant, and drafts with it for
any target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from decode.errors import UserError
from decode.model.target import Target
from drafters.export.layout import (
    Format,
    Layout,
    Reader,
    Refusal,
    Saved,
    serve_sglang_block,
    serve_vllm,
    trained_depth,
)
from drafters.export.llama_config import EOS, SLIDING, check_embedding, check_head, check_sinks, check_window
from drafters.export.shapes import check_taps, dtype_of, sort_taps
from drafters.export.speculators_read import dflash_block
from drafters.export.speculators_write import block_config, block_tensors

ARCHITECTURE = "DFlashDraftModel"
ASSISTANT, ASSISTANT_TYPE = "MuseGlimmerAssistantModel", "muse_glimmer_assistant"
FUSION = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
NOTE = (
    "In transformers: model.generate(**inputs, assistant_model=AutoModel.from_pretrained(<this folder>), "
    'speculation_type="dflash").'
)


def check_block(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    """Requirements of all engines for a block drafter that shares the target's embedding and head."""
    yield from check_embedding(target)
    yield from check_head(target)
    yield from check_taps(settings["taps"], target, lowest=1)


def _check_sglang(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from check_block(settings, target)
    yield from check_sinks(settings)


def _check_vllm(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from check_block(settings, target)
    yield from check_window(settings, target)


def _check_transformers(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from check_block(settings, target)
    if settings.get("causal"):
        yield Refusal("transformers' blocks are bidirectional", {"causal": False})
    if settings.get("window") is not None:
        reason = "transformers' window of a block has other edges (places that are a window's size away)"
        yield Refusal(reason, {"window": None, "sinks": 0})
    if (settings.get("rope") or {}).get("partial_rotary_factor", 1.0) != 1.0:
        yield Refusal("transformers' DFlash rotates whole heads, and the target's positions a part of each")


def _to_vllm(saved: Saved, target: Target) -> Layout:
    """Files for vLLM's `--speculative-config`."""
    return _flat(saved, target, serve_vllm("dflash", saved.settings["depth"]))


def _to_sglang(saved: Saved, target: Target) -> Layout:
    """The same files as for vLLM, with SGLang's command."""
    command = serve_sglang_block("DFLASH", saved.settings["depth"] + 1)
    return _flat(saved, target, command)


def _flat(saved: Saved, target: Target, command: str) -> Layout:
    saved, ids = sort_taps(saved)
    settings = saved.settings
    tensors = block_tensors(saved)
    more = {"mask_token_id": settings["mask_id"], "target_layer_ids": [i - 1 for i in ids]}
    config = block_config(saved, target) | {
        "architectures": [ARCHITECTURE],
        "block_size": settings["depth"] + 1,
        "dflash_config": more,
        "dtype": dtype_of(tensors),
        "num_target_layers": len(target.layers),
    }
    causal = settings.get("causal", False)
    if causal or settings.get("window") is not None:  # engines assume that blocks with a window are causal
        config["is_causal"] = more["causal"] = causal
    return Layout(config, tensors, command)


def _to_transformers(saved: Saved, target: Target) -> Layout:
    """Files of Muse Glimmer's assistant; embedding and head are those of the model that generates."""
    saved, ids = sort_taps(saved)
    settings = saved.settings
    tensors = {FUSION.get(name, name): tensor for name, tensor in block_tensors(saved).items()}
    config = block_config(saved, target) | {
        "architectures": [ASSISTANT],
        "block_size": settings["depth"] + 1,
        "dtype": dtype_of(tensors),
        "mask_token_id": settings["mask_id"],
        "model_type": ASSISTANT_TYPE,
        "target_layer_ids": [i - 1 for i in ids],
    }
    config |= dict.fromkeys(EOS)  # the generating model's count, and this class takes no list of them
    return Layout(config, tensors, note=NOTE)


def _read(layout: Layout, target: Target) -> Saved:
    more = layout.config["dflash_config"]
    if more.get("projector_type"):
        raise UserError(f"its projector_type is {more['projector_type']!r}; a plain DFlash has none")
    ids = [i + 1 for i in more["target_layer_ids"]]
    size = layout.config.get("block_size") or more["block_size"]
    with_block_size = layout._replace(config=layout.config | {"block_size": size})
    layers = layout.config | _window(layout.config)
    causal = layout.config.get("is_causal")
    causal = more.get("causal") if causal is None else causal
    if causal is None:
        causal = SLIDING in (layout.config.get("layer_types") or ())
    return dflash_block(with_block_size, target, layers, ids, more["mask_token_id"], bool(causal))


def _window(config: Mapping[str, Any]) -> dict[str, Any]:
    """Window of `dflash_config` (vLLM's `use_swa`) as `layer_types` and `sliding_window`."""
    more, kinds = config["dflash_config"], config.get("layer_types") or ()
    size = more.get("swa_window_size", config.get("sliding_window"))
    if more.get("use_swa") and SLIDING not in kinds:
        kinds = [SLIDING]
    return {"layer_types": kinds, "sliding_window": size}


VLLM = Format(_to_vllm, _check_vllm, trained_depth)
SGLANG = Format(_to_sglang, _check_sglang, trained_depth)
TRANSFORMERS = Format(_to_transformers, _check_transformers, trained_depth)
READER = Reader("DFlash", lambda config: "dflash_config" in config, _read)
