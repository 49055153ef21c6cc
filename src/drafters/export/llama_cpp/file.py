"""The GGUF file of a drafter: its keys and tensors, and the tokenizer of the target's own file.

A draft for llama.cpp is served with a GGUF file of its target, which has the tokenizer in llama.cpp's own
terms. It is copied, so the two always agree, and no list of known tokenizers is needed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.errors import UserError
from decode.model import gguf
from decode.model.files.gguf.header import Header, read_header
from decode.model.target import Target
from drafters.export.layout import Layout

DRAFTER = "drafter.gguf"
OPTION = "target_gguf"
KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0")  # of matrices
OF_DTYPE = {torch.float16: "f16", torch.bfloat16: "bf16"}  # the kind of a file as its weights are
TOKENIZER = ("tokenizer.ggml.", "tokenizer.chat_template")
BLOCK = 32  # values of a row that are quantised together
CONTEXT = "context_length"
NEXTN = "nextn_predict_layers"  # number of MTP layers in a file
TABLES = ("token_embd.weight", "output_norm.weight", "output.weight")  # of the target, beside an MTP layer


def target_file(named: str | None, target: Target) -> Path:
    """The GGUF file that llama.cpp serves as the target: the one that is named, or the target's own.

    Args:
        named: path, or `package/file.gguf`; None: the file that the target was loaded from.
        target: of the drafter.

    Raises:
        UserError: no file, or one of another model.
    """
    folder = target.model.name_or_path
    if named is None and folder and (note := Path(folder) / gguf.NOTE).is_file():
        named = json.loads(note.read_text())["file"]
    if named is None:
        raise UserError(
            "to=gguf takes the tokenizer from the GGUF file that is served as the target; name it by "
            f"export.{OPTION}=<file> (foredraft export: {OPTION}=)"
        )
    path = check_named(named)
    _check_target(_header(path), target, path)
    return path


def check_kind(kind: str | None) -> None:
    """Check the name of a kind; None: as the weights are.

    Raises:
        UserError: an unknown kind.
    """
    if kind is not None and kind not in KINDS:
        raise UserError(f"outtype={kind}: choose {', '.join(KINDS[:-1])} or {KINDS[-1]}")


def check_named(named: str) -> Path:
    """Check that an option names a GGUF file.

    Raises:
        UserError: it does not.
    """
    if (path := gguf.find(named, OPTION)) is None:
        raise UserError(f"{OPTION}={named}: no GGUF file; give the file that llama.cpp serves as the target")
    return path


def write_on(layout: Layout, file: Path, kind: str | None) -> Layout:
    """A layout whose folder gets a GGUF file in place of `model.safetensors`.

    Args:
        layout: of a format of `drafts`: `config` has the keys, `tensors` the tensors by their names there.
        file: from `target_file`.
        kind: one of `KINDS`; None: as the weights are. A model from a GGUF file then is that file, unchanged.
    """
    written = layout._replace(weights=partial(_write, layout, file, kind))
    if not layout.file or kind:
        return written
    if given := gguf.file_of(layout.file):
        note = f"{DRAFTER} is {given.name} itself, SHA-256 {layout.file}."
        return layout._replace(weights=partial(_link, given), note=f"{layout.note}\n\n{note}")
    note = (
        f"{DRAFTER} has dequantised weights: the file that they are of, SHA-256 {layout.file}, was not found."
    )
    return written._replace(note=f"{layout.note}\n\n{note}")


def _link(given: Path, folder: Path) -> None:
    """Give a file its name in a folder; it is copied where the two are on different disks."""
    try:
        (folder / DRAFTER).hardlink_to(given)
    except OSError:
        shutil.copyfile(given, folder / DRAFTER)


def _header(path: Path) -> Header:
    try:
        return read_header(path)
    except ImportError:
        raise UserError("to=gguf needs the package gguf; pip install 'foredraft[gguf]'") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{OPTION}={path}: {error}") from None


def _check_target(header: Header, target: Target, path: Path) -> None:
    """Check by its sizes that a file is the target's.

    Raises:
        UserError: it is another model's, or has no tokenizer.
    """
    table = header.tensors.get("token_embd.weight")
    tokens = header.keys.get("tokenizer.ggml.tokens", ())
    found = {"hidden_size": table.shape[1], "vocab_size": table.shape[0]} if table else {}
    layers, more = (header.keys.get(f"{header.architecture}.{key}", 0) for key in ("block_count", NEXTN))
    found |= {"number of layers": layers - more}
    found |= {"number of tokens": len(tokens)}
    expected = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    expected |= {"number of layers": len(target.layers), "number of tokens": target.vocab_size}
    for name, size in expected.items():
        if found.get(name) != size:
            raise UserError(f"{OPTION}={path}: its {name} is {found.get(name)}, the target's {size}")


def _write(layout: Layout, file: Path, kind: str | None, folder: Path) -> None:
    """Write `drafter.gguf`: vectors in float32, matrices of this kind.

    A file of an MTP layer also has the target's settings, embedding and head, as its class needs them.
    """
    from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, quants  # optional dependency

    header = _header(file)
    architecture = layout.config["general.architecture"]
    writer = GGUFWriter(folder / DRAFTER, architecture)
    layer = f"{architecture}.{NEXTN}" in layout.config
    copied = (*TOKENIZER, f"{architecture}.") if layer else TOKENIZER
    keys = {f"{architecture}.{CONTEXT}": header.keys.get(f"{header.architecture}.{CONTEXT}")}
    keys |= {name: value for name, value in header.keys.items() if name.startswith(copied)}
    for name, value in (keys | layout.config).items():
        if name != "general.architecture" and value is not None:
            _add(writer, name, value)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    for stored in (header.tensors[name] for name in TABLES if layer and name in header.tensors):
        blocks = stored.blocks.reshape(*stored.shape[:-1], -1)
        writer.add_tensor(stored.name, blocks, raw_dtype=GGMLQuantizationType[stored.kind])
    for name, tensor in layout.tensors.items():
        own = "i64" if not tensor.is_floating_point() else kind_of(tensor, kind)
        raw, value = GGMLQuantizationType[own.upper()], tensor.detach().cpu()
        values = value.numpy() if own == "i64" else quants.quantize(value.float().numpy(), raw)
        writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def kind_of(tensor: Tensor, kind: str | None) -> str:
    """The kind in which a tensor is stored: as llama.cpp's converter does, vectors and one row in float32."""
    if tensor.dim() < 2 or len(tensor) == 1:
        return "f32"
    kind = kind or OF_DTYPE.get(tensor.dtype, "f32")
    return "f16" if kind.startswith("q") and tensor.shape[-1] % BLOCK else kind


def _add(writer: Any, name: str, value: Any) -> None:
    """Add a key with the type that its value has; numbers of arrays keep theirs."""
    from gguf import GGUFValueType  # optional dependency

    kinds: Mapping[type, str] = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    value = value.tolist() if isinstance(value, np.ndarray) else value
    writer.add_key_value(name, value, GGUFValueType[kinds[type(value)]])
