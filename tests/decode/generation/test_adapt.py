"""Chains that adapt to what was accepted: lossless, a row's text its own, and scored as they decode."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from exact import Grown, RealKeys, check_lossless

from decode.depth_policy import DepthPolicy
from decode.errors import UserError
from decode.evaluation.acceptance import acceptance, round_counts
from decode.evaluation.replay import Rollout, replay, why_inexact
from decode.evaluation.score import HeldOut, ScoreOptions, Setting, score
from decode.generation import adaptive as adapt
from decode.generation.generate import generate
from decode.plan import Plan
from decode.planning.cost_model import MeasuredCosts, RoundTiming
from decode.planning.policy_simulation import fit_policy, simulate
from decode.planning.round_timing import measure
from decode.sampling import Sampler

# Drafting two tokens pays after an acceptance, one at first, none after a rejection or two.
PACE = DepthPolicy(0.45, ((1, (1.0, 1.42, 1.64)), (4, (1.0, 1.43, 1.65))))
RULES = [("fixed", "auto"), ("sampled", "token"), ("sampled", "block"), ("sampled", "match")]


def watched(monkeypatch):
    """All depths that a policy asks for, in a list that fills."""
    asked, depths = [], DepthPolicy.depths

    def spy(self, counts, alone):
        found = depths(self, counts, alone)
        asked.append(found)
        return found

    monkeypatch.setattr(DepthPolicy, "depths", spy)
    return asked


@pytest.mark.parametrize(("proposal", "rule"), [*RULES[:3], pytest.param(*RULES[3], marks=pytest.mark.proof)])
@pytest.mark.ci("fixed-auto", "sampled-block")
def test_a_pace_is_lossless(tiny_target, monkeypatch, proposal, rule):
    """Enumerated through the loop, cache and rules, every key used once."""
    asked = watched(monkeypatch)
    plan = Plan(2, proposal=proposal, rule=rule, adapt=PACE)
    target = tiny_target()
    together = proposal == "fixed" or rule == "match"
    # Rows that agree on a depth are a function of all tapes: one play at a time.
    options = {"length": 4, "rows": [0]} | ({"abreast": 1} if together else {})
    check_lossless(target, Grown(3), plan, Sampler(0.9), **options)
    assert len({depth for depths in asked for depth in depths}) > 1
    if together:
        assert all(len(set(depths)) == 1 for depths in asked), "chosen tokens: one depth for all"
    else:
        assert any(len(set(depths)) > 1 for depths in asked), "drawn ones: each row's own"


def test_a_pace_is_lossless_with_the_keys_of_production(tiny_target):
    plan = Plan(2, proposal="sampled", adapt=PACE)
    check_lossless(tiny_target(), Grown(3), plan, Sampler(0.9), length=4, rows=[1], tosses=RealKeys)


def texts(target, drafter, plan, company):
    prompts = [[i % 3, i // 3 % 3, i // 9] for i in range(12)]
    options = {"max_new_tokens": 12, "sampler": Sampler(0.8), "plan": plan, "seed": 3}
    outputs = []
    for first in range(0, 12, company):
        part = list(range(first, min(first + company, 12)))
        run = generate(target, drafter, [prompts[i] for i in part], requests=part, **options)
        outputs += run.outputs
    return outputs


@pytest.mark.parametrize(("proposal", "rule"), RULES)
def test_a_rows_text_is_its_own_in_any_company(tiny_target, proposal, rule):
    target, plan = tiny_target(), Plan(2, proposal=proposal, rule=rule, adapt=PACE)
    alone, together = (texts(target, Grown(3), plan, company) for company in (1, 12))
    assert [o.tokens for o in alone] == [o.tokens for o in together]
    assert {0, 1, 2} <= {depth for o in [*alone, *together] for depth in o.draft_lengths}
    if proposal == "fixed" or rule == "match":
        plain = texts(target, None, Plan(), 12)
        assert [o.tokens for o in plain] == [o.tokens for o in together]
    else:
        assert [o.draft_lengths for o in alone] == [o.draft_lengths for o in together]


def test_rounds_that_draft_nothing_leave_a_drafter_as_if_it_had_never_paused(tiny_target, make_drafter):
    """A real drafter's state: what it drafts after a pause is what one that never paused drafts."""
    target = tiny_target()
    for name in ("eagle", "lm", "suffix", "lyanna"):
        drafter = make_drafter(name, target)
        drafts: list[dict] = []
        for plan in (Plan(2), Plan(2, adapt=PACE)):
            found, propose = {}, drafter.propose
            target.tap(drafter.taps)

            def spy(state, target, sampler, coin, plan, found=found, propose=propose):
                draft = propose(state, target, sampler, coin, plan)
                found[int(coin._position[0])] = draft.tokens[0].tolist()
                return draft

            drafter.propose = spy
            generate(target, drafter, [[1, 2, 0, 1]], max_new_tokens=40, sampler=Sampler(0.9), plan=plan)
            drafter.propose = propose
            drafts.append(found)
        same = drafts[0].keys() & drafts[1].keys()
        assert same
        for place in same:
            paused = drafts[1][place]
            assert paused == drafts[0][place][: len(paused)], name


