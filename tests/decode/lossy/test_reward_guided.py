"""Reward-guided decoding: which model writes which step, and with which distribution."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from decode.errors import UserError
from decode.generation.generate import generate
from decode.lossy.reward_guided import DRAFT, TARGET, generate_judged
from decode.sampling import Sampler

V = 5
PROMPTS = [[1, 0], [2], [3, 3, 1]]
GREEDY = Sampler(0.0)


def of_length(n: int):
    """A test that ends a step after n tokens."""

    def begin():
        count = 0

        def ends(token: int) -> bool:
            nonlocal count
            count += 1
            return count == n

        return ends

    return begin


def judged(models, judge, least=0.5, step=4, prompts=PROMPTS, tokens=5, sampler=GREEDY, **options):
    options |= {"max_new_tokens": tokens, "sampler": sampler}
    return generate_judged(*models, prompts, judge, least, of_length(step), **options).outputs


@pytest.fixture
def models(tiny_target):
    return tiny_target(vocab=V), tiny_target(vocab=V, seed=7)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("least", "writer"), [(-math.inf, DRAFT), (math.inf, TARGET)])
def test_judge_that_likes_all_or_nothing_leaves_one_model(models, least, writer, temperature):
    options = {"sampler": Sampler(temperature), "seed": 3, "stop": [4]}
    found = judged(models, lambda *_: 0.0, least, step=3, tokens=11, **options)
    model, samples = (models[1], models[0])[writer], [writer] * len(PROMPTS)
    plain = generate(model, None, PROMPTS, samples=samples, max_new_tokens=11, **options).outputs
    assert [(one.tokens, one.stopped) for one in found] == [(one.tokens, one.stopped) for one in plain]
    for one in found:
        assert sum(step.tokens for step in one.steps) == len(one.tokens)
        assert {step.drafted for step in one.steps} == {writer == DRAFT}


def test_judge_sees_the_answer_so_far_and_the_step(models):
    seen = []

    def judge(request, answer, step):
        seen.append((request, [*answer], [*step]))
        return float(sum(step) % 2)

    outputs = judged(models, judge, step=2, tokens=8)
    for request, output in enumerate(outputs):
        mine = [line for line in seen if line[0] == request]
        place = 0
        for (_, answer, step), taken in zip(mine, output.steps, strict=True):
            assert answer == output.tokens[:place]
            assert taken.score == sum(step) % 2
            assert taken.drafted == (taken.score >= 0.5)
            if taken.drafted:
                assert output.tokens[place : place + taken.tokens] == step
            place += taken.tokens
    assert {step.drafted for output in outputs for step in output.steps} == {True, False}


def test_step_has_the_distribution_of_the_paper(models):
    """Of one token x: q(x) where the judge likes x, and p(x) times the mass of q that it does not like."""
    liked, rows, prompt, sampler = (1, 3), 4000, PROMPTS[0], Sampler(1.0)
    options = {"step": 1, "tokens": 1, "sampler": sampler, "seed": 0}
    found = judged(models, lambda _, __, step: float(step[0] in liked), prompts=[prompt] * rows, **options)
    rounds = []
    for model in models:
        generate(model, None, [prompt], max_new_tokens=1, sampler=sampler, on_round=rounds.append)
    p, q = (one.logits[0, 0].softmax(-1).tolist() for one in rounds)
    rejected = 1 - sum(q[x] for x in liked)
    expected = [(q[x] if x in liked else 0.0) + rejected * p[x] for x in range(V)]
    counts = [sum(one.tokens == [x] for one in found) for x in range(V)]
    assert stats.chisquare(counts, [rows * mass / sum(expected) for mass in expected]).pvalue > 0.001
    assert stats.chisquare(counts, [rows * mass / sum(p) for mass in p]).pvalue < 1e-6


@pytest.mark.parametrize("least", [0.5, 1.5], ids=["drafted", "rewritten"])
@pytest.mark.parametrize("smaller", [0, 1], ids=["target", "draft"])
def test_answer_ends_with_the_smaller_context(models, smaller, least):
    models[smaller].max_positions = 12
    prompts = [[1, 2, 3, 0, 1, 2], [1], [2, 2, 2]]
    for step in (1, 4, 30):
        found = judged(models, lambda *_: 1.0, least, step, prompts, tokens=20)
        assert [len(one.tokens) for one in found] == [6, 11, 9]
    with pytest.raises(UserError, match="prompt 1 has 12 tokens and leaves no room in a context of 12"):
        judged(models, lambda *_: 1.0, prompts=[[1], [1, 2, 3] * 4])


@pytest.mark.parametrize("score", [math.nan, None, "0.7", "good", torch.tensor(math.nan)], ids=str)
def test_score_that_is_no_number_is_refused(models, score):
    with pytest.raises(UserError, match=r"judge: its score of step 0 of prompt 0 is .* not a number"):
        judged(models, lambda *_: score)
    with pytest.raises(UserError, match="least score is NaN"):
        judged(models, lambda *_: 1.0, math.nan)


def test_score_may_be_of_any_type_of_number(models):
    for score in (1, True, torch.tensor(1.0), np.float32(1.0), math.inf):
        found = judged(models, lambda *_, s=score: s)
        assert all(step.drafted for one in found for step in one.steps)
