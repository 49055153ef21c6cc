"""Survival s_j of answers of any length is that of a drafter whose acceptance is known."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from decode.evaluation.replay import RoundStarts
from decode.evaluation.survival import decoded_counts, kaplan_meier
from decode.generation.types import Output

ALPHA, DEPTH = 0.8, 4
TRUE = [ALPHA**j for j in range(1, DEPTH + 1)]  # 0.8, ..., 0.4096
LENGTHS = (8, 16, 32, 64)
SIGMAS = 4.5  # a correct estimate is outside once in 150,000


def simulated(dice: random.Random, length: int, depth: int = DEPTH, end: float = 0.0) -> Output:
    """One answer of so many tokens, each of which a draft has with chance ALPHA, and ends it with `end`."""
    found, left = Output([0]), length - 1
    while left and not found.stopped:
        accepted = next((j for j in range(depth) if dice.random() >= ALPHA), depth)
        emitted = min(accepted + 1, left)
        stop = next((j for j in range(emitted) if dice.random() < end), None)
        found.stopped, emitted = stop is not None, emitted if stop is None else stop + 1
        found.accepted.append(accepted)
        found.emitted.append(emitted)
        found.draft_lengths.append(depth)
        left -= emitted
    return found


def bounds(counts: np.ndarray) -> list[float]:
    """Greenwood's standard errors of s_j, by the true alpha."""
    terms = np.cumsum((1 - ALPHA) / (ALPHA * counts[1, 1:]))
    return [s * math.sqrt(t) for s, t in zip(TRUE, terms, strict=True)]


@pytest.mark.parametrize("end", [0.0, 0.05], ids=["length", "end tokens"])
@pytest.mark.parametrize("length", LENGTHS)
def test_survival_of_decoding_is_the_truth_at_every_length(length, end):
    dice = random.Random(length)
    counts = decoded_counts([simulated(dice, length, end=end) for _ in range(80_000 // length)], DEPTH)
    for found, true, error in zip(kaplan_meier(counts), TRUE, bounds(counts), strict=True):
        assert abs(found - true) < SIGMAS * error < 0.03, (found, true, error)


@pytest.mark.parametrize("length", [2, 3, *LENGTHS])
def test_survival_of_replay_is_exactly_the_truth(length):
    starts = length - 1
    keep = np.full((starts, DEPTH), ALPHA)
    for t in range(starts):
        keep[t, starts - t :] = 0.0  # behind the end of the text
    known = min(DEPTH, starts)
    found = kaplan_meier(RoundStarts(keep, DEPTH).reached)
    np.testing.assert_allclose(found[:known], TRUE[:known], rtol=1e-12)
    assert found[known:] == [0.0] * (DEPTH - known), "no text has such a place"


def test_no_rounds_have_survival_zero():
    assert kaplan_meier(np.zeros((2, 3))) == [0.0, 0.0]
    assert kaplan_meier(np.ones((2, 1))) == []