# -- scores --------------------------------------------------------------------------------------


def answers(target, sampler, count=9, length=30):
    dice = random.Random(3)
    prompts = [[dice.randrange(5) for _ in range(dice.randint(1, 6))] for _ in range(count)]
    run = generate(target, None, prompts, max_new_tokens=length, sampler=sampler, stop=[4], seed=2)
    return [Rollout(p, o.tokens) for p, o in zip(prompts, run.outputs, strict=True)]


class Linear:
    """Costs of a machine."""

    def round_seconds(self, plan, batch):
        return 1 + 0.25 * plan.depth * (1 + 0.2 * (batch - 1))

    def idle_seconds(self, batch):
        return 1.05


@pytest.mark.parametrize("batch", [1, 3])
def test_a_rehearsal_is_what_the_decoder_does(tiny_target, batch):
    target, sampler = tiny_target(vocab=5), Sampler(0.8)
    rollouts = answers(target, sampler)
    (found,) = replay(target, Grown(5), rollouts, [Plan(3)], sampler)
    plan = Plan(3, adapt=fit_policy(Plan(3), found.keeps, Linear(), batch))
    played = simulate(plan, found.keeps, Linear(), batch)
    rounds, offered = 0, set()
    for first in range(0, 9, batch):
        part = rollouts[first : first + batch]
        run = generate(
            target,
            Grown(5),
            [r.prompt for r in part],
            max_new_tokens=30,
            sampler=sampler,
            plan=plan,
            stop=[4],
            seed=2,
            requests=list(range(first, first + batch)),
        )
        assert [o.tokens for o in run.outputs] == [r.answer for r in part]
        rounds += sum(len(o.emitted) for o in run.outputs)
        offered |= {depth for o in run.outputs for depth in o.draft_lengths}
    assert rounds == played.rounds
    assert len(offered) > 1


def test_a_scorecard_counts_what_depends_on_company_and_says_so(tiny_target):
    target, sampler = tiny_target(vocab=5), Sampler(0.8)
    rollouts = answers(target, sampler)
    plan = Plan(2, adapt=PACE)
    assert why_inexact(plan, sampler, Grown(5)) == "drafts depend on the rows beside them"
    assert (
        why_inexact(Plan(2, proposal="sampled", adapt=PACE), sampler, Grown(5))
        == "drafts depend on earlier rounds"
    )
    settings = [Setting(sampler, plan, batch) for batch in (1, 4)]
    options = {"max_new_tokens": 30, "stop": [4], "seed": 2, "audit_prompts": 2}
    held_out = HeldOut([r.prompt for r in rollouts], rollouts={sampler: rollouts})
    card = score(target, Grown(5), held_out, settings, ScoreOptions(**options))
    for row in card.rows:
        assert row.decode == "chain-2 (adaptive)"
        assert row.replay.method == "estimate (drafts depend on the rows beside them)"
    (alone,) = acceptance(
        target, Grown(5), rollouts, [plan], sampler, max_new_tokens=30, stop=[4], seed=2, batch_size=1
    )
    assert card.headline.replay.tau == pytest.approx(alone.counts.tau)
    assert card.audit_passed


