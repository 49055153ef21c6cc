"""Pages made of results: what was measured, in tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpu_queue.results import Result

Row = Mapping[str, Any]
Columns = Sequence[tuple[str, Callable[[Row], str]]]


def page(results: Sequence[Result]) -> str:
    """Markdown of results, in the order given; those of one commit and card below one heading."""
    parts: list[str] = ["# Measured by scripts/gpu.py"]
    seen: tuple[str, str, bool] | None = None
    for result in results:
        where = result.hardware, result.commit, result.tiny
        if where != seen:
            size = ", at a tiny size: no figure is one of a card" if result.tiny else ""
            parts.append(f"## {result.hardware}, commit {result.commit}{size}")
            seen = where
        parts.append(f"### {result.step}\n\n{result.shows} ({result.seconds:.0f} s, torch {result.torch}).")
        if result.failed:
            parts.append(f"FAILED: {result.failed}")
        if result.measured:
            parts.append(_shown(result.measured))
    return "\n\n".join(parts) + "\n"


def _shown(measured: Row) -> str:
    """A result's table, by what was measured; a scorecard has a headline in place of that."""
    what = "scorecard" if "headline" in measured else measured.get("what", "")
    return _SHOWN.get(what, _any)(measured)


def _number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _grid(rows: Sequence[Row], columns: Columns) -> str:
    head = [name for name, _ in columns]
    lines = [head, ["---"] * len(head), *([cell(row) for _, cell in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rounds(card: Row) -> str:
    def part(name: str, digits: int = 2) -> Callable[[Row], str]:
        return lambda row: _number(row[name], digits)

    columns: Columns = [
        ("decode", lambda row: row["decode"] + (" SYNTHETIC" if row.get("synthetic") else "")),
        ("passes", lambda row: row["passes"]),
        ("tokens/s", part("tokens_per_second", 1)),
        ("over plain", lambda row: _number(row["speedup"], 2, "x")),
        ("tau", part("tau")),
        ("round, ms", part("round_ms")),
        ("draft, ms", part("draft_ms")),
        ("share of drafting", lambda row: f"{row['draft_share']:.0%}"),
        ("verification over plain", part("verify_over_plain")),
        ("host, ms", part("host_ms")),
        ("reads", part("reads", 1)),
        ("operations", part("operations", 0)),
        ("kernels", part("kernels", 0)),
        ("kernels, ms", part("kernels_ms")),
    ]
    plain, rates = card["rows"][0], card["rows"][-1].get("synthetic")
    bound = 1000 / plain["tokens_per_second"] / card["bound_ms"]
    lines = [
        f"{card['like'] or card['target']}, {card['drafter']}, {card['dtype']}, batch 1, "
        f"T={card['temperature']:g}. Reading the weights once takes {card['bound_ms']:.2f} ms at "
        f"{card['copy_bytes'] / 1e12:.2f} TB/s; a plain round takes {bound:.2f} times that."
    ]
    if rates:
        lines.append(
            f"SYNTHETIC: drafts are accepted at the rates {rates}, one for each depth; these speeds are "
            f"of no drafter. By near ties {_texts(card, 'differ')} of {card['prompts']} texts differ from "
            f"plain decoding's, and {_texts(card, 'strayed')} left the known texts when timed."
        )
    return "\n\n".join([_grid(card["rows"], columns), *lines])


def _texts(card: Row, name: str) -> str:
    return " and ".join(str(row[name]) for row in card["rows"][1:])


def _step(card: Row) -> str:
    columns: Columns = [
        ("drafter", lambda row: f"{row['drafter']}, depth {row['depth']}"),
        ("tokens a step", lambda row: f"{row['rows']} x {row['tokens']}"),
        ("step, ms", lambda row: _number(row["step_ms"], 1)),
        (
            "of the card's peak",
            lambda row: "-" if row["of_named_peak"] is None else f"{row['of_named_peak']:.1%}",
        ),
        ("of a large product", lambda row: f"{row['of_measured_product']:.1%}"),
        ("host, ms", lambda row: _number(row["host_ms"], 1)),
        ("reads", lambda row: str(row["reads"])),
        ("kernels", lambda row: _number(row["kernels"], 0)),
        ("kernels, ms", lambda row: _number(row["kernels_ms"], 1)),
        ("GiB", lambda row: _number(row["peak_gib"], 1)),
    ]
    product = card["bf16_flops"] / 1e12
    return f"{_grid([card], columns)}\n\n{card['like']}. A large bf16 product: {product:.0f} TFLOP/s."


def _attention(card: Row) -> str:
    names = list(card["rows"][0]["us"])
    columns: Columns = [
        ("keys", lambda row: f"{row['keys']:,}"),
        ("queries", lambda row: str(row["queries"])),
        ("keys and values read once, us", lambda row: _number(row["bound_us"], 1)),
        *((f"{name}, us", lambda row, name=name: _number(row["us"][name], 1)) for name in names),
    ]
    heads, shared, dim = card["heads"]
    kind = f"{heads} heads of {dim}, {shared} of keys, {card['dtype']}, batch {card['batch']}"
    return f"{_grid(card['rows'], columns)}\n\n{kind}; half of the keys are masked."


def _fit(card: Row) -> str:
    low, high = card["spread"]
    return f"{card['run']}: {card['step_ms']:.1f} ms a step ({low:.1f} to {high:.1f} by log line)."


def _tests(card: Row) -> str:
    counts = f"{card['passed']} passed, {card['failed']} failed, {card['skipped']} skipped."
    lines = [*card["failures"], *(f"skipped: {reason}" for reason in card["reasons"])]
    return "\n".join([counts, *(f"- {line}" for line in lines)])


def _scorecard(card: Row) -> str:
    def tau(row: Row) -> str:
        replay = row["replay"]
        return _number(replay["tau"] if replay else row["tau"])

    columns: Columns = [
        ("decode", lambda row: row["decode"]),
        ("T", lambda row: f"{row['temperature']:g}"),
        ("tau", tau),
        ("tokens/s", lambda row: _number(row["tokens_per_second"], 1)),
        ("speedup", lambda row: _number(row["speedup"], 2, "x")),
        ("passes", lambda row: _passes(row["timing"])),
    ]
    return _grid(card["rows"], columns)


def _passes(timing: Row | None) -> str:
    """How passes ran with the drafter, and by plain decoding if otherwise."""
    return " / ".join(dict.fromkeys([timing["passes"], timing["plain_passes"]])) if timing else "-"


def _any(card: Row) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in card.items())


_SHOWN: Mapping[str, Callable[[Row], str]] = {
    "rounds": _rounds,
    "step": _step,
    "attention": _attention,
    "fit": _fit,
    "tests": _tests,
    "scorecard": _scorecard,
}
