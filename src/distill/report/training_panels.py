"""Panels of a report about training: loss, acceptance over steps, gradient norm and speed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from markupsafe import Markup

from distill.report import page
from distill.report.history import Curve, History
from distill.report.page import paint

DEPTHS = 8  # maximum number of plotted unroll depths


def axes(x: str, y: str, **layout: object) -> dict[str, object]:
    """Layout with titles of both axes."""
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}, **layout}


def tau(run: History) -> Markup | None:
    """Acceptance of every scored checkpoint."""
    steps = sorted(run.cards)
    if len(steps) < 2:
        return None
    rows = [run.cards[s].compared for s in steps]
    figure = go.Figure()
    replays = [(s, r.replay) for s, r in zip(steps, rows, strict=True) if r.replay]
    if replays:
        value = [r.tau for _, r in replays]
        low, high = zip(*(r.tau_interval for _, r in replays), strict=True)
        figure.add_scatter(
            x=[s for s, _ in replays],
            y=value,
            name="tau, replayed, 95 % interval",
            mode="lines+markers",
            line={"color": paint("blue"), "width": 2},
            marker={"size": [11 if s == run.best else 6 for s, _ in replays], "opacity": 1},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": np.subtract(high, value),
                "arrayminus": np.subtract(value, low),
                "thickness": 1.2,
                "width": 4,
                "color": paint("blue"),
            },
            hovertemplate="step %{x}<br>tau %{y:.3f}<extra>replayed</extra>",
        )
    figure.add_scatter(
        x=steps,
        y=[r.tau for r in rows],
        name="tau_decoded, fewer prompts",
        mode="markers",
        marker={"color": paint("orange"), "symbol": "diamond-open", "size": 9, "line": {"width": 2}},
        hovertemplate="step %{x}<br>tau %{y:.3f}<extra>decoded</extra>",
    )
    figure.update_layout(axes("optimizer step", "tau (tokens per target pass)"))
    caption = (
        "Acceptance of every save point on held-out prompts; the large mark is the best. "
        "A curve that still rises would gain from more steps."
    )
    return page.section("Tau over training", page.plot(figure, caption), caption=caption)


def loss(run: History) -> Markup | None:
    """The training loss."""
    caption = (
        "The training objective. If it stays flat, a smaller learning rate or a larger drafter helps more."
    )
    return _curve(run, "loss", "Loss over training", "loss", caption)


def curves(run: History) -> list[Markup | None]:
    """Acceptance by depth, gradient norm and speed; preceded by the loss if the run has no scores."""
    loss_panel = [] if run.cards else [loss(run)]
    return [
        *loss_panel,
        _depths(run),
        _curve(
            run,
            "grad_norm",
            "Gradient norm",
            "L2 norm before clipping",
            "Peaks that come back, or a slow climb, are the first sign of a learning rate that is too large.",
        ),
        _curve(
            run,
            "lr",
            "Learning rate",
            "learning rate",
            "Of the group of weights with the largest: warm-up, then cosine decay.",
        ),
        _curve(
            run,
            "tokens_per_second",
            "Training speed",
            "tokens/s",
            "Tokens of training rows a second, waiting for data included. Dips are waits, or a busy machine.",
        ),
    ]


def _depths(run: History) -> Markup | None:
    names = {j: f"alpha_{j}" for j in range(1, DEPTHS + 1)}
    by_depth = [(j, run.curves[name]) for j, name in names.items() if name in run.curves]
    if not by_depth:
        return None
    figure = go.Figure()
    for (j, curve), colour in zip(by_depth, page.SERIES * 2, strict=False):
        steps, values, _ = smoothed(curve)
        figure.add_scatter(
            x=steps,
            y=values,
            name=f"depth {j}",
            mode="lines",
            line={"color": paint(colour), "width": 2, "dash": "solid" if j <= len(page.SERIES) else "dot"},
            hovertemplate="step %{x}<br>%{y:.3f}<extra>depth " + str(j) + "</extra>",
        )
    figure.update_layout(axes("optimizer step", "1 - total variation"))
    caption = (
        "Overlap of the drafter's distribution with the target's, at each depth of the unroll, on training "
        "rows: the chance that a sampled token would be accepted at temperature 1."
    )
    return page.section("Acceptance by depth in training", page.plot(figure, caption), caption=caption)


def _curve(run: History, name: str, title: str, unit: str, caption: str) -> Markup | None:
    curve = run.curves.get(name)
    if not curve or len(curve[0]) < 2:
        return None
    steps, values, window = smoothed(curve)
    figure = go.Figure()
    # Shown behind the mean; short runs have no mean.
    style = {"line": {"color": paint("grey"), "width": 1}, "opacity": 0.55, "mode": "lines"}
    if window == 1:
        style = {"line": {"color": paint("blue"), "width": 2}, "mode": "lines+markers"}
    figure.add_scatter(
        x=curve[0],
        y=curve[1],
        name="as logged",
        **style,
        hovertemplate="step %{x}<br>%{y:.4g}<extra>as logged</extra>",
    )
    if window > 1:
        figure.add_scatter(
            x=steps,
            y=values,
            name=f"mean of {window}",
            mode="lines",
            line={"color": paint("blue"), "width": 2},
            hovertemplate="step %{x}<br>%{y:.4g}<extra>mean of " + str(window) + "</extra>",
        )
    figure.update_layout(axes("optimizer step", unit), showlegend=True)  # show the legend even for one line
    return page.section(title, page.plot(figure, caption), caption=caption)


def smoothed(curve: Curve) -> tuple[Sequence[float], Sequence[float], int]:
    """Steps, moving average at each step, and its window."""
    steps, values = curve
    window = max(1, len(values) // 16)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    last = np.arange(1, len(values) + 1)
    begin = np.maximum(last - window, 0)
    return steps, ((sums[last] - sums[begin]) / (last - begin)).tolist(), window
