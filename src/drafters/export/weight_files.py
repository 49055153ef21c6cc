"""Read weights in the file formats of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from safetensors.torch import load_file
from torch import Tensor

from decode.errors import UserError
from decode.model.files.folder import is_file_name
from drafters.hub.untrusted_files import check_link, header, read_json

WHOLE = ("model.safetensors", "medusa_lm_head.safetensors")
INDEX = "model.safetensors.index.json"
TORCH = ("medusa_lm_head.pt", "pytorch_model.bin")
PATTERNS = (*WHOLE, INDEX, "model-*-of-*.safetensors", *TORCH)  # allowed downloads


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read a folder's tensors from one safetensors file, several with an index, or a `torch.save` file.

    Raises:
        UserError: there is no such file, or it is invalid.
    """
    for name in WHOLE:
        if (folder / name).is_file():
            return _tensors(folder / name)
    if (folder / INDEX).is_file():
        return _parts(folder)
    for name in TORCH:
        if (folder / name).is_file():
            return _saved_by_torch(folder / name)
    raise UserError(f"no weights there; known files are {', '.join((*WHOLE, INDEX, *TORCH))}")


def _parts(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(read_json(folder / INDEX)["weight_map"].values())):
        if not is_file_name(name):
            raise UserError(f"{INDEX} names {name!r}, which is no file of this folder")
        tensors |= _tensors(folder / name)
    return tensors


def _tensors(path: Path) -> dict[str, Tensor]:
    header(path)  # validates size and location
    return load_file(path)


def _saved_by_torch(path: Path) -> dict[str, Tensor]:
    check_link(path)
    try:
        with ZipFile(path) as archive:
            packed = any(part.compress_type for part in archive.infolist())
        # Many public drafters exist only in this format. `weights_only` allows only tensors.
        state_dict: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # noqa: TID251
    except Exception:  # an invalid file may fail anywhere in the reader
        raise UserError(f"{path.name}: not a file of only tensors; convert it to safetensors") from None
    if packed or not (isinstance(state_dict, dict) and all(map(_is_dense, state_dict.values()))):
        raise UserError(f"{path.name}: not a state dict; convert it to safetensors")
    return state_dict


def _is_dense(value: Any) -> bool:
    """Whether a value is a dense CPU tensor with full storage; an expanded view may claim a huge size."""
    plain = isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu"
    return plain and value.untyped_storage().nbytes() >= value.numel() * value.itemsize
