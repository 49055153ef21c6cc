"""The header of a GGUF file: its keys and its table of tensors, read within the file's bounds."""

from __future__ import annotations

import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 has 32-bit counts
ALIGNMENT = 32
DIMENSIONS = 4  # maximum of a ggml tensor
STRING, ARRAY, FLOAT = 8, 9, 6
# Value types (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    FLOAT: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
BLOCK = re.compile(r"^blk\.(\d+)\.")


class Stored(NamedTuple):
    """A tensor in the file.

    Attributes:
        name: in the file.
        shape: slowest dimension first, as in torch.
        kind: name of its type, such as `Q4_1`.
        blocks: bytes of its rows; all dimensions but the last are flattened.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    blocks: np.ndarray

    def values(self, rows: Any = slice(None)) -> np.ndarray:
        """Rows as float32: (rows, last dimension)."""
        from gguf import GGMLQuantizationType, quants  # optional dependency

        block = np.ascontiguousarray(self.blocks[rows])
        return quants.dequantize(block, GGMLQuantizationType[self.kind]).astype(np.float32)


class Header(NamedTuple):
    """Contents of a file before its weights.

    Attributes:
        keys: values by name; numeric arrays as numpy arrays, text arrays as lists.
        tensors: by name, in the order of the file.
        behind: number of bytes after the last tensor.
    """

    keys: dict[str, Any]
    tensors: dict[str, Stored]
    behind: int

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model class; first part of the names of its settings."""
        return self.keys["general.architecture"]

    @property
    def layers(self) -> set[int]:
        """Numbers of the layers that have tensors."""
        return {int(found[1]) for name in self.tensors if (found := BLOCK.match(name))}


class _Cursor:
    """Reads one value after another without passing the end of the file."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def take(self, length: int) -> memoryview:
        if length > len(self.data) - self.at:
            raise ValueError("it ends within its header")
        self.at += length
        return self.data[self.at - length : self.at]

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return bytes(self.take(self.number("<Q"))).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind in NUMBERS:
            one = self._numbers(kind, 1)[0]
            # The shortest decimal with the same float32 value: 1e-05 for 9.9999997e-06.
            return float(str(one)) if kind == FLOAT else one.item()
        if kind != ARRAY:
            raise ValueError(f"a value of type {kind}, which GGUF does not have")
        inner, count = self.number("<I"), self.number("<Q")
        if inner == STRING:
            if 8 * count > len(self.data) - self.at:
                raise ValueError("it ends within its header")
            return [self.text() for _ in range(count)]
        if inner not in NUMBERS:
            raise ValueError(f"an array of type {inner}, neither numbers nor text")
        return self._numbers(inner, count)

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        form = np.dtype(NUMBERS[kind])
        return np.frombuffer(self.take(form.itemsize * count), dtype=form)


def read_header(path: Path) -> Header:
    """Read a file's header without its weights.

    Args:
        path: GGUF file.

    Raises:
        ValueError: the file is damaged, or has an unknown version or value type.
    """
    with path.open("rb") as file:
        cursor = _Cursor(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    if bytes(cursor.take(4)) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    if (version := cursor.number("<I")) not in VERSIONS:
        raise ValueError(f"version {version} of GGUF in this byte order")
    tensors, keys = cursor.number("<Q"), cursor.number("<Q")
    found: dict[str, Any] = {}
    for _ in range(keys):
        name = cursor.text()
        if name in found:
            raise ValueError(f"it has the key {name} twice")
        found[name] = cursor.value(cursor.number("<I"))
    if not isinstance(found.get("general.architecture"), str):
        raise ValueError("it names no architecture")
    table, behind = _read_table(cursor, tensors, found.get("general.alignment", ALIGNMENT))
    return Header(found, table, behind)


def _read_table(cursor: _Cursor, count: int, alignment: int) -> tuple[dict[str, Stored], int]:
    """Contiguous tensors by name, and the number of bytes after the last one."""
    places = []
    for _ in range(count):
        name, rank = cursor.text(), cursor.number("<I")
        if not 1 <= rank <= DIMENSIONS:
            raise ValueError(f"{name} has {rank} dimensions")
        shape = tuple(cursor.number("<Q") for _ in range(rank))[::-1]
        places.append((name, shape, cursor.number("<I"), cursor.number("<Q")))
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"an alignment of {alignment}")
    start = -(-cursor.at // alignment) * alignment
    expected, table = 0, {}
    for name, shape, kind, offset in places:
        stored = _stored(cursor.data, name, shape, kind, start + offset)
        if name in table or offset != expected:
            raise ValueError(f"tensor {name} overlaps another tensor")
        table[name] = stored
        expected += -(-stored.blocks.size // alignment) * alignment
    return table, max(0, len(cursor.data) - start - expected)


def _stored(data: memoryview, name: str, shape: tuple[int, ...], kind: int, at: int) -> Stored:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # optional dependency

    known = {item.value: item for item in GGMLQuantizationType}
    if kind not in known:
        raise ValueError(f"{name} is of type {kind}, which the package gguf does not know")
    values, width = GGML_QUANT_SIZES[known[kind]]
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if not rows or not columns or columns % values:
        raise ValueError(f"{name} has a shape of {list(shape)}")
    size = columns // values * width
    if at + rows * size > len(data):
        raise ValueError(f"it ends within {name}")
    blocks = np.frombuffer(data[at : at + rows * size], dtype=np.uint8)
    return Stored(name, shape, known[kind].name, blocks.reshape(rows, size))
