"""Panels of a report about time: a round's parts, and speed over the batch size."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from markupsafe import Markup

from distill.report import page
from distill.report.page import paint
from distill.report.score_panels import Card
from distill.report.training_panels import axes

SETTINGS = 6  # whose time is drawn, the first ones


def round_times(row: Card) -> dict[str, float]:
    """Milliseconds of a round's parts, and of plain decoding of as many tokens."""
    whole = 1000 * row["tpot"] * row["tau"]
    parts = {name: whole * row[f"{name}_share"] for name in ("draft", "verify", "other")}
    return parts | {"plain": 1000 * row["tau"] * row["batch_size"] / row["plain_tokens_per_second"]}


def shares(card: Card) -> Markup | None:
    """Where a round's time goes, beside what plain decoding would take."""
    rows = [r for r in card["rows"] if r.get("plain_tokens_per_second") and r.get("tpot")][:SETTINGS]
    if not rows:
        return None
    times = [round_times(r) for r in rows]
    names = _settings_named(rows)
    ours = [(page.label(n) + "<br>" if n else "") + "a round" for n in names]
    theirs = [(page.label(n) + "<br>" if n else "") + "plain decoding,<br>as many tokens" for n in names]
    figure = go.Figure()
    for part, colour, what in (
        ("draft", "orange", "drafter"),
        ("verify", "blue", "target's pass"),
        ("other", "grey", "other"),
    ):
        figure.add_bar(
            y=ours,
            x=[t[part] for t in times],
            name=what,
            orientation="h",
            marker={"color": paint(colour)},
            hovertemplate="%{x:.2f} ms<extra>" + what + "</extra>",
        )
    figure.add_bar(
        y=theirs,
        x=[t["plain"] for t in times],
        showlegend=False,
        orientation="h",
        marker={"color": paint("took"), "line": {"color": paint("blue"), "width": 1.5}},
        hovertemplate="%{x:.2f} ms<extra>plain decoding</extra>",
    )
    order = [name for pair in zip(ours, theirs, strict=True) for name in pair]
    figure.update_layout(axes("milliseconds", ""), barmode="stack", bargap=0.35)
    figure.update_yaxes(categoryorder="array", categoryarray=order, autorange="reversed", showgrid=False)
    says = (
        "One round of drafting and verifying, above what plain decoding takes for the tokens that the round "
        "settles. The upper bar has to be the shorter one; its parts say what to make cheaper."
    )
    height = 130 + 62 * len(rows)
    split = ", ".join(f"{k} {100 * card[f'{k}_share']:.0f} %" for k in ("draft", "verify", "other"))
    return page.section(
        "Time of a round",
        page.plot(figure, says, max(height, 200)),
        Markup('<p class="note">{}</p>').format(f"Headline: {split} of decoding time."),
        says=says,
    )


def batches(card: Card) -> Markup | None:
    """Speedup over the batch size, where several were scored."""
    curves: dict[str, list[Card]] = {}
    for row in card["rows"]:
        curves.setdefault(f"{row['decode']}, T={row['temperature']:g}", []).append(row)
    curves = {k: sorted(v, key=lambda r: r["batch_size"]) for k, v in curves.items() if len(v) > 1}
    if not curves:
        return None
    figure = go.Figure()
    for (name, rows), colour in zip(curves.items(), page.SERIES * 4, strict=False):
        figure.add_scatter(
            x=[str(r["batch_size"]) for r in rows],
            y=[r["speedup"] for r in rows],
            name=page.label(name),
            mode="lines+markers",
            line={"color": paint(colour), "width": 2},
            customdata=[[r["tokens_per_second"], r["plain_tokens_per_second"]] for r in rows],
            hovertemplate="batch %{x}: %{y:.2f}x<br>%{customdata[0]:.0f} against "
            "%{customdata[1]:.0f} tokens/s<extra></extra>",
        )
    figure.add_hline(y=1, line={"color": paint("grey"), "width": 1, "dash": "dash"})
    figure.update_layout(axes("batch size (texts decoded together)", "speedup over plain decoding"))
    figure.update_xaxes(type="category")
    figure.update_yaxes(rangemode="tozero")
    says = (
        "Where a line falls below 1 (dashed), drafting costs more than it gives. Larger batches leave the "
        "target less idle arithmetic for verifying drafts, so that lines fall to the right."
    )
    return page.section("Speedup by batch size", page.plot(figure, says), says=says)


def _settings_named(rows: Sequence[Card]) -> list[str]:
    """As short as tells them apart."""
    if len(rows) == 1:
        return [""]
    laws = [f"T={r['temperature']:g}, batch {r['batch_size']}" for r in rows]
    plans = [r["decode"] for r in rows]
    short = [f"{p.split(' (')[0]}, {law}" for p, law in zip(plans, laws, strict=True)]
    full = [f"{p}, {law}" for p, law in zip(plans, laws, strict=True)]
    return short if len(set(short)) == len(rows) else full
