"""Which drafter accepts most after how much training: a table, and a plot of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from claims.cards import TEMPERATURES, Line
from claims.estimates import SeedNoise, difference, tau
from distill.scoring.tables import markdown

PLOT = "budgets.svg"
# The same file for the same results.
SVG: Any = {"svg.hashsalt": "foredraft", "svg.fonttype": "none", "font.size": 9}


def best_within(
    lines: Sequence[Line], minutes: float, temperature: float, noise: SeedNoise | None
) -> tuple[Line, list[Line]]:
    """The line with the largest tau among those of at most so many CPU minutes, and those level with it.

    Of each arm the line with its largest tau counts. A line is level where the interval of the difference
    contains zero, or where the two cannot be paired.

    Args:
        lines: of one folder; at least one of them is not trained.
        minutes: of CPU time, for the training steps.
        temperature: of the sampler.
        noise: of seeds.
    """
    found: dict[str, tuple[float, Line]] = {}
    for line in lines:
        value = tau(line, temperature)
        if value and line.minutes <= minutes and value.value > found.get(line.arm, (0.0,))[0]:
            found[line.arm] = value.value, line
    ordered = [line for _, line in sorted(found.values(), key=lambda one: -one[0])]
    first, level = ordered[0], []
    for other in ordered[1:]:
        lead = difference(first, other, temperature, noise)
        if lead is None or lead.low <= 0:
            level.append(other)
    return first, level


def budget_table(
    lines: Sequence[Line], budgets: Sequence[float], noise: Mapping[float, SeedNoise | None]
) -> str:
    """A row for each budget: at each temperature the longest acceptance, and what is level with it."""
    head = ["CPU minutes"]
    for temperature in TEMPERATURES:
        head += [f"longest, T={temperature:g}", "tau", "not distinguished"]
    rows = []
    for minutes in budgets:
        row = [f"{minutes:g}"]
        for temperature in TEMPERATURES:
            first, level = best_within(lines, minutes, temperature, noise[temperature])
            row += [_name(first), format(tau(first, temperature), ".2f"), ", ".join(map(_name, level))]
        rows.append(row)
    return markdown([head, *rows])


def plot_budgets(lines: Sequence[Line], file: Path) -> None:
    """Draw tau over CPU minutes, a panel for each temperature; untrained drafters are horizontal lines."""
    arms = list(dict.fromkeys(line.arm for line in lines))
    with rc_context(rc=SVG):
        figure = Figure(figsize=(9.2, 4.0), layout="constrained")
        panels = figure.subplots(1, len(TEMPERATURES), squeeze=False)[0]
        for axes, temperature in zip(panels, TEMPERATURES, strict=True):
            for arm in arms:
                known = [(line.minutes, tau(line, temperature)) for line in lines if line.arm == arm]
                points = sorted((minutes, value.value) for minutes, value in known if value)
                if points[0][0]:
                    axes.plot(*zip(*points, strict=True), "o-", label=arm, markersize=3)
                else:
                    axes.axhline(points[0][1], linestyle=":", color="gray")
                    axes.annotate(
                        arm, (1.0, points[0][1]), xycoords=("axes fraction", "data"), ha="right", va="bottom"
                    )
            axes.set_xscale("log")
            low, high = axes.get_xlim()
            ticks = [2.0**n for n in range(-6, 12) if low <= 2.0**n <= high]
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            axes.set_xlabel("CPU minutes of training")
            axes.set_ylabel("tau")
            axes.set_title(f"T={temperature:g}")
            axes.grid(alpha=0.3)
        panels[0].legend(frameon=False, fontsize=7)
        figure.savefig(file, metadata={"Date": None})


def _name(line: Line) -> str:
    return f"{line.arm}, {line.steps} steps" if line.steps else line.arm
