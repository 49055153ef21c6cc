"""Chains whose depth adapts to what was accepted are lossless, and are scored as they decode."""

import random

import numpy as np
import pytest
from exact import Grown, RealKeys, check_lossless

from decode.depth_policy import DepthPolicy
from decode.errors import UserError
from decode.evaluation.acceptance import acceptance
from decode.evaluation.replay import Rollout, replay, why_inexact
from decode.evaluation.score import HeldOut, ScoreOptions, Setting, score
from decode.generation.generate import generate
from decode.plan import Plan
from decode.planning.cost_model import MeasuredCosts, RoundTiming
from decode.planning.policy_simulation import fit_policy, simulate
from decode.sampling import Sampler

# Drafting two tokens pays after an acceptance, one at first, none after a rejection or two.
PACE = DepthPolicy(0.45, ((1, (1.0, 1.42, 1.64)), (4, (1.0, 1.43, 1.65))))
RULES = [("fixed", "auto"), ("sampled", "token"), ("sampled", "block"), ("sampled", "match")]


@pytest.mark.parametrize(("proposal", "rule"), [*RULES[:3], pytest.param(*RULES[3], marks=pytest.mark.proof)])
@pytest.mark.ci("fixed-auto", "sampled-block")
def test_adaptive_depth_is_lossless(tiny_target, monkeypatch, proposal, rule):
    asked, depths = [], DepthPolicy.depths
    monkeypatch.setattr(DepthPolicy, "depths", lambda *args: asked.append(depths(*args)) or asked[-1])
    plan = Plan(2, proposal=proposal, rule=rule, adapt=PACE)
    together = proposal == "fixed" or rule == "match"
    # Rows that agree on a depth are a function of all tapes: one play at a time.
    options = {"length": 4, "rows": [0]} | ({"abreast": 1} if together else {})
    check_lossless(tiny_target(), Grown(3), plan, Sampler(0.9), **options)
    assert len({depth for depths in asked for depth in depths}) > 1
    if together:
        assert all(len(set(depths)) == 1 for depths in asked), "chosen tokens: one depth for all"
    else:
        assert any(len(set(depths)) > 1 for depths in asked), "drawn ones: each row's own"


def test_adaptive_depth_is_lossless_with_the_keys_of_the_production_coin(tiny_target):
    plan = Plan(2, proposal="sampled", adapt=PACE)
    check_lossless(tiny_target(), Grown(3), plan, Sampler(0.9), length=4, rows=[1], tosses=RealKeys)


