"""How fast rollouts are made: scripts/benchmark.py rollout."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from benchmarks.common import conditions, encode, load_drafter, load_inputs, machine
from decode.model.load import stop_tokens
from decode.model.target import Target
from distill.engines.base import InProcess, Request, SamplingParams
from distill.report.tables import grid
from distill.utils.atomic_files import write_json
from distill.utils.progress import bar
from drafters.registry import short_name


def rollouts(cfg: DictConfig, folder: Path) -> float:
    """Race batch sizes of the engine in this process, plain and with a drafter; a table, and `out` as JSON.

    Every setting answers the same prompts once a repeat, the settings taking turns.

    Returns:
        Tokens a second of the largest batch over those of the smallest, without a drafter.

    Raises:
        UserError: bad input.
    """
    del folder
    target, chat, train, _ = load_inputs(cfg)
    chosen = train[:: max(1, len(train) // cfg.count)][: cfg.count]
    requests = [Request(p.id, 0, ids) for p, ids in zip(chosen, encode(chat, chosen), strict=True)]
    law = SamplingParams({"temperature": cfg.temperature}, cfg.score.max_new_tokens, stop_tokens(target))
    engines = _engines(cfg, target)
    speeds: dict[tuple[str, int], list[float]] = {setting: [] for setting in engines}
    with (
        conditions(cfg, target) as found,
        bar(cfg.score.repeats * len(engines), "rollouts", "settings", leave=False) as shown,
    ):
        for _ in range(cfg.score.repeats):
            for (name, size), engine in engines.items():
                speeds[name, size].append(_speed(engine, requests, law))
                shown.update()
    rows = _rows(speeds)
    card = {"what": "rollout", "rows": rows, **found}
    write_json(Path(cfg.out), card)
    table = [
        [r["drafter"], str(r["batch_size"]), f"{r['tokens_per_second']:.0f}", f"{r['ratio']:.2f}x"]
        for r in rows
    ]
    print(grid(["drafter", "batch size", "tokens/s", "over the first"], table))
    print(f"T={cfg.temperature:g}, {card['dtype']}, {machine(card)}")
    plain = [row for row in rows if row["drafter"] == "none"]
    return plain[-1]["ratio"]


def _engines(cfg: DictConfig, target: Target) -> dict[tuple[str, int], InProcess]:
    engines = {("none", size): InProcess(target, size, cfg.seed) for size in cfg.batch_sizes}
    if cfg.checkpoint:
        drafter, plan = load_drafter(cfg.checkpoint, target), instantiate(cfg.decode)
        name = short_name(drafter)
        engines |= {
            (name, size): InProcess(target, size, cfg.seed, drafter, plan) for size in cfg.batch_sizes
        }
    return engines


def _speed(engine: InProcess, requests: Sequence[Request], law: SamplingParams) -> float:
    """Answer tokens a second, prompts and all."""
    start = time.perf_counter()
    count = sum(len(answer.tokens) for answer in engine(requests, law))
    return count / (time.perf_counter() - start)


def _rows(speeds: dict[tuple[str, int], list[float]]) -> list[dict[str, Any]]:
    """Medians, and the medians of what a repeat's settings have over its first."""
    first = next(iter(speeds.values()))
    return [
        {
            "drafter": name,
            "batch_size": size,
            "tokens_per_second": median(own),
            "ratio": median(a / b for a, b in zip(own, first, strict=True)),
        }
        for (name, size), own in speeds.items()
    ]
