"""Rounds counted in transformers' own assisted generation, with exports of each kind that it drafts with."""

import itertools
from pathlib import Path

import pytest
import torch
from engine_tests import exported, random_target
from transformers import LlamaConfig, MellumConfig

from distill.engine_costs.in_transformers import TransformersRounds
from drafters.hf.mtp_weights import Arrangement
from drafters.models.dflash import DFlash
from drafters.models.lm import DraftLM
from drafters.models.mtp import Mtp

PROMPT = list(range(3, 12))
MELLUM = {"mlp_layer_types": ["dense"] * 3, "layer_types": ["full_attention"] * 3}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return random_target(LlamaConfig, tmp_path_factory.mktemp("target"))


@pytest.fixture
def engine_of(tmp_path):
    """A drafter, exported, in transformers; its clock counts its own readings."""

    def make(target, drafter, kind, temperature=0.0):
        exported(drafter, target, "transformers", tmp_path / "draft")
        ticks = itertools.count()
        filters = {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        where = torch.float64, torch.device("cpu")
        source = target.model.name_or_path, None
        return TransformersRounds(
            source, Path(tmp_path / "draft"), kind, *where, filters, lambda: next(ticks)
        )

    return make


def itself(target):
    """The target as its own draft model."""
    return DraftLM.for_target(target, path=target.model.name_or_path, train=False).eval()


def test_plain_decoding_is_a_round_for_each_token(target, engine_of):
    with engine_of(target, itself(target), "lm").plain() as plain:
        found = plain.answer([PROMPT, PROMPT[:4]], 12)
        assert (found.rounds, found.tokens, found.drafted, found.prompt_tokens) == (22, 22, 0, 13)
        assert plain.pass_seconds(PROMPT, 4) == 1


@pytest.mark.parametrize("length", [1, 3, 5])
def test_target_as_its_own_drafter_has_everything_accepted(target, engine_of, length):
    engine = engine_of(target, itself(target), "lm")
    with engine.plain(), engine.drafting(length) as drafting:
        tokens = 1 + 4 * (length + 1)  # whole rounds; the first is the pass over the prompt
        found = drafting.answer([PROMPT], tokens)
    assert found.drafted == pytest.approx(found.rounds * length, abs=length)
    assert found.tokens == pytest.approx(found.rounds + found.drafted, abs=1)


def test_sampled_answers(target, engine_of):
    engine = engine_of(target, itself(target), "lm", temperature=1.0)
    with engine.plain() as plain, engine.drafting(2) as drafting:
        assert plain.answer([PROMPT], 9).rounds == 8
        assert drafting.answer([PROMPT], 9).rounds < 8


def test_a_block_drafts_its_depth_in_every_round(target, engine_of):
    drafter = DFlash.for_target(target, taps=[1, 2], layers=1, depth=4, anchors=0, mask_id=255).eval()
    engine = engine_of(target, drafter, "dflash")
    with engine.plain(), engine.drafting(4) as drafting:
        found = drafting.answer([PROMPT], 30)
    assert found.tokens < 1.5 * found.rounds, "it is not trained"
    assert found.drafted == pytest.approx(4 * found.rounds, abs=10)  # the last drafts are cut


def test_an_mtp_head_drafts_one_token_in_every_round(engine_of, tmp_path):
    target = random_target(MellumConfig, tmp_path / "target", **MELLUM)
    options = {"path": None, "draft_vocab_size": None, "qk_norm": True} | dict.fromkeys(Arrangement._fields)
    engine = engine_of(target, Mtp.for_target(target, depth=1, **options).eval(), "mtp")
    with engine.plain() as plain, engine.drafting(1) as drafting:
        assert plain.answer([PROMPT], 9).drafted == 0
        found = drafting.answer([PROMPT], 30)
    assert found.drafted == pytest.approx(found.rounds, abs=1)
