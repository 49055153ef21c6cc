"""What a person reads at the end of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from distill.runs import checkpoints

LEVELS = 5


def table(folder: Path) -> str:
    """One line a checkpoint, then every setting of the last one; empty if nothing was scored."""
    cards = [json.loads(p.read_text()) for c in checkpoints(folder) if (p := c / "score.json").exists()]
    if not cards:
        return ""
    head = ["step", "tau", *(f"s_{j}" for j in range(1, LEVELS + 1)), "speedup", "draft", "verify", "other", "audit"]
    lines = [[str(c["step"]), *_cells(c), "pass" if c["audit_passed"] else "FAIL"] for c in cards]
    first = cards[-1]
    text = (
        f"headline: {first['decode']}, T={first['temperature']:g}, batch {first['batch_size']}, "
        f"{first['dtype']}, {first['prompts']} held-out prompts, {first['hardware']}\n" + _grid(head, lines)
    )
    if len(first["rows"]) > 1:
        settings = [[r["decode"], f"{r['temperature']:g}", str(r["batch_size"]), *_cells(r)] for r in first["rows"]]
        text += f"\n\nall settings at step {first['step']}:\n"
        text += _grid(["decode", "T", "batch", *head[1:-1]], settings)
    return text


def _cells(row: dict) -> list[str]:
    survival = [f"{s:.2f}" for s in row["survival"][:LEVELS]]
    survival += ["-"] * (LEVELS - len(survival))
    shares = [f"{100 * row[f'{name}_share']:.0f}%" for name in ("draft", "verify", "other")]
    return [f"{row['tau']:.2f}", *survival, f"{row['speedup']:.2f}x", *shares]


def _grid(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *lines]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *lines]
    )
