"""Panels of a report that show a scorecard: acceptance, time, categories, conditions."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from markupsafe import Markup

from decode.evaluation.audit import Audit
from decode.evaluation.rows import Row
from decode.evaluation.scorecard import Scorecard
from decode.evaluation.served import BY_ENGINE
from distill.report import page
from distill.report.history import History
from distill.report.page import paint
from distill.report.training_panels import axes
from distill.scoring.tables import quality_columns
from distill.scoring.target_drift import describe
from distill.utils.run_record import OLDER

SOURCES = {
    "replayed": "replayed exactly",
    "estimated": "estimated by replay",
    "decoded": "counted by the decoder",
}
SETTINGS = 6  # maximum number of settings in the time plot


def warnings(card: Scorecard) -> Markup | None:
    """Warnings: a control, a failed audit, a disagreement with replay, a tuned target."""
    control, elsewhere = card.conditions.control, card.conditions.elsewhere
    texts = [
        f"Scored with control={control}: the drafter was given other hidden states. This is no real score."
        if control != "none"
        else "",
        f"Scored only by replay, {BY_ENGINE}: {elsewhere}." if elsewhere else "",
        "" if card.audit_passed else "The losslessness audit failed: the text is not the target's.",
        ""
        if card.replay_agrees
        else "Replay and decoder disagree by more than chance: one of the two has an error.",
        describe(card.checkpoint),
    ]
    lines = [page.prose(text) for text in texts if text]
    return (
        Markup('<div class="warning" role="alert">{}</div>').format(Markup("").join(lines)) if lines else None
    )


def headline(card: Scorecard) -> Markup:
    """Acceptance length, speedup, verdict of the audit and size of the drafter."""
    head = card.headline
    low, high = head.tau_interval
    trained = card.checkpoint.train_seconds
    return page.tiles(
        [
            (
                "tau, tokens per target pass",
                f"{head.tau:.2f}",
                f"95 % interval {low:.2f} to {high:.2f}; {SOURCES[head.source]} on {head.prompts} held-out "
                f"prompts, {head.setting}",
            ),
            (
                "speedup over plain decoding",
                *_speed(card),
            ),
            (
                "losslessness audit",
                Markup('<span class="{}">{}</span>').format(
                    "good" if card.audit_passed else "bad", card.audited
                ),
                _audited(card.audit),
            ),
            (
                "lossless to",
                f"the {card.checkpoint.lossless_to}",
                "the text follows its distribution, whatever is drafted",
            ),
            (
                "drafter",
                _count(card.checkpoint.parameters),
                "parameters"
                + (f", trained for {_duration(trained)}" if trained else "")
                + (", scored with int8 weights" if card.checkpoint.quantize == "int8" else ""),
            ),
        ]
    )


def _speed(card: Scorecard) -> tuple[str, str]:
    """Speedup of the headline's draft, and how it was measured; the fastest draft, if that is another."""
    row, fastest = card.compared, card.fastest
    if row.speedup is None:
        return "none", BY_ENGINE
    slow = "" if card.pays else "do not draft here: none is faster than plain decoding; "
    other = "" if fastest is row else f"; the fastest of this setting: {fastest.decode}, {fastest.speed:.2f}×"
    return (
        f"{row.speedup:.2f}×",
        f"{slow}{row.text('tokens_per_second', '{:.0f}')} against "
        f"{row.text('plain_tokens_per_second', '{:.0f}')} tokens/s by {card.headline.setting}{other}",
    )


def _audited(audit: Audit | None) -> str:
    if audit is None:
        return BY_ENGINE
    wrong, near = audit.mismatches, audit.near_ties
    greedy = f"{wrong} mismatch{'es' * (wrong != 1)}, {near} near tie{'s' * (near != 1)}"
    sampled = f"; {audit.sampled_tokens} drawn ones tested" if audit.sampled_tokens else ""
    return f"{audit.tokens} greedy tokens: {greedy}{sampled}"


