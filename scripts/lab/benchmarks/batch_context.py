"""How the gain changes with batch size and with context length: scripts/lab/benchmark.py batch | context."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from benchmarks.common import conditions, encode, load_drafter, load_inputs, machine
from decode.errors import UserError
from decode.evaluation.acceptance import round_counts
from decode.evaluation.timing_ab import DecodeTimings, time_interleaved
from decode.generation.generate import generate
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.plan import Plan, plan_of
from decode.sampling import Sampler
from distill.scoring.tables import grid
from distill.utils.atomic_files import write_json
from distill.utils.progress import bar
from drafters.base import Drafter

Ids = list[int]


def batch_sizes(cfg: DictConfig, folder: Path) -> float:
    """Race every plan against plain decoding at every batch size; a table, and `out` as JSON.

    Returns:
        The best speedup at the largest batch.

    Raises:
        UserError: bad input.
    """
    del folder
    target, drafter, prompts, plans = _read(cfg)

    def measure(advanced: Callable[[], None]) -> list[dict[str, Any]]:
        rows = []
        for size in cfg.batch_sizes:
            # A batch larger than the file decodes its prompts again, under other names.
            part = [prompts[i % len(prompts)] for i in range(max(size, len(prompts)))]
            tallies = _race(cfg, target, drafter, plans, part, size, cfg.score.max_new_tokens)
            rows += [{"batch_size": size} | row for row in _rows(plans, tallies)]
            advanced()
        return rows

    return _publish(cfg, target, "batch", ["batch_size"], len(cfg.batch_sizes), measure)


def context_lengths(cfg: DictConfig, folder: Path) -> float:
    """The same at every context length, for long and for short answers.

    The context before a prompt is the target's own text, so that it is a likely one.

    Returns:
        The best speedup at the longest context, for the last answer length.

    Raises:
        UserError: bad input, or a context that leaves no room for an answer.
    """
    del folder
    target, drafter, prompts, plans = _read(cfg)
    longest = max(cfg.contexts) + max(cfg.new_tokens)
    if target.max_positions is not None and longest > target.max_positions:
        raise UserError(
            f"contexts={list(cfg.contexts)} with new_tokens={list(cfg.new_tokens)}: up to {longest} tokens, "
            f"and the target's context is {target.max_positions}"
        )

    def measure(advanced: Callable[[], None]) -> list[dict[str, Any]]:
        rows = []
        options = {"sampler": Sampler(1.0), "seed": cfg.seed}
        own = generate(target, None, prompts, max_new_tokens=max(cfg.contexts), **options).outputs
        before = [p + o.tokens for p, o in zip(prompts, own, strict=True)]
        for length in cfg.contexts:
            part = [b[: max(length - len(p), 0)] + p for b, p in zip(before, prompts, strict=True)]
            for answer in cfg.new_tokens:
                tallies = _race(cfg, target, drafter, plans, part, 1, answer)
                rows += [{"context": length, "answer": answer} | row for row in _rows(plans, tallies)]
                advanced()
        return rows

    count = len(cfg.contexts) * len(cfg.new_tokens)
    return _publish(cfg, target, "context", ["context", "answer"], count, measure)


def _read(cfg: DictConfig) -> tuple[Target, Drafter, list[Ids], list[Plan]]:
    plans = [plan_of(shape) for shape in cfg.plans.values()]
    target, chat, _, held = load_inputs(cfg)
    drafter = load_drafter(cfg.checkpoint, target)
    target = drafter.verifier(target)
    target.tap(drafter.taps)
    return target, drafter, encode(chat, held[: cfg.score.prompts]), plans


def _race(
    cfg: DictConfig,
    target: Target,
    drafter: Drafter,
    plans: Sequence[Plan],
    prompts: Sequence[Ids],
    batch: int,
    max_new_tokens: int,
) -> list[DecodeTimings]:
    decode = partial(
        generate,
        target,
        sampler=Sampler(cfg.temperature),
        seed=cfg.seed,
        stop=stop_tokens(target),
        clock=time.perf_counter,
    )
    names = list(range(len(prompts)))
    repeats, every = cfg.score.repeats, [Plan(), *plans]
    return time_interleaved(
        decode, drafter, every, prompts, batch, repeats, max_new_tokens, names, lambda: None
    )


def _rows(plans: Sequence[Plan], tallies: Sequence[DecodeTimings]) -> list[dict[str, Any]]:
    plain = tallies[0]
    return [
        {
            "decode": plan.name,
            "tau": round_counts(tally.outputs).tau,
            "tokens_per_second": tally.speed,
            "speedup": tally.speed / plain.speed if plain.speed else 0.0,
            "speedup_with_prefill": tally.speed_with_prefill / plain.speed_with_prefill,
            "draft_share": tally.times.draft / tally.times.total if tally.times.total else 0.0,
            "verify_share": tally.times.verify / tally.times.total if tally.times.total else 0.0,
        }
        for plan, tally in zip([Plan(), *plans], tallies, strict=True)
    ]


def _publish(
    cfg: DictConfig,
    target: Target,
    what: str,
    columns: Sequence[str],
    count: int,
    measure: Callable[[Callable[[], None]], list[dict[str, Any]]],
) -> float:
    with (
        conditions(cfg, target) as found,
        bar(count, f"{what} sweep", "settings", leave=False) as shown,
    ):
        rows = measure(lambda: (shown.update(), None)[1])
    card = {"what": what, "rows": rows, "prompts": cfg.score.prompts, **found}
    write_json(Path(cfg.out), card)
    head = [*columns, "decode", "tau", "tokens/s", "speedup", "with prefill", "draft", "verify"]
    lines = [
        [
            *(str(row[name]) for name in columns),
            row["decode"],
            f"{row['tau']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}x",
            f"{row['speedup_with_prefill']:.2f}x",
            f"{100 * row['draft_share']:.0f}%",
            f"{100 * row['verify_share']:.0f}%",
        ]
        for row in rows
    ]
    print(grid(head, lines))
    print(f"T={cfg.temperature:g}, {card['dtype']}, {machine(card)}")
    last = [row for row in rows if all(row[name] == rows[-1][name] for name in columns)]
    return max(row["speedup"] for row in last)
