"""A scorecard as score.json has it, with numbers that are told apart."""

from __future__ import annotations

from typing import Any

from decode.evaluation.replay import Counts
from decode.evaluation.rows import Row
from decode.evaluation.scorecard import SCHEMA, Scorecard


def replay(tau: float = 2.0, counts: Counts | None = None, **more: Any) -> dict[str, Any]:
    """Acceptance on stored answers."""
    counts = counts or Counts([4, 4], [2.0, 2.0])
    found = {"method": "exact", "tau": tau, "tau_interval": [tau - 0.2, tau + 0.2], "survival": [0.6, 0.35]}
    found |= {"prompts": len(counts.rounds), "counts": counts._asdict(), "selection_tau": tau, "agrees": True}
    context = {"low": 0, "high": 128, "tokens": 6.0, "rounds": 4.0, "tau": 1.5}
    return found | {"difference_interval": [-0.1, 0.1], "by_context": [context]} | more


def row(temperature: float = 0.0, batch: int = 1, tau: float = 2.0, **more: Any) -> dict[str, Any]:
    """One setting."""
    found = {"temperature": temperature, "decode": "chain-2", "rule": "match", "lossy": False}
    found |= {"batch_size": batch, "nodes": 2, "tau": tau, "tau_interval": [tau - 0.25, tau + 0.25]}
    found |= {"survival": [0.61, 0.37], "alpha": [0.61, 0.6], "offered": [1.0, 1.0], "acceptance_rate": 0.49}
    found |= {"rounds": 100, "tokens": 198, "tokens_per_second": 211.5, "plain_tokens_per_second": 147.9}
    found |= {"speedup": 1.43, "overhead": 0.38, "draft_share": 0.25, "verify_share": 0.7}
    found |= {"other_share": 0.05, "ttft": 0.01, "tpot": 0.004, "timing": None, "quality": None, "plan": None}
    return found | {"replay": replay(tau + 0.02)} | more


def audit(**more: Any) -> dict[str, Any]:
    """One that passes."""
    draws = {"surprisal_z": 0.5, "surprisal_p": 0.6}
    run = {"temperature": 1.0, "decode": "chain-2", "tokens": 320, "impossible": 0, "pit": {}}
    found = {"tokens": 640, "own_row": 640, "equal": 637, "near_ties": 3, "mismatches": 0, "margin": 0.01}
    found |= {"rescored_in": "float32", "sampled": [run | draws | {"draft_tokens": 0}]}
    return found | draws | {"sampled_tokens": 320, "impossible": 0, "pit_p": 1.0, "passed": True} | more


def scorecard(rows: Any = None, **more: Any) -> dict[str, Any]:
    """Of a checkpoint scored at two temperatures and batch sizes."""
    rows = [row(0.0, 1, 1.98), row(1.0, 8, 1.52, replay=None)] if rows is None else rows
    found = {"schema": SCHEMA, "rows": rows, "audit": audit(), "audit_passed": True}
    found |= {"replay_agrees": True, "seed": 7, "prompts": 12, "max_new_tokens": 64, "repeats": 1}
    found |= {"dtype": "bfloat16", "threads": 1, "hardware": "Abacus 9000, 2 cores", "load_average": 0.4}
    found |= {"kv_bytes_per_token": 1024, "prompts_digest": "41e03126f24424a6"}
    found |= {"replayed_digest": "9c1185a5c5e9fc54", "drafter": "eagle"}
    found |= {"step": 600, "commit": "0123456789ab", "versions": {"torch": "2.13.0"}, "control": "none"}
    found |= {"parameters": 1_500_000, "drafter_kv_bytes_per_token": 512, "lossless_to": "target"}
    found |= {"quantize": "none"}
    found |= dict.fromkeys(("target_drift", "train_seconds", "train_cpu_seconds"))
    found |= dict.fromkeys(("elsewhere", "served_plan", "target", "train_precision"), "")
    return found | {name: [] for name in ("categories", "samples", "plan_choices", "served")} | more


def card_of(rows: Any = None, **more: Any) -> Scorecard:
    """The same, read."""
    return Scorecard.from_json(scorecard(rows, **more), "score.json")


def row_of(values: dict[str, Any]) -> Row:
    """A setting, read."""
    return card_of([values]).rows[0]
