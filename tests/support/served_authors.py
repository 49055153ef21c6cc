"""How the authors' code loads EAGLE (SafeAILab) and Medusa (FasterDecoding), restated from its source.

EAGLE: `ea_model.py` (47de7b0), `cnets.py` (148042c), `cnets1.py` (2174a79), `configs.py` and
`modeling_llama_kv.py`. Medusa: `medusa_model.py` (60eeab9, version 0.1). It loads with `strict=False`,
older versions of EAGLE-1 with `strict=True`; what would be passed over in silence is an error here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from served_eagle import IDS, Loaded, LoadError, expected
from torch import Tensor

from drafters.export.layout import Layout

# Of a config.json for engines, what the authors' code never looks at.
UNREAD = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_config", IDS)
UNREAD = (*UNREAD, "num_aux_hidden_states", "rope_parameters")
# -- EAGLE -----------------------------------------------------------------------------------------


class Authored(Loaded):
    """An EAGLE as `EaModel` has it: taps, norms and layers are fixed, and the embedding is the file's.

    An EAGLE-1 shares the (V, D) `head` of the target.
    """

    def __init__(self, layout: Layout, head: Tensor) -> None:
        config = {name: value for name, value in layout.config.items() if name not in UNREAD}
        self.config, self.engine, self.eagle3 = config, "authors", "draft_vocab_size" in config
        size, vocab = config["hidden_size"], config["vocab_size"]
        if not self.eagle3:
            config["head_dim"] = size // config["num_attention_heads"]
        wanted = expected(config | {"bias": False, "num_hidden_layers": 1}, "authors", self.eagle3)
        wanted["embed_tokens.weight"] = (vocab, size)
        if self.eagle3 and "target_hidden_size" not in config:
            raise LoadError("it looks for the target's embedding in an index that a small target has not")
        if self.eagle3 and config["draft_vocab_size"] < vocab:
            wanted |= {"d2t": (config["draft_vocab_size"],), "t2d": (vocab,)}
        if not self.eagle3 and config.get("bias", True):
            wanted["fc.bias"] = (size,)
        tensors = {name.replace("midlayer.", "layers.0."): w for name, w in layout.tensors.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if wrong := sorted(name for name, _ in shapes.items() ^ wanted.items()):
            raise LoadError(f"{wrong[0]}: {shapes.get(wrong[0])}, and it has {wanted.get(wrong[0])}")
        self.embedding, self.weights = tensors.pop("embed_tokens.weight"), tensors
        self.ids = torch.arange(config.get("draft_vocab_size", vocab)) + tensors.get("d2t", 0)
        self.head = tensors["lm_head.weight"] if self.eagle3 else head
        self.rotary = _rotary(config)


def _rotary(config: Mapping[str, Any]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Cosines and sines of (B, n) positions; its linear class is made without the base."""
    scaling, base = config.get("rope_scaling"), config.get("rope_theta", 10_000.0)
    factor = 1.0
    if scaling is not None:
        factor, base = scaling.get("factor"), 10_000.0
        if len(scaling) != 2 or scaling.get("type") != "linear" or not isinstance(factor, float):
            raise LoadError(f"rope_scaling={scaling}")
    size = config["head_dim"]

    def rotary(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].to(x) / factor / base ** (torch.arange(0, size, 2).to(x) / size)
        both = torch.cat([angles, angles], -1)
        return both.cos(), both.sin()

    return rotary


# -- Medusa ----------------------------------------------------------------------------------------


def medusa(folder: Path, base: str, head: Tensor) -> Callable[[Tensor], list[Tensor]]:
    """(B, D) features -> each head's (B, V) logits; `base` is the target, and `head` its (V, D) head."""
    config = json.loads((folder / "config.json").read_text())
    heads, layers = config["medusa_num_heads"], config["medusa_num_layers"]
    if config["base_model_name_or_path"] != base:
        raise LoadError(f"it loads {config['base_model_name_or_path']}")
    if layers != 1:
        raise LoadError("one block, repeated")
    found = torch.load(folder / "medusa_lm_head.pt", weights_only=True)  # noqa: TID251  (as it is read)
    vocab, size = head.shape
    wanted: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        wanted |= {f"{i}.0.linear.weight": (size, size), f"{i}.0.linear.bias": (size,)}
        wanted[f"{i}.1.weight"] = (vocab, size)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    if wrong := sorted(name for name, _ in shapes.items() ^ wanted.items()):
        raise LoadError(f"{wrong[0]}: {shapes.get(wrong[0])}, and it has {wanted.get(wrong[0])}")

    def run(feature: Tensor) -> list[Tensor]:
        rows = []
        for i in range(heads):
            inner = feature @ found[f"{i}.0.linear.weight"].T + found[f"{i}.0.linear.bias"]
            rows.append((feature + inner * inner.sigmoid()) @ found[f"{i}.1.weight"].T)
        return rows

    return run
