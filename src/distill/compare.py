"""One table over several runs: what each drafter accepts, what it gains and what it costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from decode.errors import UserError
from decode.replay import Counts, agreement
from decode.score import SCHEMA
from distill.moved import describe
from distill.report import grid

LEVELS = 4


class Scored(NamedTuple):
    """A checkpoint's scorecard and what to call it."""

    name: str
    card: dict[str, Any]

    def row(self, temperature: float) -> dict[str, Any]:
        """The first setting at this temperature and batch 1, the headline's plan.

        Raises:
            UserError: it was not scored there.
        """
        for row in self.card["rows"]:
            if row["temperature"] == temperature and row["batch_size"] == 1 and not row["lossy"]:
                return row
        raise UserError(
            f"{self.name}: not scored at temperature {temperature:g}, batch 1; train it with "
            f"'score.temperatures=[...,{temperature:g}]', or score it again with scripts/score.py out=..."
        )


def read(paths: Sequence[str]) -> list[Scored]:
    """Scorecards of run folders (their `best` checkpoint), checkpoint folders or score.json files.

    Runs of the same drafter are told apart by their folders.

    Raises:
        UserError: no scorecard there, or one of another version.
    """
    found = [(path, scorecard(Path(path))) for path in paths]
    kinds = [card["drafter"] for _, card in found]
    return [
        Scored(kind if kinds.count(kind) == 1 else f"{kind} ({Path(path).name})", card)
        for kind, (path, card) in zip(kinds, found, strict=True)
    ]


def scorecard(path: Path) -> dict[str, Any]:
    """What was measured of a run's `best`, of a checkpoint, or stands in a file.

    Raises:
        UserError: no scorecard there, or one of another version.
    """
    # The second is what a folder that was given away has.
    names = ("score.json", "scorecard.json", "checkpoints/best/score.json")
    tried = [path, *(path / name for name in names)]
    place = next((p for p in tried if p.is_file()), None)
    if place is None:
        raise UserError(f"{path}: no score.json there; give a run's folder, a checkpoint or a scorecard")
    card: Any = None
    try:
        card = json.loads(place.read_text())
        version = card["schema"]
    except (ValueError, TypeError, KeyError):
        version = "none"
    if version != SCHEMA:
        raise UserError(
            f"{place}: a scorecard of version {version}, this one reads {SCHEMA}; score the checkpoint again"
        )
    return card


def table(
    scored: Sequence[Scored], temperatures: Sequence[float], against: str = "", by: str = "speedup"
) -> str:
    """The runs in order of speedup, or of tau, at the first temperature.

    Args:
        scored: checkpoints.
        temperatures: of the acceptance lengths; survival and costs are those at the first.
        against: a run's name; adds the difference of each tau to that run's, with its interval.
        by: speedup | tau.

    Raises:
        UserError: a temperature at which a run was not scored, a name that no run has.
    """
    first = temperatures[0]
    base = next((s for s in scored if s.name == against), None)
    if against and base is None:
        raise UserError(f"against={against}: no such run; there are {', '.join(s.name for s in scored)}")
    head = ["drafter", "decode", *(f"tau T={t:g}" for t in temperatures)]
    head += [f"less {against}'s, T={t:g}" for t in temperatures if base]
    head += [*(f"s_{j}" for j in range(1, LEVELS + 1)), "speedup", "draft", "ms/round"]
    head += ["trained", "parameters", "KV/token", "audit"]
    ordered = sorted(scored, key=lambda s: -(_accepted(s.row(first)) if by == "tau" else s.row(first))[by])
    lines = [_line(s, temperatures, base) for s in ordered]
    hardware = sorted({f"{s.card['dtype']}, {s.card['hardware']}" for s in scored})
    prompts = sorted({len(_counts(s.row(first)).tokens) for s in scored})
    notes = [
        f"T={first:g} where nothing else is said. tau: replayed on the target's answers to "
        f"{'/'.join(map(str, prompts))} held-out prompts (~: counted by the decoder), with its 95 % interval",
        "speedup: over plain decoding at batch 1. draft: the drafter's share of a round, and in ms",
        *(f"{s.name}: {far}" for s in ordered if (far := describe(s.card))),
        *hardware,
    ]
    return "\n".join([grid(head, lines), *notes])


def _line(scored: Scored, temperatures: Sequence[float], base: Scored | None) -> list[str]:
    card, rows = scored.card, [scored.row(t) for t in temperatures]
    row = rows[0]
    survival = [f"{s:.2f}" for s in _accepted(row)["survival"][:LEVELS]]
    survival += ["-"] * (LEVELS - len(survival))
    differences = (
        [_less(scored, base, r, base.row(t)) for r, t in zip(rows, temperatures, strict=True)] if base else []
    )
    return [
        scored.name,
        row["decode"],
        *(_tau(r) for r in rows),
        *("-" if scored is base else d for d in differences),
        *survival,
        f"{row['speedup']:.2f}x",
        f"{100 * row['draft_share']:.0f}%",
        f"{1000 * row['draft_share'] * row['tpot'] * row['tau']:.2f}",
        f"{card['train_seconds'] / 60:.1f} min" if "train_seconds" in card else "-",
        f"{card['parameters'] / 1e6:.2f} M",
        f"{card['drafter_kv_bytes_per_token']} B",
        "pass" if card["audit_passed"] else "FAIL",
    ]


def _accepted(row: dict[str, Any]) -> dict[str, Any]:
    """Replay where there is one, else what the decoder counted."""
    return row["replay"] or row


def _counts(row: dict[str, Any]) -> Counts:
    replay = row["replay"]
    return Counts(**replay["counts"]) if replay else Counts([], [])


def _tau(row: dict[str, Any]) -> str:
    found = _accepted(row)
    low, high = found["tau_interval"]
    mark = "" if row["replay"] and row["replay"]["method"] == "exact" else "~"
    return f"{found['tau']:.2f}{mark} ({low:.2f}..{high:.2f})"


def difference(row: dict[str, Any], other: dict[str, Any]) -> tuple[float, float, float] | None:
    """How much longer one setting's acceptance is than another's, and the 99 % interval of that.

    Paired by prompt, so that what makes a prompt easy for both counts for neither. None where they
    were not replayed on the same answers.
    """
    mine, theirs = _counts(row), _counts(other)
    if not mine.tokens or mine.tokens != theirs.tokens:
        return None
    low, high = agreement(mine, theirs)
    return mine.tau - theirs.tau, low, high


def _less(scored: Scored, base: Scored, row: dict[str, Any], other: dict[str, Any]) -> str:
    if any(s.card.get("target_moved") for s in (scored, base)):
        return "other target"  # whose answers may be as long, and say something else
    found = difference(row, other)
    return "other prompts" if found is None else "{:+.2f} ({:+.2f}..{:+.2f})".format(*found)
