"""DFlash as its authors publish it, for vLLM and SGLang (z-lab/dflash, SpecForge)."""

from __future__ import annotations

from decode.errors import UserError
from decode.model.target import Target
from drafters.export.layout import Layout, Reader, Saved, serve_sglang_block, serve_vllm
from drafters.export.shapes import dtype_of, sort_taps
from drafters.export.speculators_read import dflash_block
from drafters.export.speculators_write import block_config, block_tensors

ARCHITECTURE = "DFlashDraftModel"


def vllm(saved: Saved, target: Target) -> Layout:
    """Files for vLLM's `--speculative-config`."""
    return _flat(saved, target, "vllm", serve_vllm("dflash", saved.settings["depth"]))


def sglang(saved: Saved, target: Target) -> Layout:
    """The same files, with SGLang's command."""
    command = serve_sglang_block("DFLASH", saved.settings["depth"] + 1)
    return _flat(saved, target, "sglang", command)


def _flat(saved: Saved, target: Target, to: str, command: str) -> Layout:
    saved, ids = sort_taps(saved, target)
    settings = saved.settings
    if 0 in ids:
        raise UserError(
            f"drafter.taps={ids}: this format names layers by their outputs, and 0 is the embedding; "
            "train without it, or set to=speculators"
        )
    tensors = block_tensors(saved)
    config = block_config(saved, target, to) | {
        "architectures": [ARCHITECTURE],
        "block_size": settings["depth"] + 1,
        "dflash_config": {"mask_token_id": settings["mask_id"], "target_layer_ids": [i - 1 for i in ids]},
        "dtype": dtype_of(tensors),
        "num_target_layers": len(target.layers),
    }
    return Layout(config, tensors, command)


def _read(layout: Layout, target: Target) -> Saved:
    more = layout.config["dflash_config"]
    if more.get("projector_type"):
        raise UserError(f"its projector_type is {more['projector_type']!r}; a plain DFlash has none")
    ids = [i + 1 for i in more["target_layer_ids"]]
    size = layout.config.get("block_size") or more["block_size"]
    whole = layout._replace(config=layout.config | {"block_size": size})
    return dflash_block(whole, target, layout.config, ids, more["mask_token_id"])


READER = Reader("DFlash", lambda config: "dflash_config" in config, _read)
