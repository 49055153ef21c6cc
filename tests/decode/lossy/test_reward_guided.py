"""Reward-guided decoding: who writes which step, and with which distribution."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def models(tiny_target):
    return tiny_target(vocab=V), tiny_target(vocab=V, seed=7)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("least", "writer"), [(-math.inf, DRAFT), (math.inf, TARGET)])
def test_a_judge_that_likes_all_or_nothing_leaves_one_model_alone(models, least, writer, temperature):
    target, draft = models
    options = {"max_new_tokens": 11, "sampler": Sampler(temperature), "seed": 3, "stop": [4]}
    found = generate_judged(target, draft, PROMPTS, lambda *_: 0.0, least, of_length(3), **options)
    model = (draft, target)[writer]
    alone = generate(model, None, PROMPTS, samples=[writer] * len(PROMPTS), **options).outputs
    assert [one.tokens for one in found.outputs] == [one.tokens for one in alone]
    assert [one.stopped for one in found.outputs] == [one.stopped for one in alone]
    for one in found.outputs:
        assert sum(step.tokens for step in one.steps) == len(one.tokens)
        assert {step.drafted for step in one.steps} == {writer == DRAFT}


def test_the_judge_sees_the_answer_so_far_and_the_step(models):
    target, draft = models
    seen = []

    def judge(request, answer, step):
        seen.append((request, [*answer], [*step]))
        return float(sum(step) % 2)

    options = {"max_new_tokens": 8, "sampler": Sampler(0.0)}
    outputs = generate_judged(target, draft, PROMPTS, judge, 0.5, of_length(2), **options).outputs
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
    kept = {step.drafted for output in outputs for step in output.steps}
    assert kept == {True, False}


def test_a_step_has_the_law_of_the_paper(models):
    """Of one token x: q(x) where the judge likes x, and p(x) times the mass of q that it does not like."""
    target, draft = models
    liked, rows, prompt = (1, 3), 4000, PROMPTS[0]
    options = {"max_new_tokens": 1, "sampler": Sampler(1.0), "seed": 0}

    def likes(request, answer, step):
        return float(step[0] in liked)

    found = generate_judged(
        target,
        draft,
        [prompt] * rows,
        lambda _, __, step: float(step[0] in liked),
        0.5,
        of_length(1),
        **options,
    )
    law = {}
    for model in models:
        rounds = []
        generate(model, None, [prompt], on_round=rounds.append, **options)
        law[model] = rounds[0].logits[0, 0].softmax(-1).tolist()
    p, q = law[target], law[draft]
    rejected = 1 - sum(q[x] for x in liked)
    expected = [(q[x] if x in liked else 0.0) + rejected * p[x] for x in range(V)]
    counts = [sum(one.tokens == [x] for one in found.outputs) for x in range(V)]
    assert stats.chisquare(counts, [rows * mass / sum(expected) for mass in expected]).pvalue > 0.001
    wrong = [rows * mass for mass in p]
    assert stats.chisquare(counts, [m * rows / sum(wrong) for m in wrong]).pvalue < 1e-6


def test_an_answer_ends_with_the_smaller_context(tiny_target):
    target, draft = tiny_target(vocab=V), tiny_target(vocab=V, seed=7)
    draft.max_positions = 9
    options = {"max_new_tokens": 30, "sampler": Sampler(0.0)}
    (output,) = generate_judged(target, draft, [[1, 2]], lambda *_: 1.0, 0.5, of_length(4), **options).outputs
    assert len(output.tokens) == 7


@pytest.mark.parametrize("least", [0.5, 1.5], ids=["drafted", "rewritten"])
@pytest.mark.parametrize("smaller", ["target", "draft"])
def test_every_answer_ends_with_the_context_that_it_fits(tiny_target, smaller, least):
    models = {"target": tiny_target(vocab=V), "draft": tiny_target(vocab=V, seed=7)}
    models[smaller].max_positions = 12
    options = {"max_new_tokens": 20, "sampler": Sampler(0.0)}
    prompts = [[1, 2, 3, 0, 1, 2], [1], [2, 2, 2]]
    pair = models["target"], models["draft"]
    for step in (1, 4, 30):
        found = generate_judged(*pair, prompts, lambda *_: 1.0, least, of_length(step), **options)
        assert [len(one.tokens) for one in found.outputs] == [6, 11, 9]


def test_a_prompt_that_fills_a_context_is_refused(tiny_target):
    target, draft = tiny_target(vocab=V), tiny_target(vocab=V, seed=7)
    draft.max_positions = 3
    with pytest.raises(UserError, match="prompt 1 has 3 tokens and leaves no room in a context of 3"):
        generate_judged(
            target,
            draft,
            [[1], [1, 2, 3]],
            lambda *_: 1.0,
            0.5,
            of_length(4),
            max_new_tokens=5,
            sampler=Sampler(0.0),
        )


@pytest.mark.parametrize("score", [math.nan, None, "0.7", "good", torch.tensor(math.nan)], ids=str)
def test_a_score_that_is_no_number_is_refused(models, score):
    options = {"max_new_tokens": 5, "sampler": Sampler(0.0)}
    with pytest.raises(UserError, match=r"judge: its score of step 0 of prompt 0 is .* no number"):
        generate_judged(*models, PROMPTS, lambda *_: score, 0.5, of_length(4), **options)
    with pytest.raises(UserError, match="least score is NaN"):
        generate_judged(*models, PROMPTS, lambda *_: 1.0, math.nan, of_length(4), **options)


def test_a_score_may_be_of_any_type_of_number(models):
    options = {"max_new_tokens": 5, "sampler": Sampler(0.0)}
    for score in (1, True, torch.tensor(1.0), np.float32(1.0), math.inf):
        found = generate_judged(*models, PROMPTS, lambda *_, s=score: s, 0.5, of_length(4), **options)
        assert all(step.drafted for one in found.outputs for step in one.steps)
