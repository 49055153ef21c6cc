"""What lossy rules gain over what they cost: scripts/lab/benchmark.py lossy checkpoint=..."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from omegaconf import DictConfig, open_dict

from claims.budgets import SVG
from decode.evaluation.quality import QUALITY_HEAD
from decode.evaluation.rows import Row
from decode.evaluation.scorecard import Scorecard, read_scorecard
from decode.verification.rule import changes_greedy
from distill.commands.score import score
from distill.config.read import checked_options
from distill.options.commands import ScoreCommandOptions
from distill.scoring.tables import markdown
from distill.utils.atomic_files import put


def curves(cfg: DictConfig, folder: Path) -> float:
    """Score a checkpoint with every setting of every rule; write a page and plots to `results`.

    Returns:
        The largest speedup.

    Raises:
        UserError: bad input.
    """
    del folder
    results = Path(cfg.results)
    results.mkdir(parents=True, exist_ok=True)
    shape = {"depth": cfg.decode.depth, "lossy": True}
    with open_dict(cfg):
        curves = cfg.pop("curves")
        cfg.pop("results")
        plans = [
            {**shape, **more, "rule": {"name": rule, **more.get("rule", {})}}
            for rule, steps in curves.items()
            for more in steps
        ]
        cfg.score.plans = [*cfg.score.plans, *plans]
        cfg.out = str(results / "score.json")
    score(checked_options(ScoreCommandOptions, cfg))
    card = read_scorecard(results / "score.json")
    changing = {row.rule for row in _changing(card) if row.lossy}
    rules = [rule for rule in curves if rule in changing]
    for rule in rules:
        _plot(card, rule, results / f"{rule}.svg")
    put(results / "README.md", page(card, rules))
    return max(row.speed for row in card.rows)


def page(card: Scorecard, rules: Sequence[str]) -> str:
    """Tables and plots as Markdown."""
    conditions, checkpoint = card.conditions, card.checkpoint
    parts = [
        "# Lossy rules, measured",
        f"{checkpoint.drafter} of step {checkpoint.step}; {conditions.prompts} held-out prompts, answers of "
        f"up to {conditions.max_new_tokens} tokens, seed {conditions.seed}, {conditions.dtype}, "
        f"{conditions.threads} thread, {conditions.hardware}, commit {checkpoint.commit}. tau is the "
        "decoder's count, speedup over plain decoding interleaved in one run. Rules that are lossless at T=0 "
        "have no rows there. [What the columns mean, and how to choose](../../../../docs/lossy.md).",
    ]
    for temperature in dict.fromkeys(row.temperature for row in card.rows):
        parts.append(f"## T={temperature:g}")
        rows = [row for row in _changing(card) if row.temperature == temperature]
        head = ["plan", "tau", "speedup", *QUALITY_HEAD]
        lines = [_line(row) for row in rows]
        parts.append(markdown([head, *lines]))
    parts += [f"## {rule}\n\n![speedup and tau over what changes]({rule}.svg)" for rule in rules]
    return "\n\n".join(parts) + "\n"


def _changing(card: Scorecard) -> list[Row]:
    """Rows of lossless plans, and of rules that change the text at the row's temperature."""
    return [row for row in card.rows if row.temperature or not row.lossy or changes_greedy(row.rule)]


def _line(row: Row) -> list[str]:
    low, high = row.tau_interval
    cells = row.quality.cells() if row.quality else ["", "0", "0", ""]
    return [row.decode, f"{row.tau:.2f} ({low:.2f}..{high:.2f})", row.text("speedup", "{:.2f}x"), *cells]


def _plot(card: Scorecard, rule: str, file: Path) -> None:
    """Speedup and tau of a rule over what it changes, by temperature; the lossless chain is at 0."""
    rows = [row for row in _changing(card) if row.rule == rule]
    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    with rc_context(rc=SVG):
        figure = Figure(figsize=(4.6 * len(temperatures), 3.2), layout="constrained")
        panels = figure.subplots(1, len(temperatures), squeeze=False)[0]
        for axes, temperature in zip(panels, temperatures, strict=True):
            exact = next(row for row in card.rows if row.temperature == temperature)
            points = [(0.0, exact), *((_cost(row), row) for row in rows if row.temperature == temperature)]
            known = sorted(((x, row) for x, row in points if x is not None), key=lambda point: point[0])
            places = [x for x, _ in known]
            axes.plot(places, [row.speed for _, row in known], "o-", label="speedup")
            axes.plot(places, [row.tau for _, row in known], "s--", label="tau")
            axes.set_xlabel("KL, nats a token" if temperature else "share of changed tokens")
            axes.set_title(f"{rule}, T={temperature:g}")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        panels[0].legend(frameon=False)
        figure.savefig(file, metadata={"Date": None})


def _cost(row: Row) -> float | None:
    """What a lossy row changes: KL, or at temperature 0 the share of changed tokens."""
    assert row.quality is not None
    return row.quality.kl if row.temperature else row.quality.changed