def test_one_that_remembers_is_walked_at_its_pace(tiny_target):
    """Alone, rounds at a policy are what walking through the text says."""
    from decode.evaluation.stateful_replay import walk

    target, sampler = tiny_target(vocab=5), Sampler(0.8)
    rollouts, plan = answers(target, sampler), Plan(2, adapt=PACE)
    rounds, _ = walk(target, Grown(5), rollouts, plan, sampler, batch_size=1)
    outputs = [
        generate(
            target,
            Grown(5),
            [r.prompt],
            max_new_tokens=30,
            sampler=sampler,
            plan=plan,
            stop=[4],
            seed=2,
            requests=[i],
        ).outputs[0]
        for i, r in enumerate(rollouts)
    ]
    assert round_counts(outputs).rounds == rounds


# -- the policy ------------------------------------------------------------------------------------


def test_a_pace_follows_acceptance_and_forgets():
    policy = DepthPolicy(0.5, ((1, tuple(1 + 0.25 * k for k in range(6))),))
    counts = policy.initial_counts(1)
    (first,) = policy.depths(counts, per_row=True)
    for _ in range(12):
        (depth,) = policy.depths(counts, per_row=True)
        counts = policy.update(counts, [depth], [depth])
    (easy,) = policy.depths(counts, per_row=True)
    for _ in range(40):
        (depth,) = policy.depths(counts, per_row=True)
        counts = policy.update(counts, [0], [max(depth, 1)])
    (hard,) = policy.depths(counts, per_row=True)
    assert (first, easy) == (1, 5)
    assert hard == 0
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
        ({"prior": 0.5}, "as advise prints it"),
        ({"prior": 0.5, "costs": {}}, "as advise prints it"),
        ({"prior": 1.5, "costs": {1: [1, 1, 1]}}, "prior must be from 0 to 1"),
        ({"prior": 0.5, "costs": {1: [1, 0, 1]}}, "costs above 0"),
        ({"prior": 0.5, "costs": {1: [1, 1, 1], 2: [1, 1]}}, "the same number of costs"),
        ({"prior": 0.5, "costs": {1: [1, 1]}}, "0 to decode.depth=2"),
        ({"prior": 0.5, "costs": {1: []}}, "at least one"),
        ({"prior": 0.5, "costs": {1: 3}}, "all values must be numbers"),
        ({"prior": "high", "costs": {1: [1, 1, 1]}}, "all values must be numbers"),
        (3, "what foredraft advise prints"),
    ],
)
def test_a_pace_that_cannot_be_is_refused(given, word):
    with pytest.raises(UserError, match=word):
        Plan(2, adapt=given)


def test_a_pace_is_for_single_lossless_chains():
    given = {"prior": 0.5, "costs": {8: [1, 2, 3], 1: [1, 1.5, 2]}}
    plan = Plan(2, adapt=given)
    assert plan.adapt == DepthPolicy(0.5, ((1, (1, 1.5, 2)), (8, (1, 2, 3))))
    assert plan.name == "chain-2 (adaptive)"
    for other in (
        {"width": 2, "nodes": 4},
        {"drafts": 2, "proposal": "sampled"},
        {"rule": "typical", "lossy": True},
    ):
        with pytest.raises(UserError, match="single lossless chain"):
            Plan(2, adapt=given, **other)
    assert adapt.adapt_depth(Grown(3), replace(plan, adapt=None)).__class__ is Grown


def test_a_machines_costs_make_a_pace():
    timed = [
        RoundTiming(p, b, p.nodes + 1, 0.1 * (1 + p.depth), 1.0, 0.1)
        for p in (Plan(), Plan(1), Plan(2))
        for b in (1, 4)
    ]
    costs = MeasuredCosts(timed)
    (found,) = [fit_policy(Plan(2), [np.full((9, 2), 0.5)], costs, 4)]
    assert found.prior == 0.5
    assert dict(found.costs)[1] == pytest.approx((1.2 / 1.1, 1.3 / 1.1, 1.4 / 1.1), abs=1e-3)
    assert [size for size, _ in found.costs] == [1, 2, 4]


def test_rounds_are_timed_where_every_round_ends_a_text(tiny_target):
    target = tiny_target(vocab=5)
    found = measure(target, Grown(5), [[1, 2, 3]], [Plan(2)], Sampler(0.8), [2], max_new_tokens=2, repeats=1)
    assert found.round_seconds(Plan(2), 2) > 0
