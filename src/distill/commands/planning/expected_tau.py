"""Acceptance length to expect of a drafter before any run: public figures, never called measured."""

from __future__ import annotations

from itertools import pairwise
from math import log

from distill.commands.planning.constants import EAGLE3, LEAST_WEIGHTS, PUBLISHED

ENDINGS = ("", "-instruct")


def expected_tau(target: str, weights: int, drafter: str, prompts: int) -> str:
    """Say what acceptance length to expect, with its sources.

    Args:
        target: id of the target.
        weights: number of the target's weights.
        drafter: name in conf/drafter.
        prompts: that are answered and trained on.
    """
    if drafter != "eagle3":
        return f"no public figure for {drafter} by number of prompts; train a small run and look at its score"
    known = next((PUBLISHED[key] for end in ENDINGS if (key := target.lower() + end) in PUBLISHED), "")
    published = f"; for this target, {known}" if known else ""
    if weights < LEAST_WEIGHTS:
        return f"no public figure for a target this small by number of prompts{published}"
    low, high, sources = eagle3_range(prompts)
    if not low:
        range_ = f"below {high:.2f}"
    elif low == high:
        range_ = f"about {low:.2f}"
    else:
        range_ = f"{low:.2f} to {high:.2f}"
    what = "an estimate from chat data, targets of 7 and 8 B weights and chains of 3 in an engine"
    return f"{range_}, {what} ({sources}){published}"


def eagle3_range(prompts: int) -> tuple[float, float, str]:
    """Lower and upper end, 0 if unknown, and sources; linear in the logarithm of the prompts.

    Below the smallest public figure only the upper end is known; above the largest, that one is repeated.
    """
    if prompts < EAGLE3[0].prompts:
        return 0.0, EAGLE3[0].high, EAGLE3[0].source
    for left, right in pairwise(EAGLE3):
        if prompts < right.prompts:
            share = log(prompts / left.prompts) / log(right.prompts / left.prompts)
            low = left.low + share * (right.low - left.low)
            high = left.high + share * (right.high - left.high)
            return low, high, left.source if not share else f"between {left.source}; and {right.source}"
    return EAGLE3[-1].low, EAGLE3[-1].high, EAGLE3[-1].source
