"""Export and import of DSpark in the format of DeepSpec and SpecForge, for vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from decode.model.target import Target
from drafters.export.dflash import check_block
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
from drafters.export.llama_config import architecture
from drafters.export.shapes import dtype_of, embedding_of, sort_taps
from drafters.export.speculators_read import dspark_block
from drafters.export.speculators_write import block_config, dspark_config, dspark_tensors

ARCHITECTURE = "Qwen3DSparkModel"
SPECFORGE = "DSparkDraftModel"


def _check_sglang(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from check_block(settings, target)
    if not settings["sample_from_anchor"]:
        yield Refusal("in SGLang the root predicts a token", {"sample_from_anchor": True})
    if settings["draft_vocab_size"] is not None:
        yield Refusal("its DSpark has no reduced draft vocabulary", {"draft_vocab_size": None})


def _to_vllm(saved: Saved, target: Target) -> Layout:
    """Files for vLLM's `--speculative-config`."""
    return _flat(saved, target, serve_vllm("dspark", saved.settings["depth"]))


def _to_sglang(saved: Saved, target: Target) -> Layout:
    """The files for vLLM plus the target's embedding and head, as in DeepSpec, and SGLang's command."""
    layout = _flat(saved, target, serve_sglang_block("DSPARK", saved.settings["depth"] + 1))
    tables = {"embed_tokens.weight": embedding_of(target), "lm_head.weight": target.head.weight.detach()}
    like = layout.tensors["fc.weight"]
    # Copied, because the target may tie both to one tensor, and safetensors refuses shared memory.
    return layout._replace(
        tensors=layout.tensors | {name: table.to(like, copy=True) for name, table in tables.items()}
    )


def _flat(saved: Saved, target: Target, command: str) -> Layout:
    saved, ids = sort_taps(saved)
    tensors = dspark_tensors(saved, target)
    config = block_config(saved, target) | dspark_config(saved, target)
    config |= {
        "architectures": [ARCHITECTURE],
        "dtype": dtype_of(tensors),
        "mask_token_id": saved.settings["mask_id"],
        "num_target_layers": len(target.layers),
        "target_layer_ids": [i - 1 for i in ids],
    }
    return Layout(config, tensors, command)


def _is_dspark(config: Mapping[str, Any]) -> bool:
    projector = (config.get("dflash_config") or {}).get("projector_type")
    return architecture(config) in (ARCHITECTURE, SPECFORGE) or projector == "dspark"


def _read(layout: Layout, target: Target) -> Saved:
    # SpecForge stores some of these keys in `dflash_config`.
    config = layout.config | (layout.config.get("dflash_config") or {})
    layers = config | {"model_type": config["model_type"].replace("dspark", "qwen3")}
    taps, anchor = [i + 1 for i in config["target_layer_ids"]], config.get("sample_from_anchor", True)
    return dspark_block(layout._replace(config=config), target, layers, taps, config["mask_token_id"], anchor)


VLLM = Format(_to_vllm, check_block, trained_depth)
SGLANG = Format(_to_sglang, _check_sglang, trained_depth)
READER = Reader("DSpark", _is_dspark, _read)
