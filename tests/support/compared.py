"""Scorecards of several runs, as foredraft compare reads them, with numbers that are told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cards
from cards import replay, scorecard

from decode.evaluation.replay import Counts

TOKENS = [30, 20, 41, 8, 25, 33]
FAST = [10.0, 9.0, 16.0, 4.0, 11.0, 13.0]
SLOW = [20.0, 15.0, 30.0, 5.0, 16.0, 21.0]
PLAIN = {"plain_tokens": [30, 40, 50, 60, 70], "plain_seconds": [3.0, 4.2, 5.1, 5.9, 7.4]}


def timing(*speeds: float) -> dict[str, list[float]]:
    """Of five batches, each that much faster than plain decoding's."""
    seconds = [s / speed for s, speed in zip(PLAIN["plain_seconds"], speeds, strict=True)]
    return {"tokens": PLAIN["plain_tokens"], "seconds": seconds, **PLAIN}


def row(rounds, temperature=0.0, batch=1, speedup=1.5, tokens=TOKENS, **more: Any) -> dict[str, Any]:
    """One setting."""
    counts = Counts(tokens, rounds)
    found = replay(counts.tau, counts, tau_interval=counts.interval(), survival=[0.5, 0.25])
    decoded = {"tau": 9.0, "tau_interval": [8.0, 10.0], "survival": [0.9]}
    return cards.row(temperature, batch, **{**decoded, "speedup": speedup, "replay": found, **more})


def card(folder: Path, rows: list[dict[str, Any]], drafter: str = "eagle", **more: Any) -> str:
    """Written to a folder, whose path is given back."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"dtype": "float32", "hardware": "a machine", "prompts": 6, "train_seconds": 90.0}
    whole = scorecard(rows, **{**facts, "drafter": drafter, **more})
    (folder / "score.json").write_text(json.dumps(whole))
    return str(folder)
