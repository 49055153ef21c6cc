"""How fast rollouts are made, and what it is worth that rows join: scripts/lab/benchmark.py rollout."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple
from unittest import mock

from hydra.utils import instantiate
from omegaconf import DictConfig

from benchmarks.common import conditions, encode, load_drafter, load_inputs, machine
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.plan import Plan
from distill.engines.base import InProcess, Request, SamplingParams
from distill.rollouts.build import HELPING
from distill.scoring.tables import grid
from distill.utils.atomic_files import write_json
from distill.utils.progress import bar
from drafters.registry import short_name


def rollouts(cfg: DictConfig, folder: Path) -> float:
    """Race batch sizes of the engine in this process, plain and with a drafter; a table, and `out` as JSON.

    Every setting answers the same prompts once a repeat, the settings taking turns: rows join as others end,
    or, for comparison, one batch begins when all of another have ended. Beside the speed stand the target's
    passes, those over prompts included, and the share of answers that are those of the first setting.

    Returns:
        Tokens a second of the largest batch over those of the smallest, without a drafter.

    Raises:
        UserError: bad input.
    """
    del folder
    target, chat, train, _ = load_inputs(cfg)
    chosen = train[:: max(1, len(train) // cfg.count)][: cfg.count]
    requests = [Request(p.id, 0, ids) for p, ids in zip(chosen, encode(chat, chosen), strict=True)]
    sampling = SamplingParams({"temperature": cfg.temperature}, cfg.score.max_new_tokens, stop_tokens(target))
    engines = _engines(cfg, target)
    turns: dict[Setting, list[Turn]] = {setting: [] for setting in engines}
    with (
        conditions(cfg, target) as found,
        bar(cfg.score.repeats * len(engines), "rollouts", "settings", leave=False) as shown,
    ):
        for _ in range(cfg.score.repeats):
            for setting, engine in engines.items():
                whole = len(requests) if setting.join else setting.batch_size
                turns[setting].append(_turn(engine, requests, sampling, whole))
                shown.update()
    rows = _rows(turns)
    card = {"what": "rollout", "rows": rows, **found}
    write_json(Path(cfg.out), card)
    table = [[r["drafter"], str(r["batch_size"]), "yes" if r["join"] else "no", *_cells(r)] for r in rows]
    head = ["tokens/s", "over the first", "passes", "same answers"]
    print(grid(["drafter", "batch size", "rows join", *head], table))
    print(f"T={cfg.temperature:g}, {card['dtype']}, {machine(card)}")
    plain = [row for row in rows if row["drafter"] == "none"]
    return plain[-1]["ratio"]


class Setting(NamedTuple):
    """What is raced."""

    drafter: str
    batch_size: int
    join: bool


class Turn(NamedTuple):
    """What a setting did in a repeat."""

    speed: float  # answer tokens a second, prompts and all
    passes: int  # of the target
    answers: list[list[int]]


def _engines(cfg: DictConfig, target: Target) -> dict[Setting, InProcess]:
    settings = [(size, join) for size in cfg.batch_sizes for join in ((True, False) if size > 1 else (True,))]
    engines = {Setting("none", *s): InProcess(target, s[0], cfg.seed) for s in settings}
    if cfg.checkpoint:
        drafter = load_drafter(cfg.checkpoint, target)
        for plan in (instantiate(cfg.decode), HELPING):
            name = f"{short_name(drafter)}, {plan.name if isinstance(plan, Plan) else 'auto'}"
            engines |= {
                Setting(name, *s): InProcess(drafter.verifier(target), s[0], cfg.seed, drafter, plan)
                for s in settings
            }
    return engines


def _turn(engine: InProcess, requests: Sequence[Request], sampling: SamplingParams, whole: int) -> Turn:
    """Answer all requests, `whole` of them in a call, the shortest first."""
    requests = sorted(requests, key=lambda request: len(request.tokens))
    calls = [requests[first : first + whole] for first in range(0, len(requests), whole)]
    with mock.patch.object(engine.target, "extend", wraps=engine.target.extend) as extend:
        start = time.perf_counter()
        answers = [answer.tokens for part in calls for answer in engine(part, sampling)]
        seconds = time.perf_counter() - start
    return Turn(sum(map(len, answers)) / seconds, extend.call_count, answers)


def _cells(row: dict[str, Any]) -> list[str]:
    speed, ratio = f"{row['tokens_per_second']:.0f}", f"{row['ratio']:.2f}x"
    return [speed, ratio, str(row["passes"]), f"{row['same']:.0%}"]


def _rows(turns: dict[Setting, list[Turn]]) -> list[dict[str, Any]]:
    """Medians, and the medians of what a repeat's settings have over its first."""
    first = next(iter(turns.values()))
    return [
        {
            **setting._asdict(),
            "tokens_per_second": median(turn.speed for turn in own),
            "ratio": median(a.speed / b.speed for a, b in zip(own, first, strict=True)),
            "passes": own[-1].passes,  # with one repeat, those of choosing a plan included
            "same": fmean(a == b for a, b in zip(own[-1].answers, first[-1].answers, strict=True)),
        }
        for setting, own in turns.items()
    ]
