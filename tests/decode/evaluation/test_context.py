"""Tau by context length: rounds of a replay are counted where they begin."""

import numpy as np
import pytest

from decode.evaluation.replay import RoundStarts, by_context
from decode.evaluation.teacher_forced import Rollout

DICE = np.random.default_rng(0)


def rollout(prompt: int, answer: int) -> Rollout:
    return Rollout([1] * prompt, [2] * answer)


def test_every_token_is_emitted_by_one_round():
    for starts, depth in [(1, 3), (7, 3), (40, 1), (40, 0), (3, 8)]:
        chain = RoundStarts(DICE.uniform(size=(starts, depth)), depth)
        assert chain.tokens.sum() == pytest.approx(starts, abs=1e-12)
        assert chain.begins.sum() == chain.count


def test_rounds_are_counted_by_the_context_that_they_begin_behind():
    """Known chains: all is accepted in one text, and nothing in the other."""
    rollouts = [rollout(100, 61), rollout(250, 21)]
    keeps = [np.ones((60, 4)), np.zeros((20, 4))]
    parts = by_context(rollouts, keeps, 4)
    # Rounds of the first text begin behind 101, 106, ..., 156 tokens; of the second behind 251, ..., 270.
    found = [(part.low, part.high, part.rounds, part.tokens) for part in parts]
    assert found == [(0, 128, 6, 30), (128, 256, 6 + 5, 30 + 5), (256, 512, 15, 15)]
    assert [part.tau for part in parts] == pytest.approx([5, 35 / 11, 1])


def test_the_parts_add_up_to_the_replay():
    lengths = [(int(DICE.integers(1, 700)), int(DICE.integers(1, 90))) for _ in range(20)]
    rollouts = [rollout(*pair) for pair in lengths]
    keeps = [DICE.uniform(size=(answer - 1, 3)) for _, answer in lengths]
    parts = by_context(rollouts, keeps, 3)
    assert sum(part.tokens for part in parts) == pytest.approx(sum(answer - 1 for _, answer in lengths))
    assert sum(part.rounds for part in parts) == pytest.approx(sum(RoundStarts(k, 3).count for k in keeps))
    assert all(part.low < part.high for part in parts)


def test_answers_of_one_token_have_no_rounds():
    assert by_context([rollout(5, 1)], [np.zeros((0, 3))], 3) == []
    assert by_context([], [], 3) == []
