"""A Markdown table of the results, one line for all seeds of an arm."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

from scipy import stats

from benchmarks.drafter_table.arms import Run
from decode.evaluation.scorecard import Row, Scorecard
from distill.report.compare import draft_ms

LEVELS = 4
HEAD = [
    *("drafter", "steps", "seeds", "tau, T=0", "tau, T=1", *(f"s_{j}" for j in range(1, LEVELS + 1))),
    *("speedup", "draft, ms", "CPU minutes", "parameters", "precision", "commit"),
]


class Result(NamedTuple):
    """A finished run."""

    run: Run
    card: Scorecard


def table(results: Sequence[Result], temperatures: Sequence[float] = (0.0, 1.0)) -> str:
    """The table, the longest acceptance first; a tau of several seeds has the interval of their mean."""
    groups: dict[tuple[str, int], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.run.arm, result.run.steps].append(result)
    lines = sorted(groups.values(), key=lambda group: -_tau(group, temperatures[0])[0])
    cells = [_cells(group, temperatures) for group in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in [HEAD, ["---"] * len(HEAD), *cells])


def _row(card: Scorecard, temperature: float) -> Row:
    return next(row for row in card.rows if row.temperature == temperature and row.nodes)


def _tau(group: Sequence[Result], temperature: float) -> tuple[float, tuple[float, float]]:
    """Mean over seeds; of one seed the interval over prompts, of several that of the mean (t)."""
    parts = [_row(result.card, temperature).acceptance for result in group]
    value = mean(part.tau for part in parts)
    if len(parts) == 1:
        return value, (parts[0].tau_interval[0], parts[0].tau_interval[1])
    error = stdev(part.tau for part in parts) / math.sqrt(len(parts))
    wide = float(stats.t.ppf(0.975, len(parts) - 1)) * error
    return value, (value - wide, value + wide)


def _cells(group: Sequence[Result], temperatures: Sequence[float]) -> list[str]:
    first, checkpoint = group[0], group[0].card.checkpoint
    taus = [_tau(group, temperature) for temperature in temperatures]
    rows = [_row(result.card, temperatures[0]) for result in group]
    shares = [row.acceptance.survival[:LEVELS] for row in rows]
    survival = [mean(column) for column in zip(*shares, strict=True)]
    minutes = [one.card.checkpoint.train_cpu_seconds or 0.0 for one in group]
    return [
        first.run.arm,
        str(first.run.steps or ""),
        str(len(group)),
        *(f"{value:.2f} ({low:.2f}..{high:.2f})" for value, (low, high) in taus),
        *(f"{share:.2f}" for share in survival),
        *("-" for _ in range(LEVELS - len(survival))),
        f"{mean(row.speed for row in rows):.2f}x",
        f"{mean(map(draft_ms, rows)):.1f}",
        f"{mean(minutes) / 60:.1f}" if first.run.steps else "",
        f"{checkpoint.parameters / 1e6:.2f} M" if checkpoint.parameters else "",
        ", ".join(dict.fromkeys(one.card.checkpoint.train_precision for one in group)),
        ", ".join(dict.fromkeys(one.card.checkpoint.commit[:7] for one in group)),
    ]


def page(results: Sequence[Result], left_out: Sequence[str]) -> str:
    """The table as a page, with its conditions and what is not in it."""
    cards = [result.card for result in results]
    plans = dict.fromkeys(_row(card, 0.0).decode for card in cards)
    replayed = dict.fromkeys(str(len(_row(card, 0.0).counts.tokens)) for card in cards)
    machines = dict.fromkeys(card.conditions.hardware for card in cards)
    dtypes = dict.fromkeys(card.conditions.dtype for card in cards)
    notes = [
        f"{', '.join(plans)}, match rule, {', '.join(dtypes)}. tau and s_j (T=0): replayed on the target's "
        f"answers to {', '.join(replayed)} held-out prompts; the interval is 95 %, of one seed over prompts, "
        "of several that of their mean (Student's t). Speedup over plain decoding, T=0, batch 1, on a "
        "machine that may have been busy. CPU minutes: of the training steps.",
        f"Machines: {'; '.join(machines)}.",
        *left_out,
    ]
    return "\n\n".join(["# Every drafter, measured", table(results), *notes]) + "\n"
