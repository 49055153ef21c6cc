"""Time of a drafter's training step on one device, as a share of its peak: scripts/lab/benchmark.py step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import span
from benchmarks.gpu.device import ceilings, kernels, named_peak, synchronize, waits
from benchmarks.gpu.random_target import random_drafter, random_target
from decode.errors import UserError
from decode.hardware import hardware
from decode.model.target import Target
from distill.config.build import quiet
from distill.config.read import read_options
from distill.config.resolvers import device_of
from distill.config.target_size import size_settings
from distill.config.validate import check_out, check_ranges, refused
from distill.losses.divergences import kl
from distill.losses.objective import Objective
from distill.losses.row_scores import Kernels
from distill.losses.weights import decay
from distill.options.run import DrafterOptions, OptimizerOptions
from distill.training.attention import compiled_attention
from distill.training.throughput import ATTENTION
from distill.utils.atomic_files import write_json
from distill.utils.provenance import commit
from drafters import optional
from drafters.base import Batch, Drafter

WARM = 3  # steps before the clock starts


def training_step(cfg: DictConfig, folder: Path) -> float:
    """Time a step: unroll, loss, backward, clipping and optimizer, on random states of the target.

    The target's own pass is not in it, as with hidden states that were read before. Work is counted by
    torch's `FlopCounterMode`.

    Args:
        cfg: composed from conf/lab/step.yaml.
        folder: unused; nothing is written but `out`.

    Returns:
        Milliseconds of a step.

    Raises:
        UserError: bad input.
    """
    del folder
    quiet()
    check_ranges(cfg)
    check_out(cfg)
    device = torch.device(device_of(cfg.trainer.accelerator))
    sizes, target, drafter = random_pair(cfg, device)
    flop = _flop(cfg, target, drafter)
    if cfg.compiled and device.type == "cuda":
        optional.attend_with(drafter, compiled_attention())
    step = optimizer_step(cfg, target, drafter)
    for _ in range(WARM):
        if not torch.isfinite(step()):
            raise UserError("benchmark step: the loss is not finite; choose another seed")
    card = _measured(cfg, step, flop, device) | {
        "what": "step",
        "like": cfg.like,
        "sizes": sizes,
        "drafter": type(drafter).__name__,
        "trained": sum(weight.numel() for weight in drafter.parameters() if weight.requires_grad),
        "depth": getattr(drafter, "depth", None),
        "rows": cfg.rows,
        "tokens": cfg.tokens,
        "dtype": cfg.dtype,
        "precision": cfg.precision,
        "compiled": cfg.compiled,
        "logits_rows": cfg.logits_rows,
        "hardware": hardware(device),
        "seed": cfg.seed,
        "commit": commit(),
    }
    write_json(Path(cfg.out), card)
    print(_lines(card))
    return card["step_ms"]


def random_pair(cfg: DictConfig, device: torch.device) -> tuple[dict[str, Any], Target, Drafter]:
    """Sizes of the target, the target, and a drafter that trains."""
    given: Any = OmegaConf.to_container(cfg.sizes) if cfg.sizes else {}
    sizes = {"num_hidden_layers": cfg.layers, **given}
    torch.manual_seed(cfg.seed)
    target = random_target(cfg.like, sizes, cfg.dtype, device)
    with refused():
        drafter = random_drafter(read_options(DrafterOptions, cfg.drafter), target)
    return sizes, target, drafter.train()


def optimizer_step(cfg: DictConfig, target: Target, drafter: Drafter) -> Callable[[], torch.Tensor]:
    """One optimizer step, which returns the loss on the device."""
    device, shape = target.device, (cfg.rows, cfg.tokens)
    if cfg.optimizer.optimizer.lr is None:
        cfg.optimizer.optimizer.lr = size_settings(target.hidden_size, None)["optimizer.optimizer.lr"]
    options = read_options(OptimizerOptions, cfg.optimizer)
    fused = {"fused": True} if options.fuses and device.type != "meta" else {}
    weights = [weight for group in drafter.param_groups() for weight in group.weights if weight.requires_grad]
    optimizer = options.build([{"params": weights}], **fused)
    objective = Objective(kl, partial(decay, rate=0.8), cfg.logits_rows, Kernels() if cfg.compiled else None)
    tokens = torch.randint(target.vocab_size, shape, device=device)
    mask = torch.ones(shape, dtype=torch.bool)
    taps = torch.randn(*shape, len(drafter.taps), target.hidden_size, device=device, dtype=target.dtype)
    last = torch.randn(*shape, target.hidden_size, device=device, dtype=target.dtype)
    anchors = cfg.rows * (cfg.tokens - 2)  # places with a next token to predict
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=cfg.precision == "bf16-mixed")

    def step() -> torch.Tensor:
        with mixed:
            batch = Batch(tokens, mask, taps, last)
            total, _ = objective(
                drafter.unroll(batch, target), last, target.head, drafter.aux_weights_at(1.0)
            )
        loss = total / anchors
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _flop(cfg: DictConfig, target: Target, drafter: Drafter) -> int:
    """Work of a step, counted uncompiled: what is compiled cannot be looked into."""
    eager: Any = OmegaConf.merge(cfg, {"compiled": False})
    step = optimizer_step(eager, target, drafter)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        step()
    return counter.get_total_flops()


def _measured(
    cfg: DictConfig, step: Callable[[], torch.Tensor], flop: int, device: torch.device
) -> dict[str, Any]:
    turns = []
    for _ in range(cfg.repeats):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(cfg.steps):
            step()
        synchronize(device)
        turns.append((time.perf_counter() - begin) / cfg.steps)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with waits(device) as waited:
        begin = time.perf_counter()
        step()
        host = time.perf_counter() - begin - waited.seconds
    peak_gib = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    ran = kernels(step, device)
    seconds, most = statistics.median(turns), ceilings(device)
    peak = named_peak(hardware(device))
    return {
        "step_ms": 1000 * seconds,
        "spread": [1000 * min(turns), 1000 * max(turns)],
        "tokens_per_second": cfg.rows * cfg.tokens / seconds,
        "host_ms": 1000 * host,
        "reads": waited.reads,
        "kernels": ran[0] if ran else None,
        "kernels_ms": 1000 * ran[1] if ran else None,
        "peak_gib": peak_gib,
        "flop": flop,
        "of_named_peak": flop / seconds / peak if peak else None,
        "of_measured_product": flop / seconds / most["bf16_flops"],
        **most,
    }


def _lines(card: Mapping[str, Any]) -> str:
    named = "" if card["of_named_peak"] is None else f", {card['of_named_peak']:.1%} of the card's peak"
    ran = "" if card["kernels"] is None else f", {card['kernels']} kernels ({card['kernels_ms']:.1f} ms)"
    return (
        f"{card['drafter']}, {card['rows']} x {card['tokens']} tokens: {card['step_ms']:.1f} ms a step "
        f"({span(card['spread'], 1)}), {card['tokens_per_second']:.0f} tokens/s\n"
        f"{card['flop'] / 1e12:.2f} TFLOP, {card['of_measured_product']:.1%} of a large bf16 product{named}\n"
        f"host {card['host_ms']:.1f} ms, {card['reads']} reads{ran}\n{card['hardware']}"
    )
