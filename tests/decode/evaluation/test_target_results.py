"""What is kept of a target between scores: no result changes, and nothing is computed twice."""

from dataclasses import replace

import pytest
import torch
from exact import Grown

from decode.evaluation import teacher_forced as module
from decode.evaluation.replay import Rollout
from decode.evaluation.score import HeldOut, ScoreOptions, Setting, score
from decode.evaluation.teacher_forced import TargetResults
from decode.generation.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler

VOCAB, GREEDY = 6, Sampler(0.0)
PROMPTS = [[1, 4], [3], [2, 5, 1], [4]]
TEXT = torch.tensor([[1, 2, 3, 4]])


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab=VOCAB)


@pytest.fixture
def reads(target, monkeypatch):
    """Number of texts that the target has read."""
    seen, read = [], target.read
    monkeypatch.setattr(target, "read", lambda tokens: seen.append(len(tokens)) or read(tokens))
    return seen


def test_second_score_reads_no_answer_and_has_the_same_numbers(target, reads):
    outputs = generate(target, None, PROMPTS, max_new_tokens=12, sampler=GREEDY).outputs
    answers = [Rollout(p, o.tokens) for p, o in zip(PROMPTS, outputs, strict=True)]
    known, held_out = TargetResults(target), HeldOut(PROMPTS, rollouts={GREEDY: answers})
    options = ScoreOptions(12, audit_prompts=2)

    def scored(known):
        settings = [Setting(GREEDY, Plan(3, 2, 6))]
        return score(target, Grown(VOCAB), held_out, settings, options, known=known)

    alone, first, second = (scored(kept) for kept in (None, known, known))
    assert reads == [len(PROMPTS)] * 2, "read by the first score and by the one that keeps nothing"
    assert len(known.tie_widths) == 1
    assert alone.audit == first.audit == second.audit
    assert alone.rows[0].replay == first.rows[0].replay == second.rows[0].replay
    other = replace(options, max_new_tokens=6)
    score(target, Grown(VOCAB), held_out, [Setting(GREEDY, Plan(2))], other, known=known)
    assert len(known.tie_widths) == 2, "other texts have other ties"


def test_other_taps_and_other_texts_are_read(target, reads):
    known = TargetResults(target)
    assert known.read(TEXT) is known.read(TEXT.clone())
    target.tap((0,))
    assert known.read(TEXT).taps.shape[2] == 1
    known.read(TEXT.reshape(2, 2))
    known.read(TEXT + 1)
    assert len(reads) == 4


def test_nothing_is_kept_without_room_or_for_a_control_experiment(target, reads, monkeypatch):
    known = TargetResults(target)
    target.tap_transform = torch.zeros_like
    known.read(TEXT)
    target.tap_transform = None
    assert known.read(TEXT) is known.read(TEXT)
    monkeypatch.setattr(module, "MEMORY_SHARE", 0.0)
    known = TargetResults(target)
    assert known.read(TEXT) is not known.read(TEXT)
    assert len(reads) == 4
