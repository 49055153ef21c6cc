"""What a person reads at the end of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from distill.scoring.target_drift import describe
from distill.utils.run_folder import checkpoints

LEVELS = 5
LEVEL_NAMES = [f"s_{j}" for j in range(1, LEVELS + 1)]


def table(folder: Path) -> str:
    """One line a checkpoint, then every setting of the last one; empty if nothing was scored."""
    cards = [json.loads(p.read_text()) for c in checkpoints(folder) if (p := c / "score.json").exists()]
    if not cards:
        return ""
    last = cards[-1]
    far = describe(last)
    text = f"headline: {headline(last)}\n" + grid(*by_step(cards))
    text += f"\nstep {last['step']}: {far}" if far else ""
    return text if len(last["rows"]) == 1 else f"{text}\n\nstep {last['step']}, {settings_table(last)}"


def by_step(cards: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """Head and lines of a table with the headline of every scorecard."""
    head = ["step", "replay", "tau", *LEVEL_NAMES, "speedup", "draft", "verify", "other", "audit"]
    return head, [[str(c["step"]), *_cells(c), "pass" if c["audit_passed"] else "FAIL"] for c in cards]


def by_setting(card: dict) -> tuple[list[str], list[list[str]]]:
    """Head and lines of a table with every setting of a scorecard."""
    head = ["decode", "T", "batch", "replay", "tau", *LEVEL_NAMES, "speedup", "draft", "verify", "other"]
    return head, [
        [r["decode"], f"{r['temperature']:g}", str(r["batch_size"]), *_cells(r)] for r in card["rows"]
    ]


def settings_table(card: dict) -> str:
    """One line a setting of one scorecard."""
    control = "" if card.get("control", "none") == "none" else f"control={card['control']}: no real score"
    notes = [note for note in (control, describe(card), _audit(card["audit"])) if note]
    return "\n".join([f"all settings:\n{grid(*by_setting(card))}", *notes])


def _audit(audit: dict) -> str:
    """The verdict, with a line for each sampled run."""
    lines = [
        f"audit {'pass' if audit['passed'] else 'FAIL'}: T=0, "
        f"{audit['tokens']} tokens, own row {audit['own_row']}, "
        f"equal {audit['equal']}, near ties {audit['near_ties']} (margin {audit['margin']:.2g}), "
        f"mismatches {audit['mismatches']}"
    ]
    for run in audit["sampled"]:
        order, p = min(run["pit"].items(), key=lambda item: item[1], default=("none", 1.0))
        lines.append(
            f"  T={run['temperature']:g}, {run['decode']}: {run['tokens']} tokens, "
            f"impossible {run['impossible']}, smallest PIT p of {len(run['pit'])} {p:.2g} ({order}), "
            f"surprisal z {run['surprisal_z']:+.2f} (p {run['surprisal_p']:.2g})"
        )
    return "\n".join(lines)


def headline(card: dict) -> str:
    """What a card's first row was measured with, and on."""
    return (
        f"{card['decode']}, T={card['temperature']:g}, batch {card['batch_size']}, {card['dtype']}, "
        f"{card['prompts']} held-out prompts, {card['hardware']}"
    )


def _cells(row: dict) -> list[str]:
    survival = [f"{s:.2f}" for s in row["survival"][:LEVELS]]
    survival += ["-"] * (LEVELS - len(survival))
    shares = [f"{100 * row[f'{name}_share']:.0f}%" for name in ("draft", "verify", "other")]
    replay = row["replay"]
    # An estimate is the decoder's own count on more prompts, and is marked.
    exact = f"{replay['tau']:.2f}{'' if replay['method'] == 'exact' else '~'}" if replay else "-"
    return [exact, f"{row['tau']:.2f}", *survival, f"{row['speedup']:.2f}x", *shares]


def grid(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Cells in right-aligned columns."""
    widths = [max(len(row[i]) for row in [head, *lines]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [head, *lines]
    )
