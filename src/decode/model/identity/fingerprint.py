"""Fingerprint of a model: a checksum over all elements of its weights.

It covers parameters and the buffers of the state dict: names, shapes and values rounded to bf16
(`kernels.checksum`). It is therefore the same for every dtype and placement of a model. Every name of
a tied weight counts, so tied weights and equal copies have the same fingerprint. It is computed at every
call, because in-place changes through `.data` leave no other trace.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decode.errors import UserError
from decode.kernels.checksum import has_values, value_checksum
from decode.model.identity.weight_files import VALUES, WeightFiles

PREFIX = "all-"  # fingerprints over all elements; older versions sampled rows and wrote 16 digits
VALUE = "value"  # kind of tensors compared by value
# Configuration fields without effect on computation, or that are known from elsewhere (dtype, weights).
NO_COMPUTATION = {
    *("_name_or_path", "architectures", "auto_map", "transformers_version", "id2label", "label2id"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"),
    *("tie_word_embeddings", "quantization_config", "use_cache"),
}
Named = Iterable[tuple[str, Tensor]]


class Entry(NamedTuple):
    """What the fingerprint uses of a tensor.

    Attributes:
        names: in the model; several if it is tied.
        shape: of the tensor.
        kind: `VALUE`, or the dtype if its bits are compared.
        checksum: () int64, on some device; None: the tensor is not in this process.
        half: checksum of its float16 values, if that is its dtype.
    """

    names: list[str]
    shape: list[int]
    kind: str
    checksum: Tensor | None
    half: Tensor | None


def check_current(name: str, what: str) -> None:
    """Refuse a fingerprint in an outdated format.

    Args:
        name: the fingerprint.
        what: object with this fingerprint, for the error.

    Raises:
        UserError: an older version wrote it.
    """
    if not name.startswith(PREFIX):
        raise UserError(
            f"{what}: an older version made it, with a fingerprint of only a few rows of the weights; "
            "make it again with this version"
        )


def hashed(text: str) -> str:
    """A fingerprint derived from a text."""
    return PREFIX + hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(tensors: Named, files: WeightFiles | None = None) -> str:
    """Fingerprint of the current weights.

    Rounding to float16 and then to bf16 differs from rounding to bf16: small values become 0 or subnormal,
    and fp32 values are rounded twice. So a float16 tensor counts with the values in its file, as long as
    they round to the tensor. One that was changed after loading counts with its current values.

    Args:
        tensors: names and values.
        files: files that they were loaded from; None: not available.

    Raises:
        UserError: a tensor is neither in this process nor in the files under its name and shape.
    """
    entries = _entries(tensors)
    own, halves = _to_host([e.checksum for e in entries]), _to_host([e.half for e in entries])
    lines = []
    for (names, shape, kind, *_), checksum, half in zip(entries, own, halves, strict=True):
        if files and (checksum is None or half is not None):
            stored = _on_file(files, names, shape, half)
            checksum = checksum if stored is None else stored
        if checksum is None:
            raise UserError(f"target: {names[0]} is not in its files as it is in the model")
        lines += [f"{name} {shape} {kind} {checksum}" for name in names]
    return hashed("\n".join(sorted(lines)))


def module_fingerprint(module: nn.Module) -> str:
    """Fingerprint of a module's parameters and persistent buffers, from memory."""
    return fingerprint(module.state_dict().items())


def config_hash(config: Any) -> str:
    """Hash of a configuration's computational settings, without the weights.

    Fields at their class's default do not count, so fields added by later versions of transformers leave
    the hash unchanged.

    Args:
        config: of a language model.
    """
    try:
        usual = type(config)().to_dict()
    except (TypeError, ValueError):  # a class with fields without defaults
        usual = {}
    own = {k: v for k, v in config.to_dict().items() if k not in NO_COMPUTATION and usual.get(k, ...) != v}
    text = json.dumps([config.model_type, own], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _on_file(files: WeightFiles, names: list[str], shape: list[int], half: int | None) -> int | None:
    """Checksum of a tensor in its file; None if it is missing or does not round to the one in float16."""
    for name in names:
        key = files.key(name, shape)
        dtype = None if key is None else files.headers[key].dtype
        if key is None or dtype not in VALUES or (half is not None and dtype == "F16"):  # exact in memory
            continue
        if half is None or files.checksum(key, torch.float16) == half:
            return files.checksum(key)
    return None


def _entries(tensors: Named) -> list[Entry]:
    """Entries of tensors; tensors that share memory are one entry."""
    found: list[Entry] = []
    known: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], Entry]] = {}
    for name, tensor in _plain(tensors):
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        other, entry = known.get(place, (None, None))
        # The memory of a freed tensor may have been reused.
        if entry is None or other is None or other() is None or tensor.is_meta:
            shape, kind = list(tensor.shape), VALUE if has_values(tensor) else str(tensor.dtype)
            checksum = None if tensor.is_meta else value_checksum(tensor)
            rounded = tensor.dtype == torch.float16 and not tensor.is_meta
            half = value_checksum(tensor, torch.float16) if rounded else None
            entry = Entry([], shape, kind, checksum, half)
            known[place] = weakref.ref(tensor), entry
            found.append(entry)
        entry.names.append(name)
    return found


def _plain(tensors: Named) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with quantised ones replaced by their components."""
    for name, tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue  # other packages add other objects to a state dict
        flatten = getattr(tensor, "__tensor_flatten__", None)  # torch's interface of tensor subclasses
        if flatten is None:
            yield name, tensor
        else:
            yield from _plain((f"{name}.{part}", getattr(tensor, part)) for part in flatten()[0])


def _to_host(values: Sequence[Tensor | None]) -> list[int | None]:
    """Values of () integers on any devices, with one synchronisation per device."""
    devices: dict[torch.device, list[int]] = {}
    for place, value in enumerate(values):
        if value is not None:
            devices.setdefault(value.device, []).append(place)
    found: list[int | None] = [None] * len(values)
    for places in devices.values():
        stacked = torch.stack([value for place in places if (value := values[place]) is not None])
        for place, value in zip(places, stacked.tolist(), strict=True):
            found[place] = value
    return found
