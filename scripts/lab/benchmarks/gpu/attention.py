"""Attention of a few queries over many keys, by several kernels: scripts/lab/benchmark.py attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.gpu.device import ceilings, seconds_of
from decode.errors import UserError
from decode.hardware import hardware
from decode.model.attention import attend, attend_folded
from decode.model.load import DTYPES
from distill.config.resolvers import device_of
from distill.config.validate import check_out
from distill.scoring.tables import grid
from distill.utils.atomic_files import write_json
from distill.utils.provenance import commit

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
CALLS = 20  # in one CUDA graph, so that launches do not count
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float64: 1e-10}


def attention(cfg: DictConfig, folder: Path) -> float:
    """Time each kernel for each number of keys and queries; a table, and `out` as JSON.

    Half of a bucket's keys are masked, as those after a text's end are.

    Args:
        cfg: composed from conf/lab/attention.yaml.
        folder: unused; nothing is written but `out`.

    Returns:
        Seconds that the fastest kernel takes in the last case.

    Raises:
        UserError: bad input, or a kernel that computes something else than the first.
    """
    del folder
    check_out(cfg)
    if unknown := [name for name in cfg.kernels if name not in KERNELS]:
        raise UserError(f"kernels: no {unknown[0]}; choose of {', '.join(KERNELS)}")
    if cfg.dtype not in DTYPES:
        raise UserError(f"dtype={cfg.dtype}: choose one of {', '.join(DTYPES)}")
    device, dtype = torch.device(device_of(cfg.trainer.accelerator)), DTYPES[cfg.dtype]
    torch.manual_seed(cfg.seed)
    most = ceilings(device)
    rows = [_row(cfg, keys, queries, device, dtype) for keys in cfg.widths for queries in cfg.queries]
    card = {
        "what": "attention",
        "rows": rows,
        "heads": [cfg.heads, cfg.kv_heads, cfg.head_dim],
        "batch": cfg.batch,
        "dtype": cfg.dtype,
        **most,
        "hardware": hardware(device),
        "seed": cfg.seed,
        "commit": commit(),
    }
    for row in rows:  # keys and values are read once
        row["bound_us"] = 1e6 * row["bytes"] / most["copy_bytes"]
    write_json(Path(cfg.out), card)
    lines = [
        [*(str(row[name]) for name in ("keys", "queries")), f"{row['bound_us']:.1f}"]
        + [f"{us:.1f}" for us in row["us"].values()]
        for row in rows
    ]
    print(grid(["keys", "queries", "bound, us", *(f"{name}, us" for name in cfg.kernels)], lines))
    print(f"{card['hardware']}, {cfg.dtype}, batch {cfg.batch}, heads {card['heads']}")
    return min(rows[-1]["us"].values()) / 1e6


def _row(
    cfg: DictConfig, keys: int, queries: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    def drawn(heads: int, length: int) -> Tensor:
        return torch.randn(cfg.batch, heads, length, cfg.head_dim, device=device, dtype=dtype)

    q, k, v = drawn(cfg.heads, queries), drawn(cfg.kv_heads, keys), drawn(cfg.kv_heads, keys)
    settled = keys // 2
    after = torch.arange(keys, device=device) - settled
    mask = (after <= torch.arange(queries, device=device)[:, None]).expand(cfg.batch, 1, -1, -1)
    first, times = None, {}
    for name in cfg.kernels:
        kernel = KERNELS[name]
        out = kernel(q, k, v, mask)
        first = out if first is None else first
        if (worst := (out - first).abs().max().item()) > TOLERANCE[dtype]:
            raise UserError(f"kernels: {name} differs from {cfg.kernels[0]} by {worst:.2g}, {keys} keys")
        times[name] = 1e6 * _seconds(lambda kernel=kernel: kernel(q, k, v, mask), device, cfg.repeats)
    return {"keys": keys, "queries": queries, "bytes": k.nbytes + v.nbytes, "us": times}


def _seconds(body: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Seconds of a call; on a GPU of one in a graph of several."""
    if device.type != "cuda":
        return seconds_of(body, device, repeats)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            body()
    return seconds_of(graph.replay, device, repeats) / CALLS


# -- kernels: (B, heads, n, dim), twice (B, kv_heads, width, dim), (B, 1, n, width) bool ------------------


def repeated(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The kernel of torch with keys and values copied for every query head."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Two plain products, with queries folded: parallel over keys, and all scores are written."""
    groups = q.shape[1] // k.shape[1]
    rows = q.unflatten(1, (-1, groups)).flatten(2, 3) * q.shape[-1] ** -0.5
    hidden = ~mask.repeat(1, 1, groups, 1)
    scores = (rows @ k.transpose(-1, -2)).float().masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1).to(v.dtype) @ v).unflatten(2, (groups, -1)).flatten(1, 2)


_flex = torch.compile(flex_attention, dynamic=False)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compiled flex attention, which splits the keys, with the mask read in its score."""

    def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        del h
        return torch.where(mask[b, 0, i, j], value, -float("inf"))

    return _flex(q, k, v, score_mod=score, enable_gqa=True)


KERNELS: dict[str, Kernel] = {
    "decoder": attend,  # what decoding uses
    "folded": attend_folded,
    "repeated": repeated,
    "products": products,
    "flex": flex,
}