def categories(card: Scorecard) -> Markup | None:
    """Acceptance by kind of prompt."""
    kinds = card.by_category(card.compared)
    if not kinds:
        return None
    figure = go.Figure()
    value = [kind.tau for kind in kinds]
    low, high = zip(*(kind.interval or (kind.tau, kind.tau) for kind in kinds), strict=True)
    figure.add_vline(
        x=card.compared.acceptance.tau, line={"color": paint("grey"), "width": 1, "dash": "dash"}
    )
    figure.add_scatter(
        x=value,
        y=[page.label(kind.name) for kind in kinds],
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
    caption = (
        "Tau of each kind of prompt with its 95 % interval, and of all together (dashed). A kind far to the "
        "left is what more training prompts of that kind would help."
    )
    lines = [
        [name, prompts, tokens, f"{tau:.2f}", f"{reach[0]:.2f} to {reach[1]:.2f}" if reach else None]
        for name, prompts, tokens, tau, reach in kinds
    ]
    return page.section(
        "Acceptance by category",
        page.split(
            page.plot(figure, caption, 90 + 30 * len(kinds)),
            page.table(["category", "prompts", "tokens", "tau", "95 % interval"], lines),
        ),
        caption=caption,
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


def round_times(row: Row) -> dict[str, float]:
    """Milliseconds of a timed round by part, and of plain decoding of as many tokens."""
    assert row.tpot
    assert row.plain_tokens_per_second
    whole = 1000 * row.tpot * row.tau
    parts = {name: whole * share for name, share in _time_shares(row).items()}
    return parts | {"plain": 1000 * row.tau * row.batch_size / row.plain_tokens_per_second}


def _time_shares(row: Row) -> dict[str, float]:
    """Shares of decoding time; empty if an engine decodes."""
    shares = {"draft": row.draft_share, "verify": row.verify_share, "other": row.other_share}
    return {name: share for name, share in shares.items() if share is not None}


def shares(card: Scorecard) -> Markup | None:
    """Plot the time of a round by part, next to plain decoding of as many tokens."""
    rows = [r for r in card.rows if r.plain_tokens_per_second and r.tpot][:SETTINGS]
    if not rows:
        return None
    times = [round_times(r) for r in rows]
    names = _setting_names(rows)
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
    caption = (
        "Upper bar: one round of drafting and verifying. Lower bar: plain decoding of as many tokens. "
        "Drafting pays if the upper bar is shorter; its parts show the costs to reduce."
    )
    height = 130 + 62 * len(rows)
    split = ", ".join(f"{name} {100 * share:.0f} %" for name, share in _time_shares(card.compared).items())
    return page.section(
        "Time of a round",
        page.plot(figure, caption, max(height, 200)),
        Markup('<p class="note">{}</p>').format(f"{card.compared.decode}: {split} of decoding time."),
        caption=caption,
    )


def batches(card: Scorecard) -> Markup | None:
    """Plot speedup against batch size; None if only one was scored."""
    curves: dict[str, list[Row]] = {}
    for row in card.rows:
        curves.setdefault(f"{row.decode}, T={row.temperature:g}", []).append(row)
    curves = {k: sorted(v, key=lambda r: r.batch_size) for k, v in curves.items() if len(v) > 1}
    if not curves or card.conditions.elsewhere:
        return None
    figure = go.Figure()
    for (name, rows), colour in zip(curves.items(), page.SERIES * 4, strict=False):
        figure.add_scatter(
            x=[str(r.batch_size) for r in rows],
            y=[r.speedup for r in rows],
            name=page.label(name),
            mode="lines+markers",
            line={"color": paint(colour), "width": 2},
            customdata=[[r.tokens_per_second, r.plain_tokens_per_second] for r in rows],
            hovertemplate="batch %{x}: %{y:.2f}x<br>%{customdata[0]:.0f} against "
            "%{customdata[1]:.0f} tokens/s<extra></extra>",
        )
    figure.add_hline(y=1, line={"color": paint("grey"), "width": 1, "dash": "dash"})
    figure.update_layout(axes("batch size (texts decoded together)", "speedup over plain decoding"))
    figure.update_xaxes(type="category")
    figure.update_yaxes(rangemode="tozero")
    caption = (
        "Where a line falls below 1 (dashed), drafting costs more than it gives. Larger batches leave the "
        "target less idle arithmetic for verifying drafts, so that lines fall to the right."
    )
    return page.section("Speedup by batch size", page.plot(figure, caption), caption=caption)


def _setting_names(rows: Sequence[Row]) -> list[str]:
    """Shortest names that distinguish the settings."""
    if len(rows) == 1:
        return [""]
    samplers = [f"T={r.temperature:g}, batch {r.batch_size}" for r in rows]
    plans = [r.decode for r in rows]
    short = [f"{p.split(' (')[0]}, {sampler}" for p, sampler in zip(plans, samplers, strict=True)]
    full = [f"{p}, {sampler}" for p, sampler in zip(plans, samplers, strict=True)]
    return short if len(set(short)) == len(rows) else full


def settings(card: Scorecard) -> Markup | None:
    """Table of all rows of the scorecard."""
    if len(card.rows) < 2:
        return None
    head = [
        "decode",
        "T",
        "batch",
        "tau",
        "95 % interval",
        "tau_decoded",
        "speedup",
        "tokens/s",
        "draft",
        "verify",
        "other",
    ]
    lines, (more, *quality) = [], quality_columns(card)
    for row, texts in zip(card.rows, quality, strict=True):
        tau, (low, high) = row.acceptance.tau, row.acceptance.tau_interval
        lines.append(
            [
                row.decode,
                f"{row.temperature:g}",
                row.batch_size,
                f"{tau:.2f}{'' if row.exact else '~'}",
                f"{low:.2f} to {high:.2f}",
                "-" if card.conditions.elsewhere else f"{row.tau:.2f}",
                row.text("speedup", "{:.2f}×", BY_ENGINE),
                row.text("tokens_per_second", "{:.0f}"),
                *([f"{100 * share:.0f} %" for share in _time_shares(row).values()] or ["-"] * 3),
                *texts,
            ]
        )
    caption = (
        f"The headline is that of {card.headline.setting}. tau: replayed (~: estimated, or decoded); "
        "tau_decoded: counted by the decoder, on fewer prompts."
    )
    if more:
        caption += (
            " LOSSY rows change the text: log p of a token under the target, KL to its distribution in nats "
            "a token, share of tokens that are not its most probable ones."
        )
    return page.section("All settings", page.table([*head, *more], lines), caption=caption, wide=True)


def about(card: Scorecard) -> Markup:
    """Drafter, target and settings."""
    row, checkpoint, conditions = card.rows[0], card.checkpoint, card.conditions
    sizes = {r.batch_size for r in card.rows}
    more = "" if len(sizes) > 1 else " (score.batch_sizes=[1,4,16] would add a curve)"
    cache = conditions.kv_bytes_per_token
    return page.section(
        "What was measured",
        page.facts(
            [
                ("drafter", checkpoint.drafter),
                ("parameters", f"{checkpoint.parameters:,}"),
                ("target", checkpoint.target),
                ("checkpoint", f"step {checkpoint.step}"),
                ("decoding", f"{row.decode}, rule {row.rule}"),
                ("sampling", f"T={row.temperature:g}"),
                ("batch sizes", ", ".join(map(str, sorted(sizes))) + more),
                ("held-out prompts", f"{conditions.prompts} decoded, {len(row.counts.tokens)} replayed"),
                ("longest answer", f"{conditions.max_new_tokens} tokens"),
                ("cache of the drafter", f"{checkpoint.drafter_kv_bytes_per_token} bytes a token"),
                ("cache of the target", f"{cache} bytes a token" if cache else None),
                ("first token", f"{1000 * row.ttft:.1f} ms" if row.ttft else None),
            ]
        ),
    )


def machine(run: History) -> Markup | None:
    """Machine, date and versions."""
    facts: list[tuple[str, page.Cell | Markup]] = []
    if card := run.card:
        conditions, versions, timing = card.conditions, card.checkpoint.versions, card.rows[0].timing
        facts += [
            ("hardware", conditions.hardware),
            ("type", conditions.dtype),
            ("threads", conditions.threads),
            ("passes", timing.passes_text if timing else None),
            ("load average", conditions.load_average),
            ("timed runs", conditions.repeats),
            ("seed", conditions.seed),
            ("commit", card.checkpoint.commit),
            *((name, version) for name, version in sorted(versions.items()) if name != "foredraft"),
        ]
    started = time.localtime(run.started) if run.started else None
    facts += [
        ("started", time.strftime("%Y-%m-%d %H:%M:%S %Z", started) if started else None),
        ("folder", "/".join(run.folder.resolve().parts[-2:])),
    ]
    return page.section("Where it was measured", page.facts(facts))


def configuration(run: History) -> Markup | None:
    """Configuration and overrides."""
    if not (run.config or run.overrides):
        return None
    every = page.details("all options", page.pre(run.config)) if run.config else page.prose(f"{OLDER}.")
    return page.section(
        "Configuration",
        page.facts([("given", " ".join(run.overrides) or "(none)")]),
        every,
        caption="What was given on the command line; the rest are defaults, or chosen by the run.",
        wide=True,
    )
