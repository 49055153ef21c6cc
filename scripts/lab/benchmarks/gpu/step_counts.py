"""Operations, bytes and waits of a training step, without a card: scripts/lab/benchmark.py step_counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.device import Operations
from benchmarks.gpu.step import optimizer_step, random_pair
from decode import transfer
from distill.config.build import quiet
from distill.config.validate import check_out, check_ranges
from distill.training.throughput import ATTENTION
from distill.utils.atomic_files import write_json
from distill.utils.provenance import commit

META = torch.device("meta")


def step_counts(cfg: DictConfig, folder: Path) -> int:
    """Count a step of optimizer on shapes alone, at any size: the `meta` device has no numbers.

    So a step that reads the device fails here, and the number of reads is 0. The dtype is that of the
    weights, without autocast's casts; attention is in blocks.

    Args:
        cfg: composed from conf/lab/step_counts.yaml.
        folder: unused; nothing is written but `out`.

    Returns:
        Number of operations.

    Raises:
        UserError: bad input.
    """
    del folder
    quiet()
    check_ranges(cfg)
    check_out(cfg)
    sizes, target, drafter = random_pair(cfg, META)
    with _without_autocast():
        step = optimizer_step(cfg, target, drafter)
        step()  # makes the optimizer's state
        with _uploads() as uploads, Operations() as operations:
            step()
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            step()
    card = {
        "what": "step_counts",
        "like": cfg.like,
        "sizes": sizes,
        "drafter": type(drafter).__name__,
        "depth": getattr(drafter, "depth", None),
        "rows": cfg.rows,
        "tokens": cfg.tokens,
        "logits_rows": cfg.logits_rows,
        "operations": operations.count,
        "gigabytes": operations.bytes / 1e9,
        "teraflop": counter.get_total_flops() / 1e12,
        "uploads": len(uploads),
        "uploaded_bytes": sum(uploads),
        "reads": 0,
        "commit": commit(),
    }
    write_json(Path(cfg.out), card)
    print(
        f"{card['drafter']}, {cfg.rows} x {cfg.tokens} tokens: {operations.count} operations, "
        f"{card['gigabytes']:.1f} GB read and written, {card['teraflop']:.2f} TFLOP\n"
        f"{len(uploads)} uploads of {sum(uploads) / 2**10:.0f} KiB, no reads"
    )
    return operations.count


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Let code ask for autocast on the meta device, which has none."""
    enter, asked = torch.autocast, torch.is_autocast_enabled
    torch.autocast = lambda device, *a, **k: nullcontext() if device == "meta" else enter(device, *a, **k)
    torch.is_autocast_enabled = lambda *device: device != ("meta",) and asked(*device)
    try:
        yield
    finally:
        torch.autocast, torch.is_autocast_enabled = enter, asked


@contextmanager
def _uploads() -> Iterator[list[int]]:
    """Bytes of each copy to the device."""
    found: list[int] = []
    before: Callable[..., Any] = transfer.upload

    def counted(values: Any, device: torch.device) -> Any:
        found.append(values.nbytes)
        return before(values, device)

    transfer.upload = counted
    try:
        yield found
    finally:
        transfer.upload = before
