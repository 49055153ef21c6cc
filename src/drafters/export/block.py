"""DFlash as its authors publish it, for vLLM and SGLang (z-lab/dflash, SpecForge)."""

from __future__ import annotations

from decode.errors import UserError
from decode.target import Target
from drafters.export.layout import Layout, Reader, Saved
from drafters.export.llama import told
from drafters.export.shapes import ascending, dtype_of
from drafters.export.speculators import block_config, block_tensors
from drafters.export.speculators_reader import block

ARCHITECTURE = "DFlashDraftModel"
VLLM = (
    "vllm serve {{target}} --speculative-config "
    """'{{{{"method": "dflash", "model": "'{{drafter}}'", "num_speculative_tokens": {depth}}}}}'"""
)
SGLANG = (
    "python -m sglang.launch_server --model-path {{target}} --speculative-algorithm DFLASH "
    "--speculative-draft-model-path {{drafter}} --speculative-num-draft-tokens {width}"
)


def vllm(saved: Saved, target: Target) -> Layout:
    """A folder for `--speculative-config`."""
    return _flat(saved, target, "vllm", VLLM)


def sglang(saved: Saved, target: Target) -> Layout:
    """The same folder, served by SGLang."""
    return _flat(saved, target, "sglang", SGLANG)


def _flat(saved: Saved, target: Target, to: str, serve: str) -> Layout:
    saved, ids = ascending(saved, target)
    settings = saved.settings
    if 0 in ids:
        raise UserError(
            f"drafter.taps={ids}: this format names layers by their outputs, and 0 is the embedding; "
            "train without it, or set to=speculators"
        )
    tensors, depth = block_tensors(saved), settings["depth"]
    config = block_config(saved, target, to) | {
        "architectures": [ARCHITECTURE],
        "block_size": depth + 1,
        "dflash_config": {"mask_token_id": settings["mask_id"], "target_layer_ids": [i - 1 for i in ids]},
        "dtype": dtype_of(tensors),
        "num_target_layers": len(target.layers),
    }
    return Layout(config, tensors, serve.format(depth=depth, width=depth + 1))


def _read(layout: Layout, target: Target) -> Saved:
    more = layout.config["dflash_config"]
    if more.get("projector_type"):
        raise UserError(f"its projector_type is {more['projector_type']!r}; a plain DFlash has none")
    ids = [i + 1 for i in more["target_layer_ids"]]
    size = layout.config.get("block_size") or more["block_size"]
    whole = layout._replace(config=layout.config | {"block_size": size})
    return block(whole, target, layout.config, ids, more["mask_token_id"])


READER = Reader("DFlash", lambda config: "dflash_config" in config, told(_read))
