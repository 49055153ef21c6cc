"""Open untrusted files, with limits on size and nesting and without links out of the folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from decode.errors import UserError

JSON_BYTES = 4 * 2**20  # limit for a JSON file; ours have at most 100 kB
HEADER_BYTES = 16 * 2**20  # limit for a safetensors header: about 100,000 tensors
DEEPEST = 40  # limit for nested lists and objects
KINDS = {"F64": "float", "F32": "float", "F16": "float", "BF16": "float", "BOOL": "bool"}
KINDS |= {f"{sign}{bits}": "int" for sign in "IU" for bits in (8, 16, 32, 64)}


class Shape(NamedTuple):
    """Shape and kind of dtype of a tensor that may not be loaded."""

    size: tuple[int, ...]
    kind: str  # float | int | bool

    def __str__(self) -> str:
        return f"{self.kind} {self.size}"


def shape_of(tensor: Tensor) -> Shape:
    """The `Shape` of a tensor."""
    kind = "float" if tensor.is_floating_point() else "bool" if tensor.dtype is torch.bool else "int"
    return Shape(tuple(tensor.shape), kind)


def in_hub_cache(folder: Path) -> bool:
    """Whether a folder is in huggingface_hub's cache, where files are links to a `blobs` folder."""
    return folder.resolve().parent.name == "snapshots"


def check_link(path: Path) -> Path:
    """Check that a checkpoint file is no link out of its folder; returns its path.

    Raises:
        UserError: a link out of the folder, which could make this machine read or upload other files.
    """
    folder, location = path.parent.resolve(), path.resolve()
    homes = [folder, folder.parent.parent / "blobs"] if in_hub_cache(folder) else [folder]
    if path.is_symlink() and location.parent not in homes:
        raise UserError(f"{path}: a link to a file outside its folder; replace it by a copy of the file")
    return path


def check_file(path: Path) -> Path:
    """Check with `check_link`, and that the path is a regular file; returns the path.

    Raises:
        UserError: a link out of the folder, or a folder, pipe or device.
    """
    if check_link(path).exists() and not path.is_file():
        raise UserError(f"{path}: no regular file; download or export the checkpoint again")
    return path


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        UserError: a link out of the folder, or too large.
        ValueError: invalid JSON, a duplicate key, NaN or infinity, or nested too deeply.
    """
    if (size := check_file(path).stat().st_size) > JSON_BYTES:
        raise UserError(f"{path}: {size} bytes; a drafter's file has at most {JSON_BYTES}")
    try:
        value = json.loads(path.read_text(), object_pairs_hook=_unique_keys, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check_depth(value, DEEPEST)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a duplicate key")
    return mapping


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _check_depth(value: Any, levels: int) -> None:
    if not levels:
        raise ValueError("nested too deeply")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(part, levels - 1)


def header(path: Path) -> dict[str, Shape]:
    """Shapes in the header of a safetensors file, without reading tensors.

    Raises:
        UserError: a link out of the folder, a header that is too large, or an unsupported dtype.
        OSError, SafetensorError: no such file, or a header that contradicts the contents.
    """
    with check_file(path).open("rb") as file:
        if (size := int.from_bytes(file.read(8), "little")) > HEADER_BYTES:
            raise UserError(
                f"damaged checkpoint ({path.name}: a header of {size} bytes; none has {HEADER_BYTES})"
            )
    shapes = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            part = file.get_slice(name)
            if part.get_dtype() not in KINDS:
                raise UserError(f"damaged checkpoint (tensor {brief(name)} is of dtype {part.get_dtype()})")
            shapes[name] = Shape(tuple(part.get_shape()), KINDS[part.get_dtype()])
    return shapes


def is_hub_id(name: str) -> bool:
    """Whether a name has the form owner/name."""
    return re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", name) is not None and ".." not in name


def brief(value: Any) -> str:
    """A value on one line, shortened."""
    return " ".join(str(value).split())[:80] or type(value).__name__
