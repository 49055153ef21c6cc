"""Panels of a report that say what was measured, where and with which settings."""

from __future__ import annotations

import time

from markupsafe import Markup

from distill.report import page
from distill.report.history import History
from distill.report.score_panels import Card, accepted, exact


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
