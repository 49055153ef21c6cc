"""A plot of acceptance length over CPU minutes of training, as SVG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.drafter_table.table import Line

SVG: Any = {
    "svg.hashsalt": "foredraft",
    "svg.fonttype": "none",
    "font.size": 9,
}  # the same file for the same results
MARKERS = "osD^v<>pPX*h"


def plot(lines: Sequence[Line], temperatures: Sequence[float], file: Path) -> None:
    """Write tau over CPU minutes, a panel for each temperature; drafters without training are level lines.

    Args:
        lines: of the table.
        temperatures: of the panels.
        file: an SVG.
    """
    with rc_context(rc=SVG):
        figure = Figure(figsize=(5.2 * len(temperatures), 5.4), layout="constrained")
        panels = figure.subplots(1, len(temperatures), squeeze=False)[0]
        for axes, temperature in zip(panels, temperatures, strict=True):
            _panel(axes, lines, temperature)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
        figure.savefig(file, metadata={"Date": None})


def _panel(axes: Axes, lines: Sequence[Line], temperature: float) -> None:
    arms: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        arms[line.arm].append(line)
    for number, (arm, points) in enumerate(sorted(arms.items())):
        colour, marker = f"C{number % 10}", MARKERS[number % len(MARKERS)]
        trained = sorted((point for point in points if point.steps), key=lambda point: point.minutes)
        if not trained:
            axes.axhline(points[0].tau(temperature).value, color=colour, linestyle=":", label=arm)
            continue
        taus = [point.tau(temperature) for point in trained]
        axes.errorbar(
            [point.minutes for point in trained],
            [tau.value for tau in taus],
            yerr=[[tau.value - tau.low for tau in taus], [tau.high - tau.value for tau in taus]],
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1,
            elinewidth=0.6,
            label=arm,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("CPU minutes of training")
    axes.set_ylabel(f"tau, T={temperature:g}")
    axes.grid(alpha=0.3)
