"""Panels of a report on acceptance by position: survival, and accepted tokens of a round."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import plotly.graph_objects as go
from markupsafe import Markup

from decode.evaluation.scorecard import Scorecard
from distill.report import page
from distill.report.page import paint
from distill.report.training_panels import axes


def positions(card: Scorecard) -> Markup | None:
    """Survival and conditional acceptance, both of the headline's source, and the decoder's survival."""
    row = card.compared
    survival, source = row.acceptance.survival, row.source
    if not survival:
        return None
    place = list(range(1, len(survival) + 1))
    figure = go.Figure()
    figure.add_bar(
        x=place,
        y=survival,
        name=f"accepted this far ({source})",
        marker={"color": paint("took"), "line": {"color": paint("blue"), "width": 1.5}},
        width=0.6,
        hovertemplate="%{x} or more accepted: %{y:.3f}<extra></extra>",
    )
    figure.add_scatter(
        x=place,
        y=[after / before if before else None for before, after in pairwise([1.0, *survival])],
        name=f"accepted, if all before were ({source})",
        mode="lines+markers",
        line={"color": paint("orange"), "width": 2},
        marker={"symbol": "diamond", "size": 8},
        hovertemplate="position %{x}: %{y:.3f}<extra></extra>",
    )
    if row.replay and not card.conditions.elsewhere:
        figure.add_scatter(
            x=place,
            y=row.survival[: len(place)],
            name="accepted this far (decoded, fewer prompts)",
            mode="markers",
            marker={"color": paint("grey"), "symbol": "diamond-open", "size": 9, "line": {"width": 2}},
            hovertemplate="%{x} or more accepted: %{y:.3f}<extra>decoded</extra>",
        )
    figure.update_layout(axes("position in the draft", "probability"))
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(range=[0, 1.03])
    caption = (
        "Bars: the chance that a round keeps at least so many draft tokens; tau is 1 plus their sum. Line: "
        "acceptance of a position once all before it were kept. If the line falls, train the drafter deeper; "
        "if the last bar is high, draft deeper."
    )
    return page.section("Acceptance by position", page.plot(figure, caption), caption=caption)


def length_shares(survival: Sequence[float]) -> list[float]:
    """Convert P(accepted >= j), j from 1, to P(accepted = j), j from 0."""
    reached = [1.0, *survival, 0.0]
    return [a - b for a, b in pairwise(reached)]


def lengths(card: Scorecard) -> Markup | None:
    """Histogram of accepted tokens per round."""
    row = card.compared
    if not row.acceptance.survival:
        return None
    share = length_shares(row.acceptance.survival)
    figure = go.Figure()
    figure.add_bar(
        x=list(range(len(share))),
        y=[100 * s for s in share],
        name=row.source,
        marker={"color": paint("took"), "line": {"color": paint("blue"), "width": 1.5}},
        width=0.6,
        hovertemplate="%{x} accepted: %{y:.1f} % of rounds<extra></extra>",
    )
    if row.replay and not card.conditions.elsewhere:
        figure.add_scatter(
            x=list(range(len(share))),
            y=[100 * s for s in length_shares(row.survival)],
            name="decoded, fewer prompts",
            mode="markers",
            marker={"color": paint("orange"), "symbol": "diamond-open", "size": 9, "line": {"width": 2}},
            hovertemplate="%{x} accepted: %{y:.1f} % of rounds<extra></extra>",
        )
    figure.update_layout(axes("draft tokens accepted in a round", "share of rounds (%)"), showlegend=True)
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(rangemode="tozero")
    caption = (
        "How many draft tokens a round keeps. High at 0: the first draft token is often wrong. High at the "
        "right end: longer drafts would be accepted."
    )
    return page.section("Accepted lengths", page.plot(figure, caption), caption=caption)
