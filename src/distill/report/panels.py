"""Panels of a report that show a scorecard: acceptance, time, categories, and where it was measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from markupsafe import Markup

from decode.evaluation.bootstrap import interval
from distill.report import page
from distill.report.history import History
from distill.report.page import paint
from distill.report.training_panels import axes
from distill.scoring.paired import FEWEST, accepted, exact
from distill.scoring.target_drift import describe

SETTINGS = 6  # whose time is drawn, the first ones

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


def settings(card: Card) -> Markup | None:
    """Every row of the scorecard."""
    if len(card["rows"]) < 2:
        return None
    head = ["decode", "T", "batch", "tau", "95 % interval", "speedup", "tokens/s", "draft", "verify", "other"]
    lines = []
    for row in card["rows"]:
        found = accepted(row)
        low, high = found["tau_interval"]
        lines.append(
            [
                row["decode"],
                f"{row['temperature']:g}",
                row["batch_size"],
                f"{found['tau']:.2f}{'' if exact(row) else '~'}",
                f"{low:.2f} to {high:.2f}",
                f"{row['speedup']:.2f}×",
                f"{row['tokens_per_second']:.0f}",
                *(f"{100 * row[f'{name}_share']:.0f} %" for name in ("draft", "verify", "other")),
            ]
        )
    says = "The first line is the headline. ~: counted by the decoder, where replay is not exact."
    return page.section("All settings", page.table(head, lines), says=says, wide=True)


def about(card: Card) -> Markup:
    """What was measured."""
    rows = {r["batch_size"] for r in card["rows"]}
    more = "" if len(rows) > 1 else " (score.batch_sizes=[1,4,16] would add a curve)"
    cache = card.get("kv_bytes_per_token")
    return page.section(
        "What was measured",
        page.facts(
            [
                ("drafter", card["drafter"]),
                ("parameters", f"{card['parameters']:,}"),
                ("target", card["target"]),
                ("checkpoint", f"step {card['step']}"),
                ("decoding", f"{card['decode']}, rule {card['rule']}"),
                ("law", f"T={card['temperature']:g}"),
                ("batch sizes", ", ".join(map(str, sorted(rows))) + more),
                ("held-out prompts", f"{card['prompts']} decoded, {_replayed(card)} replayed"),
                ("longest answer", f"{card['max_new_tokens']} tokens"),
                ("cache of the drafter", f"{card['drafter_kv_bytes_per_token']} bytes a token"),
                ("cache of the target", f"{cache} bytes a token" if cache else None),
                ("first token", f"{1000 * card['ttft']:.1f} ms" if card.get("ttft") else None),
            ]
        ),
    )


def machine(run: History) -> Markup | None:
    """Where, when and with which code."""
    card = run.card or {}
    facts: list[tuple[str, page.Cell | Markup]] = [
        ("hardware", card.get("hardware")),
        ("type", card.get("dtype")),
        ("threads", card.get("threads")),
        ("load average", card.get("load_average")),
        ("timed runs", card.get("repeats")),
        ("seed", card.get("seed")),
        ("commit", card.get("commit")),
        *(
            (name, version)
            for name, version in sorted(card.get("versions", {}).items())
            if name != "foredraft"
        ),
        (
            "started",
            time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(run.started)) if run.started else None,
        ),
        ("folder", "/".join(run.folder.resolve().parts[-2:])),
    ]
    return page.section("Where it was measured", page.facts(facts))


def configuration(run: History) -> Markup | None:
    """Everything the run was set to."""
    if not run.config:
        return None
    given = " ".join(run.overrides) or "(none)"
    return page.section(
        "Configuration",
        page.facts([("given", given)]),
        page.details("all settings, resolved", page.pre(run.config)),
        says="What was given on the command line; everything else is the default.",
        wide=True,
    )


def _replayed(card: Card) -> int:
    return len(card["replay"]["counts"]["tokens"]) if card.get("replay") else 0
