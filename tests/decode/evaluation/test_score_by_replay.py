"""A target that only an engine decodes is scored by replay, with the same numbers."""

import json
from dataclasses import replace

import pytest
from heads import trained

from decode.errors import UserError
from decode.evaluation.replay import Rollout
from decode.evaluation.score import HeldOut, ScoreOptions, Setting, score
from decode.evaluation.scorecard import DECODED, Scorecard
from decode.generation.generate import generate
from decode.model.abilities import Abilities
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.models.eagle import Eagle

PROMPTS = [[5, 9, 2, 7, 3], [4], [11, 4, 8, 6, 12, 2, 8, 8], [11, 11, 2], [10, 1]]
GREEDY, DRAWN = Sampler(0.0), Sampler(1.0)
SETTINGS = [Setting(GREEDY, Plan(depth=2)), Setting(DRAWN, Plan(depth=2, proposal="sampled"), 2)]
OPTIONS = ScoreOptions(max_new_tokens=16, seed=4)


@pytest.fixture(scope="module")
def parts(tiny_target):
    """Target, drafter, and the target's answers with both samplers."""
    target, drafter = trained(tiny_target, Eagle, feature_noise=0.0, feature_weight=1.0)
    rollouts = {}
    for sampler in (GREEDY, DRAWN):
        outputs = generate(target, None, PROMPTS, max_new_tokens=16, sampler=sampler).outputs
        rollouts[sampler] = [Rollout(p, o.tokens) for p, o in zip(PROMPTS, outputs, strict=True)]
    return target, drafter, HeldOut(PROMPTS[:2], rollouts=rollouts, reserved=2)


@pytest.fixture
def elsewhere(parts, monkeypatch):
    """The same, of a target that cannot be decoded here."""
    monkeypatch.setattr(parts[0], "abilities", Abilities(decode="it goes forward", own_cache=True))
    return parts


@pytest.fixture(scope="module")
def ordinary(parts):
    return score(*parts, SETTINGS, OPTIONS)


def test_replayed_numbers_are_those_of_a_target_that_decodes(ordinary, elsewhere):
    steps = []
    card = score(*elsewhere, SETTINGS, OPTIONS, lambda *at: steps.append(at))
    assert steps == [(1, 2), (2, 2)]
    for row, other in zip(card.rows, ordinary.rows, strict=True):
        assert row.replay == replace(other.replay, difference_interval=None)
        same = other.replay
        assert (row.tau, row.survival, row.tau_interval) == (same.tau, same.survival, same.tau_interval)
        assert row.replay.selection_tau == row.replay.counts.part(2).tau
        assert row.alpha == [row.survival[0], row.survival[1] / row.survival[0]]
        assert row.tau > 1
        assert {getattr(row, name) for name in DECODED} == {None}
        assert row.timing is None
    assert (card.audit, card.audited, card.conditions.prompts) == (None, "not run", 0)
    assert card.conditions.elsewhere == "it goes forward"
    assert not ordinary.conditions.elsewhere
    values = json.loads(json.dumps(card.to_json()))
    assert [values[name] for name in ("speedup", "audit", "audit_passed", "tpot")] == [None] * 4
    assert Scorecard.from_json(values, "score.json") == card
    assert not card.pays


@pytest.mark.parametrize(
    ("plan", "sampler", "reason"),
    [
        (Plan(depth=2, width=2, nodes=4), GREEDY, "engines verify chains"),
        (Plan(), GREEDY, "engines verify chains"),
        (Plan(depth=2, proposal="sampled", drafts=2), DRAWN, "engines verify chains"),
        (Plan(depth=2, proposal="sampled", rule="block"), DRAWN, "weighs whole paths"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_plan_that_cannot_be_replayed_is_refused(plan, sampler, reason, elsewhere):
    with pytest.raises(UserError, match=reason):
        score(*elsewhere, [Setting(sampler, plan)], OPTIONS)


def test_score_without_answers_is_refused(elsewhere):
    target, drafter, _ = elsewhere
    with pytest.raises(UserError, match=r"score\.replay_prompts"):
        score(target, drafter, HeldOut(PROMPTS), SETTINGS, OPTIONS)
