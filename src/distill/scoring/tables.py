"""Format scorecards as plain-text tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from decode.evaluation.quality import QUALITY_HEAD
from decode.evaluation.rows import Row
from decode.evaluation.scorecard import NOT_RUN, Scorecard
from decode.evaluation.served import BY_ENGINE
from distill.scoring import served
from distill.scoring.run_scorecards import scorecards
from distill.scoring.target_drift import describe
from distill.utils.redact import one_line
from distill.utils.run_folder import best, is_step
from drafters.hub.untrusted_files import is_hub_id

LEVELS = 5
INTERVAL = "95 %"  # column with the interval of tau
NAMES = "tau, s_j: replayed (~: estimated, or decoded); tau_decoded: counted by the decoder, on fewer prompts"
LEVEL_NAMES = [f"s_{j}" for j in range(1, LEVELS + 1)]


def table(folder: Path) -> str:
    """A line per checkpoint of a run, then every setting of the best one; empty if none was scored."""
    cards = scorecards(folder)
    if not cards:
        return ""
    top = best_card(folder, cards)
    step, drift = top.checkpoint.step, describe(top.checkpoint)
    text = f"headline of step {step}: {headline(top)}\n" + grid(*by_step(list(cards.values())))
    text += f"\nstep {step}: {drift}" if drift else ""
    if len(top.rows) > 1:
        return f"{text}\n\nstep {step}, {settings_table(top)}"
    return "\n".join(filter(None, [text, deeper(top)]))


def best_card(folder: Path, cards: Mapping[int, Scorecard]) -> Scorecard:
    """The scorecard of a run's best checkpoint, or else the newest."""
    checkpoint = best(folder)
    newest = cards[max(cards)]
    return cards.get(int(checkpoint.name), newest) if checkpoint and is_step(checkpoint.name) else newest


def target_label(target: str) -> str:
    """Short name of a target: its hub id, or the last part of its path."""
    return target if is_hub_id(target) else Path(target).name or target


def by_step(cards: Sequence[Scorecard]) -> tuple[list[str], list[list[str]]]:
    """Head and lines of a table with the row of every scorecard's headline."""
    there = served.head(cards)
    head = ["step", "tau", INTERVAL, "tau_decoded", *LEVEL_NAMES, "speedup", *there]
    head += ["draft", "verify", "other", "audit"]
    return head, [[str(c.checkpoint.step), *_cells(c, c.compared, there), c.audited] for c in cards]


def by_setting(card: Scorecard) -> tuple[list[str], list[list[str]]]:
    """Head and lines of a table with every setting of a scorecard."""
    there = served.head([card])
    head = ["decode", "T", "batch", "tau", INTERVAL, "tau_decoded", *LEVEL_NAMES, "speedup", *there]
    quality = quality_columns(card)
    lines = [
        [row.decode, f"{row.temperature:g}", str(row.batch_size), *_cells(card, row, there), *more]
        for row, more in zip(card.rows, quality[1:], strict=True)
    ]
    return [*head, "draft", "verify", "other", *quality[0]], lines


def quality_columns(card: Scorecard) -> list[list[str]]:
    """Head and lines about the effect of lossy rules on the text; empty without lossy rows."""
    if not any(row.quality for row in card.rows):
        return [[] for _ in range(len(card.rows) + 1)]
    empty = [""] * len(QUALITY_HEAD)
    return [QUALITY_HEAD, *(row.quality.cells() if row.quality else empty for row in card.rows)]


def settings_table(card: Scorecard) -> str:
    """A line per setting of a scorecard, and the audit."""
    control = card.conditions.control
    notes = [
        f"control={control}: no real score" if control != "none" else "",
        describe(card.checkpoint),
        deeper(card),
        _contexts(card.rows[0]),
        *served.notes(card),
        _audit(card),
    ]
    return "\n".join([f"all settings:\n{grid(*by_setting(card))}", NAMES, *filter(None, notes)])


def deeper(card: Scorecard) -> str:
    """Where the shares of deeper draft tokens are; "" if the table has all."""
    deepest = max(len(row.acceptance.survival) for row in card.rows)
    return f"s_{LEVELS + 1} to s_{deepest} are in score.json" if deepest > LEVELS else ""


