"""Compare two scorecards on the same prompts: paired differences, and whether they are comparable."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from decode.evaluation.estimates import MIN_SAMPLES, central_interval, ratio, resampled_sums
from decode.evaluation.rows import Row
from decode.evaluation.scorecard import Scorecard
from decode.evaluation.served import BY_ENGINE


class Estimate(NamedTuple):
    """A number and its 95 % bootstrap interval, if there were enough samples."""

    value: float
    interval: tuple[float, float] | None

    def text(self, form: str) -> str:
        """`form` formats one number: "{:.2f}x"."""
        if self.interval is None:
            return form.format(self.value)
        low, high = self.interval
        bare = form.removesuffix("x")
        return f"{form.format(self.value)} ({bare.format(low)}..{bare.format(high)})"


def tau_difference(row: Row, other: Row) -> Estimate | None:
    """Acceptance length of one setting minus another's, paired by prompt.

    Pairing removes the difficulty of prompts. None if they were not replayed on the same answers.
    """
    mine, theirs = row.counts, other.counts
    if not mine.tokens or mine.tokens != theirs.tokens:
        return None
    difference = mine.tau - theirs.tau
    if len(mine.tokens) < MIN_SAMPLES:
        return Estimate(difference, None)
    tokens, rounds, other_rounds = resampled_sums([mine.tokens, mine.rounds, theirs.rounds]).T
    return Estimate(difference, central_interval(ratio(tokens, rounds) - ratio(tokens, other_rounds)))


def speedup(row: Row) -> Estimate:
    """Speedup over plain decoding, resampled by the parts that `Timing` has: decoded in turns.

    0 if an engine decodes; see `speedup_text`.
    """
    if not row.timing or len(row.timing.seconds) < MIN_SAMPLES:
        return Estimate(row.speed, None)
    return Estimate(row.speed, central_interval(_speedups(resampled_sums(_columns(row)))))


def speedup_text(row: Row) -> str:
    """Format the speedup with its interval, or that an engine decodes."""
    return BY_ENGINE if row.speedup is None else speedup(row).text("{:.2f}x")


def speedup_ratio(row: Row, other: Row) -> Estimate:
    """Ratio of two speedups, resampling the same batches for both; see `why_incomparable`."""
    value = float(ratio(np.array([row.speed]), np.array([other.speed]))[0])
    columns = _columns(row)
    if len(columns[0]) < MIN_SAMPLES:
        return Estimate(value, None)
    sums = resampled_sums([*columns, *_columns(other)])
    mine, theirs = sums[:, : len(columns)], sums[:, len(columns) :]
    return Estimate(value, central_interval(ratio(_speedups(mine), _speedups(theirs))))


def why_incomparable(card: Scorecard, row: Row, other_card: Scorecard, other: Row) -> str:
    """Why the speedups of two scorecards must not be divided; empty if they may be.

    They were measured in two processes. Their common baseline is plain decoding, on the same machine and of
    the same texts.
    """
    if card.conditions.elsewhere or other_card.conditions.elsewhere:
        return BY_ENGINE
    if card.checkpoint.target_drift or other_card.checkpoint.target_drift:
        return "other target"
    conditions = _comparison_keys(card, row), _comparison_keys(other_card, row)
    for name, value in conditions[0].items():
        if value != conditions[1][name]:
            return f"other {name}"
    if not row.timing or not other.timing:
        return "not timed by batch"
    return "" if row.timing.plain_tokens == other.timing.plain_tokens else "other answers"


def _comparison_keys(card: Scorecard, row: Row) -> dict[str, str | int]:
    """Settings that must be equal for plain decoding to be a common baseline."""
    conditions = card.conditions
    keys = {
        "hardware": conditions.hardware,
        "dtype": conditions.dtype,
        "threads": conditions.threads,
        "passes": row.timing.plain_passes if row.timing else "",
        "target": card.checkpoint.target,
        "prompts": conditions.prompts_digest,
        "max new tokens": conditions.max_new_tokens,
    }
    return keys | ({"seed": conditions.seed} if row.temperature > 0 else {})


def _columns(row: Row) -> list[list[float]]:
    """Tokens, seconds, plain tokens and plain seconds of each batch."""
    timing = row.timing
    assert timing, "not timed by batch"
    return [list(timing.tokens), timing.seconds, list(timing.plain_tokens), timing.plain_seconds]


def _speedups(sums: np.ndarray) -> np.ndarray:
    tokens, seconds, plain_tokens, plain_seconds = sums.T
    return ratio(ratio(tokens, seconds), ratio(plain_tokens, plain_seconds))
