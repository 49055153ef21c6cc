"""Fingerprint of a model's weights, which does not depend on the dtype that they are loaded in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

SAMPLED_ROWS = 64  # of each weight
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_sample(weight: Tensor) -> Tensor:
    """About 64 rows of a weight, on the host."""
    return weight[:: max(1, weight.shape[0] // SAMPLED_ROWS)].cpu()


def hash_samples(label: str, samples: Iterable[Tensor]) -> str:
    """Hash of samples of weights, rounded to bf16, and a label."""
    digest = hashlib.sha256(label.encode())
    for sample in samples:
        digest.update(sample.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def stored_samples(
    model: PreTrainedModel, names: Sequence[Sequence[str]], loaded: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Samples of weights as they are in the files of a model that was loaded in float16.

    Rounding to float16 and then to bf16 is not rounding to bf16: small values become 0 or subnormal, and
    float32 values are rounded twice. No hash of the loaded weights can undo that.

    Args:
        model: as `from_pretrained` returned it.
        names: for each weight its names in the model.
        loaded: `weight_sample` of each weight.

    Returns:
        The samples, or `loaded` if the files are not there or have other values than the model.
    """
    stored = []
    for aliases, sample in zip(names, loaded, strict=True):
        weight = _read(model, aliases)
        if weight is None or weight.shape[1:] != sample.shape[1:]:
            return loaded
        stored.append(weight_sample(weight))
        if not torch.equal(stored[-1].to(sample.dtype), sample):
            return loaded  # changed after loading
    return stored


def _read(model: PreTrainedModel, names: Sequence[str]) -> Tensor | None:
    """A weight from the files of a model; None if it is not there under one of its names."""
    try:
        files: dict[str, str]  # weight -> file; as in transformers, a single file comes first
        if (single := _locate(model, FILE)) is not None:
            with safe_open(single, "pt") as file:
                files = dict.fromkeys(file.keys(), FILE)
        elif (index := _locate(model, INDEX)) is not None:
            files = json.loads(index.read_text())["weight_map"]
        else:
            return None
        # A base model's file lacks the prefix that the language model's has, or the other way round.
        key = next((key for key in files for name in names if _same(key, name)), None)
        path = None if key is None else _locate(model, files[key])
        if path is None:
            return None
        with safe_open(path, "pt") as file:
            return file.get_tensor(key)
    except (OSError, ValueError, KeyError, SafetensorError):
        return None  # other formats; the loaded weights are hashed


def _same(key: str, name: str) -> bool:
    return key == name or name.endswith(f".{key}") or key.endswith(f".{name}")


def _locate(model: PreTrainedModel, name: str) -> Path | None:
    """Path of a file of the folder or the cached hub repository that a model was loaded from."""
    source = model.name_or_path  # empty if it was not loaded
    if not source:
        return None
    folder = Path(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    commit = getattr(model.config, "_commit_hash", None)  # the revision that transformers resolved
    cached = try_to_load_from_cache(source, name, revision=commit) if source.count("/") == 1 else None
    return Path(cached) if isinstance(cached, str) else None
