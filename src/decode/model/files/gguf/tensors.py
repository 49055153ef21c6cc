"""Mapping between the tensors of a GGUF file and the model's weights, with a comparison of values.

Names follow the package `gguf`; see `layout` for the order of the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.model.files.account import Account
from decode.model.files.gguf.header import BLOCK, Header, Stored
from decode.model.files.gguf.layout import is_equal
from decode.model.files.gguf.rope import Rotation

FUSED = ("ffn_gate_exps", "ffn_up_exps")  # one weight in transformers, `experts.gate_up_proj`
ELSEWHERE = "give the folder or hub id of the model that the file was made from"


def assign(header: Header, model: PreTrainedModel, account: Account) -> dict[str, list[Stored]]:
    """Map each weight of a model to its tensors in the file.

    Args:
        header: of the file.
        model: on the device `meta`; only the shapes of its weights are used.
        account: of the file; tensors without a weight are refused, except biases of zeros.

    Raises:
        UserError: a weight has no tensor, or one of another shape.
    """
    find = _names(header)
    found: dict[str, list[Stored]] = {}
    wrong = []
    tied = getattr(model.config, "tie_word_embeddings", False)
    head = model.get_output_embeddings()
    weights = dict(model.named_parameters(remove_duplicate=False)) | _kept_buffers(model)
    for name, weight in weights.items():
        stored = find(name)
        if not stored and tied and head is not None and weight is head.weight:
            continue  # tied to the embedding
        if not stored or not _fits(weight, stored):
            wrong.append(name)
        found[name] = stored
    if wrong:
        raise UserError(f"{len(wrong)} weights are missing or of another shape, {wrong[0]} first")
    used = {stored.name for several in found.values() for stored in several}
    rest = [name for name in header.tensors if name not in used and not name.startswith("rope_f")]
    drafts = [name for name in rest if (at := BLOCK.match(name)) and int(at[1]) >= _own_layers(header)]
    account.remark("layers that draft, and the model does without", drafts)
    rest = [name for name in rest if name not in drafts]
    zeros = [name for name in rest if name.endswith(".bias") and not header.tensors[name].values().any()]
    account.ignore("biases of zeros, which add nothing", zeros)
    unread = [name for name in rest if name not in zeros]
    account.refuse(f"tensors that no weight of {type(model).__name__} is made of; {ELSEWHERE}", unread)
    account.count("tensors", len(used))
    return found


def _own_layers(header: Header) -> int:
    """Number of layers without drafting layers."""
    return len(header.layers) - header.keys.get(f"{header.architecture}.nextn_predict_layers", 0)


def _kept_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Buffers that are saved with a model."""
    state = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in state}


def _names(header: Header) -> Callable[[str], list[Stored]]:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map  # optional dependency

    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    if header.architecture not in numbers:
        raise UserError(f"the package gguf does not know the architecture {header.architecture!r}")
    names = get_tensor_name_map(numbers[header.architecture], len(header.layers))

    def find(weight: str) -> list[Stored]:
        base, dot, kind = weight.rpartition(".")
        if kind == "dt_bias":  # Qwen 3.5's parameter, not the bias of a module
            base, kind = f"{base}.dt_proj", "bias"
        if kind not in ("weight", "bias"):
            base, dot, kind = weight, "", ""
        if base.endswith("experts.gate_up_proj"):
            layer = names.get_name(base.replace("gate_up_proj", "down_proj")) or ""
            both = [layer.replace("ffn_down_exps", part) + ".weight" for part in FUSED]
            return [header.tensors[name] for name in both if name in header.tensors]
        # Some classes were converted without their head, so without its prefix.
        short = names.get_name(base) or names.get_name(base.partition(".")[2])
        for name in (f"{short}{dot}{kind}", f"{short}.weight", f"{short}"):
            if short and name in header.tensors:
                return [header.tensors[name]]
        return []

    return find


def _fits(weight: Tensor, stored: list[Stored]) -> bool:
    """Whether tensors fit a weight; the gates of experts are followed by their ups."""
    if len(stored) > 1:
        experts, rows, width = stored[0].shape if len(stored[0].shape) == 3 else (0, 0, 0)
        same = all(one.shape == (experts, rows, width) for one in stored)
        return same and tuple(weight.shape) == (experts, len(stored) * rows, width)
    shape = [size for size in stored[0].shape if size > 1]
    own = [size for size in weight.shape if size > 1]
    return shape in (own, own[::-1])


def check_equal(header: Header, model: Any, found: dict[str, list[Stored]]) -> None:
    """Compare rows of each weight with its tensors.

    Args:
        header: of the file.
        model: with loaded weights.
        found: from `assign`.

    Raises:
        UserError: a weight differs from the file's.
    """
    state = model.state_dict()
    for weight_name, several in found.items():
        weight = state[weight_name]
        for part, stored in enumerate(several):
            rows = weight.chunk(len(several), dim=1)[part] if len(several) > 1 else weight
            if not is_equal(header, model.config, rows, stored):
                raise UserError(
                    f"transformers reads {stored.name} differently than it was written; {ELSEWHERE}"
                )


def check_positions(model: nn.Module, rotations: dict[str, Rotation]) -> None:
    """Compare a model's rotary frequencies with its file's.

    Args:
        model: with its buffers.
        rotations: from `set_settings`.

    Raises:
        UserError: they differ.
    """
    for name, buffer in model.named_buffers():
        owner, _, last = name.rpartition(".")
        if not last.endswith("inv_freq") or "original" in last:
            continue
        kind = last.removesuffix("inv_freq").rstrip("_")
        rotation = rotations.get(kind)
        module: Any = model.get_submodule(owner)
        own = buffer.double().numpy()
        scale = getattr(module, f"{kind}_attention_scaling" if kind else "attention_scaling", 1.0)
        if (
            rotation is None
            or own.shape != rotation.frequencies.shape
            or not np.allclose(own, rotation.frequencies, rtol=1e-5, atol=0)
            or not math.isclose(scale, rotation.scale, rel_tol=1e-6)
        ):
            raise UserError(f"transformers rotates positions differently than the file; {ELSEWHERE}")
