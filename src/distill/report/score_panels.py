"""Panels of a report that show a scorecard: acceptance, time, categories, and where it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from markupsafe import Markup

from decode.evaluation.bootstrap import interval
from distill.report import page
from distill.report.page import paint
from distill.report.training_panels import axes
from distill.scoring.paired import FEWEST, accepted, exact
from distill.scoring.target_drift import describe

Card = dict[str, Any]


def warnings(card: Card) -> Markup | None:
    """What a reader must know before any number."""
    control = card.get("control", "none")
    found = [
        f"Scored with control={control}: the drafter was given other hidden states. This is no real score."
        if control != "none"
        else "",
        ""
        if card["audit_passed"]
        else "The losslessness audit failed: what was written is not the target's.",
        ""
        if card.get("replay_agrees", True)
        else "Replay and decoder disagree by more than chance: one of the two has an error.",
        describe(card) if card.get("target_moved") else "",
    ]
    lines = [page.prose(text) for text in found if text]
    return (
        Markup('<div class="warning" role="alert">{}</div>').format(Markup("").join(lines)) if lines else None
    )


def headline(card: Card) -> Markup:
    """What drafting gives, and whether it costs anything."""
    found = accepted(card)
    low, high = found["tau_interval"]
    how = "replayed exactly" if exact(card) else "counted by the decoder"
    over = found.get("prompts", card.get("prompts"))
    said = f"95 % interval {low:.2f} to {high:.2f}; {how} on {over} held-out prompts"
    lossless = card.get("lossless_to")
    verdict = "pass" if card["audit_passed"] else "FAIL"
    plain, speed = card.get("plain_tokens_per_second"), card.get("tokens_per_second")
    tiles: list[tuple[str, Markup | str, Markup | str]] = [
        ("tau, tokens per target pass", f"{found['tau']:.2f}", said),
        (
            "speedup over plain decoding",
            f"{card['speedup']:.2f}×",
            f"{speed:.0f} against {plain:.0f} tokens/s, batch {card['batch_size']}, T={card['temperature']:g}"
            if plain and speed
            else "",
        ),
        (
            "losslessness audit",
            Markup('<span class="{}">{}</span>').format("good" if card["audit_passed"] else "bad", verdict),
            _audited(card["audit"]),
        ),
    ]
    if lossless:
        tiles.append(("lossless to", f"the {lossless}", "whose law the text has, whatever is drafted"))
    trained = card.get("train_seconds")
    tiles.append(
        (
            "drafter",
            _count(card["parameters"]),
            "parameters" + (f", trained for {_duration(trained)}" if trained else ""),
        )
    )
    return page.tiles(tiles)


def _audited(audit: Card) -> str:
    wrong, near = audit["mismatches"], audit["near_ties"]
    greedy = f"{wrong} mismatch{'es' * (wrong != 1)}, {near} near tie{'s' * (near != 1)}"
    drawn = sum(run["tokens"] for run in audit["sampled"])
    return f"{audit['tokens']} greedy tokens: {greedy}" + (f"; {drawn} drawn ones tested" if drawn else "")


def positions(card: Card) -> Markup | None:
    """Survival and conditional acceptance."""
    found = accepted(card)
    if not found["survival"]:
        return None
    place = list(range(1, len(found["survival"]) + 1))
    figure = go.Figure()
    figure.add_bar(
        x=place,
        y=found["survival"],
        name="accepted this far" + (" (replay)" if exact(card) else ""),
        marker={"color": paint("took"), "line": {"color": paint("blue"), "width": 1.5}},
        width=0.6,
        hovertemplate="%{x} or more accepted: %{y:.3f}<extra></extra>",
    )
    if card.get("alpha"):
        figure.add_scatter(
            x=place,
            y=card["alpha"][: len(place)],
            name="accepted, if all before were (decoder)",
            mode="lines+markers",
            line={"color": paint("orange"), "width": 2},
            marker={"symbol": "diamond", "size": 8},
            hovertemplate="position %{x}: alpha %{y:.3f}<extra></extra>",
        )
    figure.update_layout(axes("position in the draft", "probability"))
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(range=[0, 1.03])
    says = (
        "Bars: the chance that a round keeps at least so many draft tokens; tau is 1 plus their sum. Line: "
        "acceptance of a position once all before it were kept. A line that falls calls for a drafter that "
        "is trained deeper; bars that end high call for a deeper draft."
    )
    return page.section("Acceptance by position", page.plot(figure, says), says=says)


def length_shares(survival: Sequence[float]) -> list[float]:
    """P(accepted = j), j from 0, of P(accepted >= j), j from 1."""
    reached = [1.0, *survival, 0.0]
    return [a - b for a, b in pairwise(reached)]


def lengths(card: Card) -> Markup | None:
    """The histogram of accepted tokens a round."""
    found = accepted(card)
    if not found["survival"]:
        return None
    share = length_shares(found["survival"])
    figure = go.Figure()
    figure.add_bar(
        x=list(range(len(share))),
        y=[100 * s for s in share],
        name="replay" if exact(card) else "decoder",
        marker={"color": paint("took"), "line": {"color": paint("blue"), "width": 1.5}},
        width=0.6,
        hovertemplate="%{x} accepted: %{y:.1f} % of rounds<extra></extra>",
    )
    if exact(card):
        figure.add_scatter(
            x=list(range(len(share))),
            y=[100 * s for s in length_shares(card["survival"])],
            name="decoder's count, fewer prompts",
            mode="markers",
            marker={"color": paint("orange"), "symbol": "diamond-open", "size": 9, "line": {"width": 2}},
            hovertemplate="%{x} accepted: %{y:.1f} % of rounds<extra></extra>",
        )
    figure.update_layout(axes("draft tokens accepted in a round", "share of rounds (%)"), showlegend=True)
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(rangemode="tozero")
    says = (
        "How many draft tokens a round keeps. Much at 0: the first token is the problem. Much at the "
        "right end: drafts stop while they are still right."
    )
    return page.section("Accepted lengths", page.plot(figure, says), says=says)


def by_category(card: Card) -> list[tuple[str, int, int, float, tuple[float, float] | None]]:
    """(category, prompts, tokens, tau, its 95 % interval), the longest acceptance first."""
    names, replay = card.get("categories") or [], card.get("replay")
    counts = replay["counts"] if replay else {"tokens": [], "rounds": []}
    if len(names) != len(counts["tokens"]) or len(set(names)) < 2:
        return []
    found = []
    for name in sorted(set(names)):
        mine = [i for i, other in enumerate(names) if other == name]
        tokens, rounds = ([counts[k][i] for i in mine] for k in ("tokens", "rounds"))
        if sum(rounds):
            reach = interval(tokens, rounds) if len(mine) >= FEWEST else None
            found.append((name or "(none)", len(mine), sum(tokens), sum(tokens) / sum(rounds), reach))
    return sorted(found, key=lambda line: -line[3])


def categories(card: Card) -> Markup | None:
    """Acceptance by kind of prompt."""
    found = by_category(card)
    if not found:
        return None
    figure = go.Figure()
    value = [line[3] for line in found]
    low, high = zip(*(line[4] or (line[3], line[3]) for line in found), strict=True)
    figure.add_vline(x=card["replay"]["tau"], line={"color": paint("grey"), "width": 1, "dash": "dash"})
    figure.add_scatter(
        x=value,
        y=[page.label(line[0]) for line in found],
        mode="markers",
        marker={"color": paint("blue"), "size": 10},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": np.subtract(high, value),
            "arrayminus": np.subtract(value, low),
            "thickness": 2,
            "width": 0,
            "color": paint("blue"),
        },
        showlegend=False,
        hovertemplate="%{y}: tau %{x:.2f}<extra></extra>",
    )
    figure.update_layout(axes("tau (tokens per target pass)", ""))
    figure.update_yaxes(autorange="reversed", type="category")
    says = (
        "Tau of each kind of prompt with its 95 % interval, and of all together (dashed). A kind far to the "
        "left is what more training prompts of that kind would help."
    )
    lines = [
        [name, prompts, tokens, f"{tau:.2f}", f"{reach[0]:.2f} to {reach[1]:.2f}" if reach else None]
        for name, prompts, tokens, tau, reach in found
    ]
    return page.section(
        "Acceptance by category",
        page.split(
            page.plot(figure, says, 90 + 30 * len(found)),
            page.table(["category", "prompts", "tokens", "tau", "95 % interval"], lines),
        ),
        says=says,
        wide=True,
    )


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
