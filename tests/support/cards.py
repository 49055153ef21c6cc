"""A scorecard as the scorer writes it, with numbers that are told apart."""

from __future__ import annotations

from typing import Any

from decode.evaluation.scorecard import SCHEMA


def row(temperature: float, batch: int, tau: float, **more: Any) -> dict[str, Any]:
    """One setting."""
    return {
        "temperature": temperature,
        "decode": "chain-2",
        "lossy": False,
        "batch_size": batch,
        "tau": tau,
        "tau_interval": [tau - 0.25, tau + 0.25],
        "survival": [0.61, 0.37],
        "speedup": 1.43,
        "tokens_per_second": 211.5,
        "plain_tokens_per_second": 147.9,
        "replay": {"tau": tau + 0.02, "method": "exact"},
        **more,
    }


def scorecard(**more: Any) -> dict[str, Any]:
    """Of a checkpoint scored at two temperatures and batch sizes."""
    return {
        "schema": SCHEMA,
        "rows": [row(0.0, 1, 1.98), row(1.0, 8, 1.52, replay=None)],
        "audit": {
            "passed": True,
            "tokens": 640,
            "own_row": 640,
            "equal": 637,
            "near_ties": 3,
            "mismatches": 0,
            "sampled": [{"tokens": 320, "impossible": 0}],
        },
        "dtype": "bfloat16",
        "threads": 1,
        "hardware": "Abacus 9000, 2 cores",
        "load_average": 0.4,
        "commit": "0123456789ab",
        "prompts": 12,
        "max_new_tokens": 64,
        "seed": 7,
        "control": "none",
        "target": "",
        **more,
    }