def texts(target, drafter, plan, batch):
    prompts = [[i % 3, i // 3 % 3, i // 9] for i in range(12)]
    options = {"max_new_tokens": 12, "sampler": Sampler(0.8), "plan": plan, "seed": 3}
    outputs = []
    for first in range(0, 12, batch):
        part = range(first, min(first + batch, 12))
        outputs += generate(target, drafter, [prompts[i] for i in part], requests=part, **options).outputs
    return outputs


@pytest.mark.parametrize(("proposal", "rule"), RULES)
def test_text_of_a_row_does_not_depend_on_its_batch(tiny_target, proposal, rule):
    target, plan = tiny_target(), Plan(2, proposal=proposal, rule=rule, adapt=PACE)
    single, together = (texts(target, Grown(3), plan, batch) for batch in (1, 12))
    assert [o.tokens for o in single] == [o.tokens for o in together]
    assert {0, 1, 2} <= {depth for o in [*single, *together] for depth in o.draft_lengths}
    if proposal == "fixed" or rule == "match":
        assert [o.tokens for o in texts(target, None, Plan(), 12)] == [o.tokens for o in together]
    else:
        assert [o.draft_lengths for o in single] == [o.draft_lengths for o in together]


@pytest.mark.parametrize("name", ["eagle", "lm", "suffix", "lyanna"])
def test_rounds_that_draft_nothing_leave_the_drafters_state_right(tiny_target, make_drafter, name):
    """What it drafts after a pause is what one that never paused drafts."""
    target = tiny_target()
    drafter = make_drafter(name, target)
    target.tap(drafter.taps)
    drafts, propose = [], drafter.propose

    def spy(state, target, sampler, coin, plan):
        draft = propose(state, target, sampler, coin, plan)
        drafts[-1][int(coin._position[0])] = draft.tokens[0].tolist()
        return draft

    drafter.propose = spy
    for plan in (Plan(2), Plan(2, adapt=PACE)):
        drafts.append({})
        generate(target, drafter, [[1, 2, 0, 1]], max_new_tokens=40, sampler=Sampler(0.9), plan=plan)
    same = drafts[0].keys() & drafts[1].keys()
    assert same
    for place in same:
        paused = drafts[1][place]
        assert paused == drafts[0][place][: len(paused)]


# -- scores --------------------------------------------------------------------------------------


SAMPLER, OPTIONS = Sampler(0.8), {"max_new_tokens": 30, "stop": [4], "seed": 2}


def answers(target):
    dice = random.Random(3)
    prompts = [[dice.randrange(5) for _ in range(dice.randint(1, 6))] for _ in range(9)]
    run = generate(target, None, prompts, sampler=SAMPLER, **OPTIONS)
    return [Rollout(p, o.tokens) for p, o in zip(prompts, run.outputs, strict=True)]


class Linear:
    """Costs of a machine."""

    def round_seconds(self, plan, batch):
        return 1 + 0.25 * plan.depth * (1 + 0.2 * (batch - 1))

    def idle_seconds(self, batch):
        return 1.05


@pytest.mark.parametrize("batch", [1, 3])
def test_simulated_rounds_are_those_of_the_decoder(tiny_target, batch):
    target = tiny_target(vocab=5)
    rollouts = answers(target)
    (found,) = replay(target, Grown(5), rollouts, [Plan(3)], SAMPLER, every_start=True)
    plan = Plan(3, adapt=fit_policy(Plan(3), found.keeps, Linear(), batch))
    outputs = []
    for first in range(0, 9, batch):
        part, requests = rollouts[first : first + batch], range(first, first + batch)
        options = OPTIONS | {"sampler": SAMPLER, "plan": plan, "requests": requests}
        outputs += generate(target, Grown(5), [r.prompt for r in part], **options).outputs
    assert [o.tokens for o in outputs] == [r.answer for r in rollouts]
    rounds = [len(o.emitted) for o in outputs]
    assert sum(rounds) == simulate(plan, found.keeps, Linear(), batch).rounds
    assert len({depth for o in outputs for depth in o.draft_lengths}) > 1
    if batch == 1:
        (walked,) = replay(target, Grown(5), rollouts, [plan], SAMPLER, batch_size=1)
        assert walked.counts.rounds == rounds


def test_scorecard_says_that_rounds_depend_on_the_batch(tiny_target):
    target, plan = tiny_target(vocab=5), Plan(2, adapt=PACE)
    rollouts = answers(target)
    reason = "drafts depend on the other rows of the batch"
    assert why_inexact(plan, SAMPLER, Grown(5)) == reason
    assert "earlier rounds" in why_inexact(Plan(2, proposal="sampled", adapt=PACE), SAMPLER, Grown(5))
    settings = [Setting(SAMPLER, plan, batch) for batch in (1, 4)]
    held_out = HeldOut([r.prompt for r in rollouts], rollouts={SAMPLER: rollouts})
    card = score(target, Grown(5), held_out, settings, ScoreOptions(**OPTIONS, audit_prompts=2))
    for row in card.rows:
        assert (row.decode, row.replay.method) == ("chain-2 (adaptive)", f"estimate ({reason})")
    (single,) = acceptance(target, Grown(5), rollouts, [plan], SAMPLER, **OPTIONS, batch_size=1)
    assert card.rows[0].replay.tau == pytest.approx(single.counts.tau)
    assert card.audit_passed


# -- the policy ------------------------------------------------------------------------------------


def test_depth_follows_acceptance_and_forgets():
    policy = DepthPolicy(0.5, ((1, tuple(1 + 0.25 * k for k in range(6))),))
    counts = policy.initial_counts(1)
    (first,) = policy.depths(counts, per_row=True)
    for _ in range(13):
        (easy,) = policy.depths(counts, per_row=True)
        counts = policy.update(counts, [easy], [easy])
    for _ in range(41):
        (hard,) = policy.depths(counts, per_row=True)
        counts = policy.update(counts, [0], [max(hard, 1)])
    assert (first, easy, hard) == (1, 5, 0)
    for _ in range(60):
        counts = policy.update(counts, [0], [0])
    assert policy.depths(counts, per_row=True) == [first]


def test_between_batch_sizes_costs_are_in_proportion():
    policy = DepthPolicy(0.5, ((1, (1.0, 2.0)), (5, (2.0, 6.0))))
    assert policy.round_costs(3).tolist() == [1.5, 4]
    assert policy.round_costs(9).tolist() == [2, 6]


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"prior": 0.5}, "advise"),
        ({"prior": 0.5, "costs": {}}, "advise"),
        ({"prior": 1.5, "costs": {1: [1, 1, 1]}}, "prior must be from 0 to 1"),
        ({"prior": 0.5, "costs": {1: [1, 0, 1]}}, "costs above 0"),
        ({"prior": 0.5, "costs": {1: [1, 1, 1], 2: [1, 1]}}, "the same number of costs"),
        ({"prior": 0.5, "costs": {1: [1, 1]}}, "0 to decode.depth=2"),
        ({"prior": 0.5, "costs": {1: []}}, "at least one"),
        ({"prior": 0.5, "costs": {1: 3}}, "all values must be numbers"),
        ({"prior": "high", "costs": {1: [1, 1, 1]}}, "all values must be numbers"),
        (3, "advise"),
    ],
)
def test_wrong_depth_policy_is_refused(given, word):
    with pytest.raises(UserError, match=word):
        Plan(2, adapt=given)


def test_depth_policy_is_for_single_lossless_chains():
    given = {"prior": 0.5, "costs": {8: [1, 2, 3], 1: [1, 1.5, 2]}}
    plan, sampled = Plan(2, adapt=given), {"drafts": 2, "proposal": "sampled"}
    assert plan.adapt == DepthPolicy(0.5, ((1, (1, 1.5, 2)), (8, (1, 2, 3))))
    assert plan.name == "chain-2 (adaptive)"
    for other in ({"width": 2, "nodes": 4}, sampled, {"rule": "typical", "lossy": True}):
        with pytest.raises(UserError, match="single lossless chain"):
            Plan(2, adapt=given, **other)


def test_measured_costs_make_a_depth_policy():
    plans = (Plan(), Plan(1), Plan(2))
    timed = [RoundTiming(p, b, p.nodes + 1, 0.1 * (1 + p.depth), 1.0, 0.1) for p in plans for b in (1, 4)]
    found = fit_policy(Plan(2), [np.full((9, 2), 0.5)], MeasuredCosts(timed), 4)
    assert found.prior == 0.5
    assert dict(found.costs)[1] == pytest.approx((1.2 / 1.1, 1.3 / 1.1, 1.4 / 1.1), abs=1e-3)
    assert [size for size, _ in found.costs] == [1, 2, 4]
