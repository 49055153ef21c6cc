"""Rounds counted in transformers' own assisted generation."""

import itertools

import pytest
import torch
from workbench import make_target

from distill.engine_costs.in_transformers import TransformersRounds

PROMPT = list(range(3, 12))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target") / "t")


def engine_of(target, drafter, temperature=0.0):
    ticks = itertools.count()
    filters = {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    cpu = torch.device("cpu")
    return TransformersRounds((target, None), drafter, {}, torch.float64, cpu, filters, lambda: next(ticks))


def test_plain_decoding_is_a_round_for_each_token(target):
    with engine_of(target, target).plain() as plain:
        found = plain.answer([PROMPT, PROMPT[:4]], 12)
        assert (found.rounds, found.tokens, found.drafted, found.prompt_tokens) == (22, 22, 0, 13)
        assert plain.pass_seconds(PROMPT, 4) == 1


@pytest.mark.parametrize("length", [1, 3, 5])
def test_target_as_its_own_drafter_has_everything_accepted(target, length):
    engine = engine_of(target, target)
    with engine.plain(), engine.drafting(length) as drafting:
        tokens = 1 + 4 * (length + 1)  # whole rounds; the first is the pass over the prompt
        found = drafting.answer([PROMPT], tokens)
    assert found.drafted == pytest.approx(found.rounds * length, abs=length)
    assert found.tokens == pytest.approx(found.rounds + found.drafted, abs=1)


def test_another_model_is_hardly_accepted_and_drafts_as_much(target, tmp_path):
    engine = engine_of(target, make_target(tmp_path / "other", seed=5))
    with engine.plain(), engine.drafting(3) as drafting:
        found = drafting.answer([PROMPT], 30)
    assert found.tokens < 1.5 * found.rounds
    assert found.drafted > 2.5 * found.rounds


def test_sampled_answers(target):
    engine = engine_of(target, target, temperature=1.0)
    with engine.plain() as plain, engine.drafting(2) as drafting:
        assert plain.answer([PROMPT], 9).rounds == 8
        assert drafting.answer([PROMPT], 9).rounds < 8
