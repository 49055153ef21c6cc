"""scripts/lab/benchmark.py regret: how much slower the advised draft is than the fastest of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from benchmarks.common import conditions, load_drafter, load_inputs, machine
from decode.errors import UserError
from decode.evaluation.estimates import DRAWS
from decode.evaluation.replay import Rollout
from decode.evaluation.timing_ab import DecodeTimings, time_interleaved
from decode.generation.generate import generate
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.plan import Plan
from decode.planning.auto import Auto
from decode.planning.round_timing import clock_of
from decode.sampling import Sampler
from distill.commands.advise import candidates
from distill.config.validate import refused
from distill.rollouts.heldout import held_out_answers
from distill.scoring.tables import grid
from distill.utils.atomic_files import write_json
from distill.utils.progress import bar
from drafters.base import Drafter

Race = Callable[[Sequence[Plan], int, str], list[list[float]]]


def regrets(cfg: DictConfig, folder: Path) -> float:
    """At every batch size: choose, sweep all, then race the choice and the sweep's two fastest.

    The choice is made on answers to other prompts than those that are decoded.

    Args:
        cfg: composed from conf/lab/regret.yaml.
        folder: unused; nothing is written but `out`.

    Returns:
        The largest regret.

    Raises:
        UserError: bad input, or too few held-out prompts.
    """
    del folder
    options = cfg.score
    target, chat, _, held = load_inputs(cfg)
    drafter = load_drafter(cfg.checkpoint, target)
    target = drafter.verifier(target)
    target.tap(drafter.taps)
    if len(held) <= options.prompts:
        raise UserError(
            f"regret: {len(held)} held-out prompts, and score.prompts={options.prompts} of them race"
        )
    with refused():
        sampler = Sampler(cfg.temperature)
        proposals = [p for p in cfg.proposals if p == "fixed" or cfg.temperature]
        auto = Auto(
            candidates(cfg.chains, cfg.trees, cfg.widths, cfg.confidences, proposals),
            adapt=cfg.adapt,
            repeats=cfg.repeats,
        )
    new, root = options.max_new_tokens, Path(cfg.answers)
    rollouts = held_out_answers(target, chat, held, sampler, new, cfg.seed, root)
    prompts = [r.prompt for r in rollouts[: options.prompts]]
    rows = []
    with conditions(cfg, target) as found:
        for batch in cfg.batch_sizes:
            race = _racer(cfg, target, drafter, prompts, sampler, batch)
            rows.append(_row(auto, target, drafter, rollouts[options.prompts :], sampler, batch, race, cfg))
    clock = clock_of(target).__name__
    card = {"what": "regret", "rows": rows, "clock": clock, "prompts": len(prompts), **found}
    write_json(Path(cfg.out), card)
    print(_described(card))
    return max(row["regret"] for row in rows)


def _racer(
    cfg: DictConfig,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    sampler: Sampler,
    batch: int,
) -> Race:
    """(plans, repeats, what) -> tokens a second of each plan in each repeat."""
    decode = partial(
        generate, target, sampler=sampler, seed=cfg.seed, stop=stop_tokens(target), clock=clock_of(target)
    )
    names = list(range(len(prompts)))

    def race(plans: Sequence[Plan], repeats: int, what: str) -> list[list[float]]:
        speeds: list[list[float]] = [[] for _ in plans]
        total = repeats * -(-len(prompts) // batch)
        with bar(total, f"{what}, batch {batch}", "batches", leave=False) as shown:
            for _ in range(repeats):
                tallies: list[DecodeTimings] = time_interleaved(
                    decode, drafter, plans, prompts, batch, 1, cfg.score.max_new_tokens, names,
                    lambda: (shown.update(), None)[1],
                )  # fmt: skip
                for own, tally in zip(speeds, tallies, strict=True):
                    own.append(tally.speed)
        return speeds

    return race


def _row(
    auto: Auto,
    target: Target,
    drafter: Drafter,
    rollouts: Sequence[Rollout],
    sampler: Sampler,
    batch: int,
    race: Race,
    cfg: DictConfig,
) -> dict[str, Any]:
    options = {"max_new_tokens": cfg.score.max_new_tokens, "stop": stop_tokens(target), "seed": cfg.seed}
    chosen, curve = auto.choose(target, drafter, rollouts, sampler, batch, **options)
    predicted = {row["decode"]: row["speedup"] for row in curve}
    plans = [p for p in auto.plans if isinstance(p, Plan) and p.name in predicted]  # that it can draft
    swept = [float(np.median(own)) for own in race(plans, cfg.sweeps, "sweep")]
    best = [plans[i] for i in np.argsort(swept)[::-1][:2]]
    runners = list(dict.fromkeys([chosen, *best]))
    found = dict(zip(runners, race(runners, cfg.score.repeats, "race"), strict=True))
    others = []
    for plan in best:
        ratios = [b / c for b, c in zip(found[plan], found[chosen], strict=True)]
        others.append({"decode": plan.name, "ratio": float(np.median(ratios)), "interval": spread(ratios)})
    worst = max(others, key=lambda one: one["ratio"])
    measured = {plan.name: speed / swept[0] for plan, speed in zip(plans, swept, strict=True)}
    return {
        "batch_size": batch,
        "choice": chosen.name,
        "predicted_speedup": predicted[chosen.name],
        "best": others,
        "regret": worst["ratio"] - 1,
        "regret_interval": [end - 1 for end in worst["interval"]],
        "sweep": [{"decode": n, "measured": s, "predicted": predicted[n]} for n, s in measured.items()],
        "error": float(np.median([abs(predicted[n] / s - 1) for n, s in measured.items()])),
    }


def spread(ratios: Sequence[float]) -> list[float]:
    """95 % bootstrap interval of the median, over repeats."""
    values = np.array(ratios)
    chosen = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    low, high = np.quantile(np.median(values[chosen], axis=1), (0.025, 0.975))
    return [float(low), float(high)]


def _described(card: dict[str, Any]) -> str:
    texts = []
    for row in card["rows"]:
        lines = [[s["decode"], f"{s['predicted']:.2f}x", f"{s['measured']:.2f}x"] for s in row["sweep"]]
        low, high = row["regret_interval"]
        against = "; ".join(
            "{} {:.3f} ({:.3f}..{:.3f})".format(one["decode"], one["ratio"], *one["interval"])
            for one in row["best"]
        )
        texts += [
            f"batch {row['batch_size']}, over plain decoding",
            grid(["decode", "predicted", "swept"], lines),
            f"half of the predictions are within {row['error']:.1%} of the sweep",
            f"chosen: {row['choice']}. Speed of the sweep's two fastest over its: {against}",
            f"regret {row['regret']:.1%} ({low:.1%}..{high:.1%})\n",
        ]
    texts.append(
        f"T={card['temperature']:g}, {card['dtype']}, {card['prompts']} prompts, {card['repeats']} "
        f"repeats of the race, {card['clock']}; {machine(card)}"
    )
    return "\n".join(texts)
