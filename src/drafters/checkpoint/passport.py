"""The passport of a drafter: which files were measured, what was found, and how to measure it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode.evaluation.scorecard import Scorecard
from decode.evaluation.served import Served
from drafters.base import Origin
from drafters.checkpoint.markdown import cell, table
from drafters.checkpoint.model_card import audit_line
from drafters.hub import PASSPORT, PASSPORT_PAGE

SCHEMA = 1
WEIGHTS = (".safetensors", ".gguf", ".pt", ".bin")  # and config.json: the files that a passport is of
BLOCK = 1 << 20  # bytes that are hashed at a time
CONDITIONS = ("hardware", "dtype", "threads", "load_average", "prompts", "max_new_tokens", "seed")
CONDITIONS = (*CONDITIONS, "prompts_digest", "replayed_digest", "control")
NOTE = (
    "tau: tokens settled by one pass of the target; s_j: share of passes that accept at least j drafted "
    "tokens. Replayed exactly on the target's stored answers (~: estimated, or decoded)."
)
UNMEASURED = "Not measured (`foredraft passport` with `score.engine=vllm` and `score.engine_python=`)."


def write(
    folder: Path, score: Scorecard, kind: str, origin: Origin, where: str = "", out: Path | None = None
) -> list[Path]:
    """Write the page and the JSON file.

    Args:
        folder: with the files that were measured.
        score: of them, with an engine's counts if there are any.
        kind: short name of the drafter.
        origin: its target.
        where: hub repository of the folder; "": the folder itself.
        out: folder to write into; default `folder`.

    Returns:
        The page, and the JSON file.
    """
    values = passport(folder, score, kind, origin, where)
    paths = [(out or folder) / name for name in (PASSPORT_PAGE, PASSPORT)]
    paths[0].write_text(page(values, score))
    paths[1].write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    return paths


def passport(folder: Path, score: Scorecard, kind: str, origin: Origin, where: str = "") -> dict[str, Any]:
    """The contents as JSON; arguments as in `write`."""
    named = [path for path in folder.iterdir() if path.suffix in WEIGHTS or path.name == "config.json"]
    target = ("name", "published", "licence", "revision", "fingerprint", "tokenizer")
    again = f"foredraft passport checkpoint={where or '<this folder>'} target={origin.name or '<the target>'}"
    return {
        "schema": SCHEMA,
        "drafter": kind,
        "target": {name: getattr(origin, name) for name in target},
        "files": {one.name: {"bytes": one.stat().st_size, "sha256": _hash(one)} for one in sorted(named)},
        "command": f"{again} again=true seed={score.conditions.seed}",
        "scorecard": score.to_json(),
    }


def page(values: dict[str, Any], score: Scorecard) -> str:
    """The passport as Markdown.

    Args:
        values: from `passport`.
        score: its scorecard.
    """
    facts = [[f"target, {name}", value or "(unknown)"] for name, value in values["target"].items()]
    for name, one in values["files"].items():
        facts.append([f"{name}, sha256", f"{one['sha256']} ({one['bytes']:,} bytes)"])
    measured = {name: getattr(score.conditions, name) for name in CONDITIONS}
    measured |= {"commit": score.checkpoint.commit, **score.checkpoint.versions}
    lines = [f"# Passport of a drafter: `{values['drafter']}`, step {score.checkpoint.step}", ""]
    lines += table([["", ""], *facts])
    lines += ["## Losslessness", "", audit_line(score.audit), ""]
    lines += ["## Acceptance", "", *_acceptance(score), NOTE, "", *_by_kind(score), *_by_context(score)]
    lines += ["## In an engine", ""]
    lines += [line for one in score.served for line in _served(one)] or [UNMEASURED, ""]
    lines += ["## Measured with", ""]
    lines += table([["", ""], *([name, str(value)] for name, value in measured.items())])
    return "\n".join([*lines, "Again:", "", f"    {values['command']}", ""])


def _acceptance(score: Scorecard) -> list[str]:
    deepest = max(len(row.acceptance.survival) for row in score.rows)
    head = ["T", "decode", "batch", "tau", "95 %", *(f"s_{j}" for j in range(1, deepest + 1)), "speedup"]
    rows = []
    for row in score.rows:
        found, plan = row.acceptance, row.decode + (" (lossy)" if row.lossy else "")
        tau = f"{found.tau:.3f}{'' if row.exact else '~'}"
        levels = [f"{s:.3f}" for s in found.survival]
        levels += ["-"] * (deepest - len(levels))
        cells = [f"{row.temperature:g}", plan, str(row.batch_size), tau, _span(found.tau_interval), *levels]
        rows.append([*cells, row.text("speedup", "{:.2f}x", "-")])
    return table([head, *rows])


def _by_kind(score: Scorecard) -> list[str]:
    kinds = score.by_category(score.compared)
    rows = [[one.name, str(one.prompts), f"{one.tau:.3f}", _span(one.interval)] for one in kinds]
    title = f"By kind of prompt, {_compared(score)}:"
    return [title, "", *table([["kind", "prompts", "tau", "95 %"], *rows])] if rows else []


def _by_context(score: Scorecard) -> list[str]:
    replay = score.compared.replay
    parts = replay.by_context if replay else []
    rows = [[f"{one.low} to {one.high}", f"{one.rounds:.0f}", f"{one.tau:.3f}"] for one in parts]
    title = f"By tokens of context, {_compared(score)}:"
    return [title, "", *table([["context", "rounds", "tau"], *rows])] if rows else []


def _served(one: Served) -> list[str]:
    """Counts of an engine beside ours, position by position."""
    setting = f"{one.decode}, T={one.temperature:g}, batch {one.batch_size}, {one.prompts} prompts"
    verdict = "agrees" if one.agrees else f"DIFFERS: {cell(one.cause) or 'no known cause'}"
    lines = [f"{cell(one.engine)}, {setting}: tau {one.tau:.3f}, here {one.scored_tau:.3f}; {verdict}.", ""]
    rows = []
    figures = zip(one.survival, one.scored_survival, one.noise, strict=True)
    for position, (there, here, noise) in enumerate(figures, 1):
        differs = "differs" if abs(there - here) > noise else ""
        rows.append([str(position), f"{there:.3f}", f"{here:.3f}", f"{noise:.3f}", differs])
    lines += table([["position", "there", "here", "noise", ""], *rows])
    notes = []
    if one.texts is not None:
        equal, near, other = one.texts
        notes.append(f"greedy answers: {equal} as the engine's plain ones, {near} near ties, {other} others")
    if one.same_rounds is not None:
        notes.append(f"answers with as many rounds as here: {one.same_rounds[0]} of {one.same_rounds[1]}")
    if plain := one.plain_tokens_per_second:
        notes.append(f"{one.tokens_per_second:.1f} tokens/s, {one.tokens_per_second / plain:.2f}x of plain")
    return [*lines, *[f"- {note}" for note in notes], *[""] * bool(notes)]


def _compared(score: Scorecard) -> str:
    return f"{score.compared.decode}, T={score.compared.temperature:g}"


def _span(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.3f}..{interval[1]:.3f}"


def _hash(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            found.update(block)
    return found.hexdigest()
