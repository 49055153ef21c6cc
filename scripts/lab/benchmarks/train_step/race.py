"""Tokens per CPU second and peak memory of a training step: scripts/lab/benchmark.py train."""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from benchmarks.common import loads, span
from benchmarks.train_step.flops import products
from benchmarks.train_step.workers import HERE, Contender, rates, started_workers
from decode.errors import UserError
from decode.hardware import hardware
from distill.config.resolvers import device_of
from distill.config.target_size import size_settings
from distill.config.validate import check_ranges
from distill.scoring.tables import grid
from distill.utils.atomic_files import write_json
from distill.utils.progress import bar
from distill.utils.provenance import commit

OURS, THEIRS, GEMM = HERE / "ours.py", HERE / "speculators.py", HERE / "gemm.py"
HOW = "python -m venv spec && spec/bin/pip install speculators, then speculators=spec/bin/python"
# Hyperparameters of both sides; none changes the work of a step.
RECIPE = {"decay": 0.8, "clip": 0.5}
PRECISIONS = {
    "float32": "",
    "bfloat16": "_bf16",
}  # of a step, and what its name ends in; bfloat16 is autocast


def training(cfg: DictConfig, folder: Path) -> float:
    """Time our EAGLE-3 training step against that of `speculators`; print a table, write `out` as JSON.

    Args:
        cfg: composed from conf/lab/train.yaml.
        folder: unused; nothing is written but `out`.

    Returns:
        Our tokens per CPU second over theirs with half of the positions supervised; with
        `case=memory` the peak in MiB.

    Raises:
        UserError: bad input, or an environment without `speculators`.
    """
    del folder
    check_ranges(cfg)
    if device_of(cfg.trainer.accelerator) == "cuda":
        if cfg.case != "memory":
            raise UserError("trainer.accelerator=gpu: for case=memory alone; speeds are of one CPU core")
        if not torch.cuda.is_available():
            raise UserError("trainer.accelerator=gpu: torch finds no GPU here; leave trainer.accelerator=cpu")
    elif not Path("/proc/self/clear_refs").exists():
        raise UserError("benchmark train: memory is read from Linux's /proc, which is not here")
    draft_size, vocab_size = cfg.shape.draft_vocab_size, cfg.shape.vocab_size
    if draft_size > vocab_size:
        raise UserError(f"shape.draft_vocab_size={draft_size}: the target has shape.vocab_size={vocab_size}")
    if cfg.optimizer.optimizer._target_ != "torch.optim.AdamW":
        raise UserError("benchmark train: both sides step with AdamW; leave optimizer=adamw")
    return _memory(cfg) if cfg.case == "memory" else _speed(cfg)


