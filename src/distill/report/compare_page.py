"""The page of foredraft compare: the table and plots of speedup, drafting time and survival."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import plotly.graph_objects as go
from markupsafe import Markup

from decode.evaluation.rows import Row
from distill.report import page
from distill.scoring.compare import Choice, Scored, comparison, draft_ms, in_order, machines
from distill.scoring.paired import speedup

DASHES = ("solid", "dot", "dash", "dashdot")
HIGH, ROW = 360, 26  # pixels of a plot, and of a bar


def page_of(scored: Sequence[Scored], choice: Choice) -> str:
    """Build the HTML document.

    Raises:
        UserError: a run was not scored at this choice.
    """
    table = comparison(scored, choice)
    ordered = in_order(scored, choice)
    rows = [s.rows(choice)[0] for s in ordered]
    names = [s.name for s in ordered]
    first = choice.temperatures[0]
    setting = f"T={first:g}, batch {choice.batch}"
    batches = _batches(ordered, choice)
    timed = [i for i, row in enumerate(rows) if row.speedup is not None]  # engines decoded the others
    here = [names[i] for i in timed], [rows[i] for i in timed]
    parts = [
        page.section(
            "All of them",
            page.table(table.head, table.lines, texts=table.head.index("decode") + 1, sortable=True),
            page.details("What was measured, and where", *map(page.prose, table.notes), opened=True),
            caption="Click a heading to sort by it.",
            wide=True,
        ),
        *(_speeds(*here, setting) if timed else []),
        page.section(
            "Survival",
            page.plot(_survival(names, rows), f"Chance to accept j tokens, by j, {setting}", HIGH),
            caption=f"Share of rounds that accept at least j draft tokens, T={first:g}.",
        ),
    ]
    if batches:
        parts.append(
            page.section(
                "Batch",
                page.plot(batches, f"Speedup by batch size, T={first:g}", HIGH),
                caption=f"Speedup at T={first:g} with the fastest plan that was scored at each batch size"
                + (f" ({choice.decode})." if choice.decode else "."),
            )
        )
    if categories := _by_category(ordered, rows):
        head, lines = categories
        parts.append(
            page.section(
                "Kinds of prompts",
                page.table(head, lines, sortable=True),
                caption=f"tau by category at T={first:g}, and behind it the number of prompts.",
                wide=True,
            )
        )
    return page.page("Drafters compared", parts, "; ".join(machines([s.card for s in ordered])))


def _speeds(names: Sequence[str], rows: Sequence[Row], setting: str) -> list[Markup]:
    """Plots of drafters that the decoder ran and timed."""
    return [
        page.section(
            "Speedup",
            page.plot(
                _bars(names, rows), f"Speedup of each drafter, {setting}", max(90 + ROW * len(names), HIGH)
            ),
            caption=f"Over plain decoding, {setting}. Left of 1 a drafter costs more than it gives.",
        ),
        page.section(
            "What drafting costs",
            page.plot(_costs(names, rows), f"Acceptance length against drafting time, {setting}", HIGH),
            caption="Tokens a target pass against the milliseconds that a round's draft took: further up is "
            "better, further left is cheaper.",
        ),
    ]


def _bars(names: Sequence[str], rows: Sequence[Row]) -> go.Figure:
    """Bars of speedup, sorted, with intervals if available."""
    values = [speedup(row) for row in rows]
    figure = go.Figure(
        go.Bar(
            x=[v.value for v in values],
            y=[page.label(name) for name in names],
            orientation="h",
            marker={"color": page.paint("blue")},
            error_x={
                "type": "data",
                "array": [v.interval and v.interval[1] - v.value for v in values],
                "arrayminus": [v.interval and v.value - v.interval[0] for v in values],
                "color": page.paint("ink"),
                "thickness": 1.5,
                "width": 0,
            },
            text=[f"{v.value:.2f}x" for v in values],
            textposition="inside",
            insidetextanchor="start",
            textfont={"color": page.paint("card")},
            hovertext=[page.label(f"{n}: {v.text('{:.2f}x')}") for n, v in zip(names, values, strict=True)],
            hoverinfo="text",
        )
    )
    figure.add_vline(x=1, line={"color": page.paint("ink"), "width": 1, "dash": "dot"})
    figure.update_xaxes(title={"text": "speedup"}, rangemode="tozero")
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def _costs(names: Sequence[str], rows: Sequence[Row]) -> go.Figure:
    figure = go.Figure()
    costs = [draft_ms(row) for row in rows]
    rank = {cost: i for i, cost in enumerate(sorted(costs))}
    for name, row, cost, (colour, _) in zip(names, rows, costs, _styles(), strict=False):
        tau, (low, high) = row.acceptance.tau, row.acceptance.tau_interval
        figure.add_scatter(
            x=[cost],
            y=[tau],
            error_y={"type": "data", "array": [high - tau], "arrayminus": [tau - low], "thickness": 1},
            mode="markers+text",
            name=page.label(name),
            text=[page.label(name)],
            textposition=f"{('top', 'bottom')[rank[cost] % 2]} right",  # keeps names of neighbours apart
            cliponaxis=False,
            marker={"color": colour, "size": 9},
            hovertemplate="%{text}<br>%{x:.2f} ms, tau %{y:.2f}<extra></extra>",
        )
    figure.update_layout(showlegend=False)
    figure.update_xaxes(title={"text": "ms of drafting a round"}, range=[0, 1.2 * max(costs) or 1])
    figure.update_yaxes(title={"text": "tau"})
    return figure


def _survival(names: Sequence[str], rows: Sequence[Row]) -> go.Figure:
    figure = go.Figure()
    for name, row, (colour, dash) in zip(names, rows, _styles(), strict=False):
        survival = row.acceptance.survival
        figure.add_scatter(
            x=list(range(1, len(survival) + 1)),
            y=survival,
            mode="lines+markers",
            name=page.label(name),
            line={"color": colour, "dash": dash, "width": 2},
            hovertemplate="%{y:.2f} accept %{x} or more",
        )
    figure.update_xaxes(title={"text": "draft tokens"}, dtick=1)
    figure.update_yaxes(title={"text": "share of rounds"}, rangemode="tozero")
    return figure


def _batches(ordered: Sequence[Scored], choice: Choice) -> go.Figure | None:
    """Speedup of every run by batch size; None if all were scored at one size."""
    figure, first = go.Figure(), choice.temperatures[0]
    sizes = set()
    for scored, (colour, dash) in zip(ordered, _styles(), strict=False):
        best = scored.by_batch(first, choice.decode)
        sizes |= best.keys()
        figure.add_scatter(
            x=list(best),
            y=[row.speedup for row in best.values()],  # None leaves a gap
            mode="lines+markers",
            name=page.label(scored.name),
            text=[page.label(row.decode) for row in best.values()],
            line={"color": colour, "dash": dash, "width": 2},
            hovertemplate="%{y:.2f}x, batch %{x}, %{text}",
        )
    if len(sizes) < 2:
        return None
    figure.add_hline(y=1, line={"color": page.paint("ink"), "width": 1, "dash": "dot"})
    ticks = sorted(sizes)
    figure.update_xaxes(title={"text": "batch"}, type="log", tickvals=ticks, ticktext=[str(n) for n in ticks])
    figure.update_yaxes(title={"text": "speedup"}, rangemode="tozero")
    return figure


def _by_category(ordered: Sequence[Scored], rows: Sequence[Row]) -> tuple[list[str], list[list[str]]] | None:
    """Acceptance length by kind of prompt; None if a scorecard has no categories."""
    by_run = [
        {kind.name: kind for kind in s.card.by_category(row)} for s, row in zip(ordered, rows, strict=True)
    ]
    names = list(dict.fromkeys(name for kinds in by_run for name in kinds))
    if not names or not all(by_run):
        return None
    lines = [
        [s.name, *(f"{kinds[n].tau:.2f} ({kinds[n].prompts})" if n in kinds else "-" for n in names)]
        for s, kinds in zip(ordered, by_run, strict=True)
    ]
    return ["drafter", *names], lines


def _styles() -> Iterator[tuple[str, str]]:
    """Yield a distinct colour and dash for each of up to twenty-four runs."""
    while True:
        yield from ((page.paint(colour), dash) for dash in DASHES for colour in page.SERIES)
