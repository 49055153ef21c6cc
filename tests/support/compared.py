"""Scorecards of several runs, as foredraft compare reads them, with numbers that are told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from decode.evaluation.replay import Counts
from decode.evaluation.scorecard import SCHEMA

TOKENS = [30, 20, 41, 8, 25, 33]
FAST = [10.0, 9.0, 16.0, 4.0, 11.0, 13.0]
SLOW = [20.0, 15.0, 30.0, 5.0, 16.0, 21.0]
PLAIN = {"plain_tokens": [30, 40, 50, 60, 70], "plain_seconds": [3.0, 4.2, 5.1, 5.9, 7.4]}


def timed(*speeds: float) -> dict[str, list[float]]:
    """Of five batches, each that much faster than plain decoding's."""
    seconds = [s / speed for s, speed in zip(PLAIN["plain_seconds"], speeds, strict=True)]
    return {"tokens": PLAIN["plain_tokens"], "seconds": seconds, **PLAIN}


def row(
    rounds: list[float],
    temperature: float = 0.0,
    batch: int = 1,
    speedup: float = 1.5,
    tokens: list[int] = TOKENS,
    lossy: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """One setting."""
    counts = Counts(tokens, rounds)
    replay = {
        "method": "exact",
        "tau": counts.tau,
        "tau_interval": counts.interval(),
        "survival": [0.5, 0.25],
        "counts": counts._asdict(),
    }
    decoded = {"tau": 9.0, "tau_interval": [8.0, 10.0], "survival": [0.9], "tpot": 0.004, "draft_share": 0.25}
    setting = {"temperature": temperature, "batch_size": batch, "decode": "chain-2", "lossy": lossy}
    return setting | decoded | {"speedup": speedup, "replay": replay} | more


def card(folder: Path, rows: list[dict[str, Any]], drafter: str = "eagle", **more: Any) -> str:
    """Written to a folder, whose path is given back."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"schema": SCHEMA, "dtype": "float32", "hardware": "a machine", "threads": 1, "prompts": 6}
    facts |= {"audit_passed": True, "max_new_tokens": 64, "commit": "0123456789ab", "lossless_to": "target"}
    costs = {"parameters": 1_500_000, "drafter_kv_bytes_per_token": 512, "train_seconds": 90.0}
    whole = facts | costs | {"drafter": drafter, "rows": rows} | more
    (folder / "score.json").write_text(json.dumps(whole))
    return str(folder)
