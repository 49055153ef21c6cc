"""Layout of weights by llama.cpp's converter: where the numbers of a weight are in the file.

transformers reverses this layout when it reads a file. It is implemented again here for a few rows of
each weight, so that the two can be compared. Classes not named here are stored unchanged.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.model.files.gguf.header import Header, Stored

ROWS = 64  # rows to compare per tensor
HYBRIDS = ("qwen35", "qwen35moe")  # Qwen 3.5: value heads are stored in tiles
PLUS_ONE = ("gemma2", "gemma3", "nemotron", *HYBRIDS)  # norms are stored with 1 added
AS_IT_IS = "ssm_norm"  # except this norm
LOGARITHMS = ("mamba", *HYBRIDS)  # `ssm_a` is stored as log(-x)
STACKED = ("bloom",)  # queries, keys and values are interleaved by head in the model
ROTATED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}  # of a Llama
TURNED = {"gpt2": ("attn_qkv", "attn_output", "ffn_up", "ffn_down")}  # transposed matrices
ONE_ROW = ("ssm_alpha", "ssm_beta", "ssm_dt", "ssm_a")  # one row per value head


def is_equal(header: Header, config: Any, weight: Tensor, stored: Stored) -> bool:
    """Whether some rows of a weight, or a whole vector, equal a tensor in the file.

    Args:
        header: of the file.
        config: of the model.
        weight: of the model.
        stored: tensor in the file.
    """
    kind, vector = short(stored.name), len(stored.shape) == 1
    turned = kind in TURNED.get(header.architecture, ()) and not vector
    rows = weight.reshape(-1) if vector else (weight.T if turned else weight).reshape(-1, stored.shape[-1])
    if len(rows) != math.prod(stored.shape if vector else stored.shape[:-1]):
        return False
    which = np.arange(len(rows)) if vector else np.unique(np.linspace(0, len(rows) - 1, ROWS).astype(int))
    at = _rows(header.architecture, config, kind, len(rows), which)
    expected = stored.values()[0][at] if vector else stored.values(at)
    if (
        header.architecture in HYBRIDS and kind == "ssm_out"
    ):  # its input is values, so the tiles are in its columns
        columns = np.arange(expected.shape[1])
        expected = expected[:, _tiles(config, columns, config.linear_value_head_dim, 0)]
    logarithm = header.architecture in LOGARITHMS and kind == "ssm_a"
    if logarithm:
        expected = np.log(-expected)
    if header.architecture in PLUS_ONE and kind.endswith("norm") and kind != AS_IT_IS:
        expected = expected - 1
    own, expected = rows[torch.from_numpy(which)], torch.from_numpy(expected).to(weight.dtype)
    # Logarithms of two libraries may differ in the last bit.
    return torch.allclose(own, expected, rtol=1e-5) if logarithm else torch.equal(own, expected)


def short(name: str) -> str:
    """Name of a tensor without its layer and kind: `attn_q` of `blk.0.attn_q.weight`."""
    parts = name.split(".")
    return parts[2] if parts[0] == "blk" and len(parts) > 2 else parts[0]


def _rows(architecture: str, config: Any, kind: str, count: int, rows: np.ndarray) -> np.ndarray:
    """Indices in a tensor of `count` rows for these rows of a weight."""
    if architecture == "llama" and kind in ROTATED:
        # llama.cpp rotates dimensions 2i and 2i + 1 of a head together, transformers i and i + half.
        size = count // getattr(config, ROTATED[kind])
        head, at = np.divmod(rows, size)
        half, pair = np.divmod(at, size // 2)
        return head * size + 2 * pair + half
    if architecture in STACKED and kind == "attn_qkv":
        heads = config.num_attention_heads
        size = count // heads // 3
        head, at = np.divmod(rows, 3 * size)
        part, at = np.divmod(at, size)
        return (part * heads + head) * size + at
    if architecture in HYBRIDS:
        if kind in ONE_ROW:
            return _tiles(config, rows, 1, 0)
        if kind == "attn_gate":
            return _tiles(config, rows, config.linear_value_head_dim, 0)
        if kind in ("attn_qkv", "ssm_conv1d"):  # queries and keys are before the values
            first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
            return _tiles(config, rows, config.linear_value_head_dim, first)
    return rows


def _tiles(config: Any, at: np.ndarray, size: int, first: int) -> np.ndarray:
    """Indices of value heads in the file: a model groups them by key head, a file stores them in tiles."""
    keys = config.linear_num_key_heads
    each = config.linear_num_value_heads // keys
    key, rest = np.divmod(at - first, each * size)
    head, inner = np.divmod(rest, size)
    return np.where(at < first, at, first + (head * keys + key) * size + inner)
