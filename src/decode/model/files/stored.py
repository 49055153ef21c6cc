"""Names, dtypes and values of the tensors in a model's safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from decode.errors import UserError
from decode.model.files.account import Account
from decode.model.files.folder import ADAPTER_WEIGHTS, ModelFiles, is_file_name

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ROWS = 4096  # rows of a tensor to compare at a time
# Other weight formats, which are not read: to read .bin, .pt and .pth can run code.
OTHER_FORMATS = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".gguf")

# Files of a training run, which are no weights of the model.
OF_TRAINING = ("training_args.", "optimizer.", "scheduler.", "scaler.", "rng_state")
CONVERT = (
    "only safetensors are read; convert the weights where you trust them (reading others can run code): "
    "AutoModelForCausalLM.from_pretrained(...).save_pretrained(<folder>) in transformers"
)


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        path: of the file.
        dtype: in safetensors' notation: BF16, F8_E4M3, I32.
    """

    path: Path
    name: str
    dtype: str

    def read(self) -> Tensor:
        """Its values."""
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(self.name)


def weight_map(files: ModelFiles) -> dict[str, list[str]]:
    """Map from file to the tensor names in its index; one file with no names if there is no index.

    Raises:
        UserError: the index is damaged or names files outside the folder.
    """
    if files.path(SINGLE) is not None:  # transformers prefers it, too
        return {SINGLE: []}
    index = files.read(INDEX)
    if not index:
        return {}
    found: dict[str, list[str]] = {}
    named = index.get("weight_map")
    if not isinstance(named, dict) or not isinstance(index.get("metadata"), dict):
        raise UserError(f"{files.name}: {INDEX} is damaged (it needs weight_map and metadata, two objects)")
    for tensor, file in named.items():
        if not is_file_name(file):
            raise UserError(f"{files.name}: {INDEX} names {str(file)[:60]!r}, which is no file of the folder")
        found.setdefault(file, []).append(tensor)
    return found


def account_of_files(files: ModelFiles) -> Account:
    """Account of the weight files, before they are read.

    Raises:
        UserError: see `weight_map`; or a file is not in the cache, and the hub cannot be reached.
    """
    account, read = Account("weights"), weight_map(files)
    local = isinstance(files.source, Path)
    missing = [file for file in read if local and files.path(file) is None]
    account.refuse(f"{INDEX} names them, and they are not in the folder", missing)
    account.count("files", len(read))
    if SINGLE in read and set(_indexed(files)) - {SINGLE}:
        account.refuse(
            "in the folder, and transformers reads it while engines read the files of the index; remove "
            "the wrong one",
            [f"{SINGLE} and {INDEX}"],
        )
    others = [name for name in files.names() if name not in read]
    unread = [name for name in others if name.endswith(OTHER_FORMATS) and name not in ADAPTER_WEIGHTS]
    if read:
        account.ignore("weights in another format, which are ignored if there are safetensors files", unread)
    elif local:
        weights = [name for name in unread if not name.startswith(OF_TRAINING) and ".gguf" not in name]
        account.refuse(CONVERT, weights)
    else:
        files.path(SINGLE, needed=True)
        account.refuse(f"not in the repository; {CONVERT}", [SINGLE])
    more = [name for name in others if name.endswith(".safetensors") and name not in ADAPTER_WEIGHTS]
    account.ignore(
        "weights under the names of the authors' own code",
        [name for name in more if name.startswith("consolidated")],
    )
    more = [name for name in more if not name.startswith("consolidated")]
    if SINGLE in read:
        account.refuse(
            f"not read, while engines read every safetensors file of a folder with {SINGLE}; move them "
            "out of the folder",
            more,
        )
    else:
        account.remark(f"safetensors files that {INDEX} does not name", more)
    return account


def _indexed(files: ModelFiles) -> list[str]:
    named = files.read(INDEX).get("weight_map")
    return list(map(str, named.values())) if isinstance(named, dict) else []


def stored_tensors(files: ModelFiles) -> tuple[dict[str, Stored], list[tuple[Stored, Stored]]]:
    """Tensors in the files that transformers reads, by name; and pairs with the same name in two files.

    Raises:
        UserError: a file is damaged.
    """
    found: dict[str, Stored] = {}
    twice: list[tuple[Stored, Stored]] = []
    for name in sorted(weight_map(files)):
        path = files.path(name)
        if path is None:
            continue
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 - no mapping
                    here = Stored(path, key, file.get_slice(key).get_dtype())
                    if key in found:
                        twice.append((found[key], here))
                    found[key] = here
        except (OSError, SafetensorError) as error:
            raise UserError(f"{files.name}: {name} is damaged ({error})") from None
    return found, twice


def same_values(one: Stored, other: Stored) -> bool:
    """Whether two tensors have the same shape and values; compared in pieces."""
    with safe_open(one.path, "pt") as first, safe_open(other.path, "pt") as second:
        a, b = first.get_slice(one.name), second.get_slice(other.name)
        if a.get_shape() != b.get_shape():
            return False
        if not a.get_shape():
            return torch.equal(one.read().float(), other.read().float())
        return all(torch.equal(a[piece].float(), b[piece].float()) for piece in _pieces(a.get_shape()[0]))


def _pieces(rows: int) -> Iterator[slice]:
    return (slice(start, min(start + ROWS, rows)) for start in range(0, rows, ROWS))


def unindexed(files: ModelFiles, found: dict[str, Stored]) -> list[str]:
    """Tensors in the index that no file has."""
    return [name for names in weight_map(files).values() for name in names if name not in found]
