"""Two scorecards against each other, on the same prompts, and what of them may be compared at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from decode.evaluation.bootstrap import drawn, middle, ratio
from decode.evaluation.replay import Counts

FEWEST = 5  # prompts or batches; drawing fewer again gives intervals that are far too narrow
TIMED = ("tokens", "seconds", "plain_tokens", "plain_seconds")
# Of a scorecard; plain decoding is no common yardstick where one of these differs.
CONDITIONS = ("hardware", "dtype", "threads", "target", "prompts_digest", "max_new_tokens")
Row = Mapping[str, Any]


class Estimate(NamedTuple):
    """A number and its 95 % bootstrap interval, if there was enough to draw from."""

    value: float
    interval: tuple[float, float] | None

    def text(self, form: str) -> str:
        """`form` formats one number: "{:.2f}x"."""
        if self.interval is None:
            return form.format(self.value)
        low, high = self.interval
        bare = form.removesuffix("x")
        return f"{form.format(self.value)} ({bare.format(low)}..{bare.format(high)})"


def accepted(row: Row) -> Row:
    """Replay where there is one, else what the decoder counted."""
    return row.get("replay") or row


def exact(row: Row) -> bool:
    """Whether acceptance was replayed without a coin."""
    return bool(row.get("replay")) and row["replay"]["method"] == "exact"


def counts(row: Row) -> Counts:
    """Of each replayed prompt; empty where nothing was replayed."""
    replay = row["replay"]
    return Counts(**replay["counts"]) if replay else Counts([], [])


def less(row: Row, other: Row) -> Estimate | None:
    """How much longer one setting's acceptance is than another's, paired by prompt.

    What makes a prompt easy for both counts for neither. None where they were not replayed on the
    same answers.
    """
    mine, theirs = counts(row), counts(other)
    if not mine.tokens or mine.tokens != theirs.tokens:
        return None
    difference = mine.tau - theirs.tau
    if len(mine.tokens) < FEWEST:
        return Estimate(difference, None)
    tokens, rounds, others = drawn([mine.tokens, mine.rounds, theirs.rounds]).T
    return Estimate(difference, middle(ratio(tokens, rounds) - ratio(tokens, others)))


def speedup(row: Row) -> Estimate:
    """Over plain decoding, paired by batch: both decoded the same prompts within the same seconds."""
    timed = row.get("timed")  # scorecards were once without
    if not timed or len(timed["seconds"]) < FEWEST:
        return Estimate(row["speedup"], None)
    return Estimate(row["speedup"], middle(_speedups(drawn(_columns(row)))))


def faster(row: Row, other: Row) -> Estimate:
    """Ratio of two speedups at `comparable` settings, drawing the same batches for both."""
    value = float(ratio(np.array([row["speedup"]]), np.array([other["speedup"]]))[0])
    if len(row["timed"]["seconds"]) < FEWEST:
        return Estimate(value, None)
    sums = drawn([*_columns(row), *_columns(other)])
    mine, theirs = sums[:, : len(TIMED)], sums[:, len(TIMED) :]
    return Estimate(value, middle(ratio(_speedups(mine), _speedups(theirs))))


def comparable(card: Row, row: Row, other_card: Row, other: Row) -> str:
    """Why the speedups of two scorecards are not to be divided by each other; empty if they may be.

    They were measured in two processes. What both have is plain decoding, on the same machine and of
    the same texts.
    """
    if card.get("target_moved") or other_card.get("target_moved"):
        return "other target"
    for name in (*CONDITIONS, *["seed"] * (row["temperature"] > 0)):
        if card.get(name) != other_card.get(name):
            return f"other {name.removesuffix('_digest').replace('_', ' ')}"
    if not row.get("timed") or not other.get("timed"):
        return "not timed by batch"
    return "" if row["timed"]["plain_tokens"] == other["timed"]["plain_tokens"] else "other answers"


def _columns(row: Row) -> list[list[float]]:
    return [row["timed"][name] for name in TIMED]


def _speedups(sums: np.ndarray) -> np.ndarray:
    tokens, seconds, plain_tokens, plain_seconds = sums.T
    return ratio(ratio(tokens, seconds), ratio(plain_tokens, plain_seconds))