def turns(tokens: int, turn: int) -> list[int]:
    """A loss mask: turns of the user and of the target, one after the other."""
    return [i // turn % 2 for i in range(tokens)]


def _case(cfg: DictConfig, loss_mask: Sequence[int], precision: str = "float32") -> dict[str, Any]:
    options_of_step = {
        "shape": OmegaConf.to_container(cfg.shape),
        "train_head": cfg.train_head,
        "gradient_checkpointing": cfg.gradient_checkpointing,
        "compiled": cfg.compiled,
        "precision": precision,
        "device": device_of(cfg.trainer.accelerator),
        "seed": cfg.seed,
        "peak": True,
    }
    options = OmegaConf.to_container(cfg.optimizer.optimizer)
    assert isinstance(options, dict)
    options = {name: value for name, value in options.items() if not str(name).startswith("_")}
    if options["lr"] is None:
        options["lr"] = size_settings(cfg.shape.hidden_size, None)["optimizer.optimizer.lr"]
    return RECIPE | options_of_step | {"optimizer": options, "loss_mask": list(loss_mask)}


def _product(cfg: DictConfig, dtype: str) -> Contender:
    case = {"size": cfg.gemm, "dtype": dtype, "seed": cfg.seed, "peak": False, "loss_mask": []}
    return Contender(f"gemm_{dtype}", GEMM, case, 2.0 * cfg.gemm**3)


def _python(cfg: DictConfig) -> str:
    if cfg.speculators is None:
        raise UserError(f"speculators: an environment of its own is needed; {HOW}")
    python = shutil.which(cfg.speculators)
    if python is None:
        raise UserError(f"speculators={cfg.speculators}: no such python; {HOW}")
    return python


def _speed(cfg: DictConfig) -> float:
    python = _python(cfg)
    masks = {"all": [1] * cfg.tokens, "half": turns(cfg.tokens, cfg.turn)}
    needed = {share: products(cfg.shape, mask, cfg.train_head) for share, mask in masks.items()}
    contenders = [
        Contender(f"{side}_{share}{ending}", builder, _case(cfg, mask, precision), cfg.tokens, interpreter)
        for precision, ending in PRECISIONS.items()
        for share, mask in masks.items()
        for side, builder, interpreter in (("ours", OURS, None), ("speculators", THEIRS, python))
    ]
    contenders += [_product(cfg, precision) for precision in PRECISIONS]
    with loads() as load, started_workers(contenders) as ready, bar(cfg.repeats, "racing", "turns") as shown:
        results = rates([worker for worker, _ in ready], cfg.steps, cfg.repeats, shown.update)
    ceilings = {precision: statistics.median(results[f"gemm_{precision}"]) for precision in PRECISIONS}
    answers = {worker.contender.name: answer for worker, answer in ready}
    rows = []
    for precision, share, side in product(PRECISIONS, masks, ("ours", "speculators")):
        ending = f"{share}{PRECISIONS[precision]}"
        row = _row(f"{side}_{ending}", results, answers) | {"share": share, "precision": precision}
        row["mflop"] = needed[share] / 1e6 / cfg.tokens
        work = row["tokens_per_cpu_second"] * row["mflop"] * 1e6
        row["ceiling_share"] = {dtype: work / ceiling for dtype, ceiling in ceilings.items()}
        row |= _over(results[row["name"]], results[f"speculators_{ending}"])
        rows.append(row)
    card = _card(cfg, "train", rows, load) | {
        "gemm_gflops": {dtype: rate / 1e9 for dtype, rate in ceilings.items()},
        "torch": {"ours": answers["ours_all"]["torch"], "speculators": answers["speculators_all"]["torch"]},
        "steps": cfg.steps,
        "repeats": cfg.repeats,
        "turn": cfg.turn,
    }
    write_json(Path(cfg.out), card)
    print(_table(card))
    return next(row["ratio"] for row in rows if row["name"] == "ours_half")


def _row(
    name: str, results: Mapping[str, Sequence[float]], answers: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    rates_of_step = results[name]
    return {
        "name": name,
        "tokens_per_cpu_second": statistics.median(rates_of_step),
        "spread": [min(rates_of_step), max(rates_of_step)],
        "peak_mib": answers[name]["peak_mib"],
    }


def _over(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Ratios within repeats, so that machine noise affects both sides."""
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    return {"ratio": statistics.median(ratios), "ratio_spread": [min(ratios), max(ratios)]}


def _memory(cfg: DictConfig) -> float:
    large = OmegaConf.merge({k: v for k, v in cfg.items() if k != "memory"}, cfg.memory)
    assert isinstance(large, DictConfig)
    contender = Contender("ours", OURS, _case(large, [1] * large.tokens), large.tokens)
    with loads() as load, started_workers([contender]) as [(_, answer)]:
        pass
    peak, block = answer["peak_mib"], large.tokens * large.shape.vocab_size * 4 / 2**20
    rows = [{"name": "ours", "peak_mib": peak, "block_mib": block}]
    card = _card(large, "train_memory", rows, load)
    write_json(Path(cfg.out), card)
    print(
        f"{peak:.0f} MiB above weights, gradients and optimizer; one fp32 block of {large.tokens} tokens x "
        f"{large.shape.vocab_size} logits has {block:.0f} MiB\n{card['hardware']}"
    )
    return peak


def _card(cfg: DictConfig, what: str, rows: list[dict[str, Any]], load: list[float]) -> dict[str, Any]:
    return {
        "what": what,
        "rows": rows,
        "shape": OmegaConf.to_container(cfg.shape),
        "tokens": cfg.tokens,
        "train_head": cfg.train_head,
        "gradient_checkpointing": cfg.gradient_checkpointing,
        "compiled": cfg.compiled,
        "threads": 1,
        "python": sys.version.split()[0],
        "hardware": hardware(torch.device(device_of(cfg.trainer.accelerator))),
        "load_average": load,
        "seed": cfg.seed,
        "commit": commit(),
    }


def _table(card: Mapping[str, Any]) -> str:
    lines = [
        [
            row["name"],
            f"{row['tokens_per_cpu_second']:.0f}",
            span(row["spread"], 0),
            f"{row['ratio']:.2f}x",
            span(row["ratio_spread"], 2),
            f"{row['peak_mib']:.0f}",
            f"{row['mflop']:.1f}",
            *(f"{share:.0%}" for share in row["ceiling_share"].values()),
        ]
        for row in card["rows"]
    ]
    head = ["step", "tokens/CPU s", "min..max", "ratio", "min..max", "peak MiB", "MFLOP/token"]
    head += [f"of {precision}" for precision in PRECISIONS]
    ceiling = ", ".join(f"{rate:.0f} GFLOP/s {dtype}" for dtype, rate in card["gemm_gflops"].items())
    return (
        f"{grid(head, lines)}\n"
        f"{card['tokens']} tokens, {card['shape']['depth']} unroll steps, AdamW included; _bf16: under "
        f"autocast; memory above weights, gradients and optimizer\n"
        f"ceiling: one thread's matrix product, {ceiling}\n"
        f"{card['hardware']}, load {span(card['load_average'], 2)}"
    )