def _contexts(row: Row) -> str:
    """Tau by context length, if rounds cover several ranges."""
    parts = row.replay.by_context if row.replay else []
    if len(parts) < 2:
        return ""
    shown = ", ".join(f"{part.tau:.2f} below {part.high:,} ({part.rounds:,.0f} rounds)" for part in parts)
    return f"tau by tokens of context, T={row.temperature:g}, {row.decode}: {shown}"


def _audit(card: Scorecard) -> str:
    """The audit's verdict, with a line per sampled run."""
    if (audit := card.audit) is None:
        return f"audit {NOT_RUN}, {BY_ENGINE}: {card.conditions.elsewhere}"
    lines = [
        f"audit {'pass' if audit.passed else 'FAIL'}: T=0, {audit.tokens} tokens, own row {audit.own_row}, "
        f"equal {audit.equal}, near ties {audit.near_ties} (margin {audit.margin:.2g}), "
        f"mismatches {audit.mismatches}"
    ]
    for run in audit.sampled:
        order, p = min(run.pit.items(), key=lambda item: item[1], default=("none", 1.0))
        lines.append(
            f"  T={run.temperature:g}, {run.decode}: {run.tokens} tokens, "
            f"impossible {run.impossible}, smallest PIT p of {len(run.pit)} {p:.2g} ({order}), "
            f"surprisal z {run.surprisal_z:+.2f} (p {run.surprisal_p:.2g})"
        )
    return "\n".join(lines)


def headline(card: Scorecard) -> str:
    """The headline, and the conditions of both of its numbers."""
    row, conditions, head = card.compared, card.conditions, card.headline
    chosen = "" if row is card.rows[0] else f" ({card.rows[0].decode} was chosen)"
    if conditions.served_plan:  # the engine does not decode trees of a better headline
        chosen = " (what the engine is asked for)" if row.decode == conditions.served_plan else chosen
    prompts = f"{conditions.prompts} held-out prompts"
    if conditions.elsewhere:
        prompts = f"{BY_ENGINE} and replayed on {len(row.counts.tokens)} held-out answers"
    passes = f"{row.timing.passes_text}, " if row.timing and row.timing.passes else ""
    return (
        f"{head.tau_text}  {head.speedup_text}  {head.setting}{chosen}, {conditions.dtype}, {passes}"
        f"{prompts}, {conditions.hardware}"
    )


def tau_cell(row: Row) -> str:
    """Acceptance length and its interval; ~ where it is an estimate or the decoder's count."""
    tau, (low, high) = row.acceptance.tau, row.acceptance.tau_interval
    return f"{tau:.2f}{'' if row.exact else '~'} ({low:.2f}..{high:.2f})"


def _cells(card: Scorecard, row: Row, there: Sequence[str]) -> list[str]:
    """Acceptance, speedup and shares of a row, with the engine's columns if there are any."""
    survival = [f"{s:.2f}" for s in row.acceptance.survival[:LEVELS]]
    survival += ["-"] * (LEVELS - len(survival))
    shares = [row.text(name, "{:.0%}") for name in ("draft_share", "verify_share", "other_share")]
    engine = served.cells(card, row) if there else []
    return [
        *tau_cell(row).removesuffix(")").split(" ("),
        "-" if card.conditions.elsewhere else f"{row.tau:.2f}",
        *survival,
        row.text("speedup", "{:.2f}x", BY_ENGINE),
        *engine,
        *shares,
    ]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a Markdown table; the first row is the head. Cells may be untrusted."""
    head, *lines = ([one_line(cell).replace("|", r"\|") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *lines])


def with_interval(value: str, interval: Sequence[float] | None) -> str:
    """A figure and its interval, if it is known: 1.80x (1.71..1.89)."""
    return value if interval is None else f"{value} ({interval[0]:.2f}..{interval[1]:.2f})"


def grid(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format cells in right-aligned columns."""
    widths = [max(len(row[i]) for row in [head, *lines]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [head, *lines]
    )
