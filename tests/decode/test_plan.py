"""decode.proposal=auto: what the decoding loop makes of it."""

from pathlib import Path

import pytest
from workbench import CONF

from decode.errors import UserError
from decode.generation.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler
from distill.config.compose import compose
from distill.config.read import read_options
from distill.options import RolloutCommandOptions
from distill.rollouts.build import helping_plan

AUTO = Plan(3, 2, 6, proposal="auto")
FIXED, HYBRID = Plan(3, 2, 6), Plan(3, 2, 6, proposal="hybrid")


@pytest.mark.parametrize(
    ("options", "temperature", "proposal", "rule"),
    [
        ({}, 0.0, "fixed", "match"),
        ({}, 0.01, "hybrid", "recursive"),
        ({"rule": "recursive"}, 1.0, "hybrid", "recursive"),
        ({"rule": "match"}, 1.0, "fixed", "match"),  # has no use for q
        ({"rule": "typical", "lossy": True}, 1.0, "fixed", "typical"),
        ({"width": 1, "nodes": 0}, 1.0, "fixed", "match"),  # a hybrid chain does not exist
    ],
)
def test_it_becomes_hybrid_where_tokens_are_drawn(options, temperature, proposal, rule):
    plan = Plan(**{"depth": 3, "width": 2, "nodes": 6, "proposal": "auto"} | options)
    resolved = plan.resolved(temperature)
    assert (resolved.proposal, resolved.rule) == (proposal, rule)
    assert plan.resolved(temperature, ("fixed",)).proposal == "fixed"
    assert resolved.resolved(0.0) is resolved


def test_an_unresolved_plan_has_a_name_and_no_draft_temperature():
    assert AUTO.name == FIXED.name
    with pytest.raises(UserError, match="draft_temperature"):
        Plan(3, 2, 6, proposal="auto", draft_temperature=1.0)


@pytest.mark.parametrize(("temperature", "plan"), [(0.0, FIXED), (1.0, HYBRID)])
def test_the_loop_resolves_it(tiny_target, make_drafter, temperature, plan):
    target = tiny_target()
    drafter = make_drafter("eagle", target)
    options = {"sampler": Sampler(temperature), "max_new_tokens": 16, "seed": 3}
    made = [generate(target, drafter, [[1, 0], [2]], plan=p, **options) for p in (AUTO, plan)]
    assert [o.tokens for o in made[0].outputs] == [o.tokens for o in made[1].outputs]
    assert [o.drafted for o in made[0].outputs] == [o.drafted for o in made[1].outputs]


def test_the_default_plan_suits_lookup_and_rollouts_stay_matched(tiny_target, make_drafter):
    cfg = compose([], Path(CONF), "rollout_alone")
    cfg.rollout.max_new_tokens, cfg.max_tokens = 8, 64
    plan = read_options(RolloutCommandOptions, cfg).decode
    assert plan.proposal == "auto"
    target = tiny_target()
    for name in ("ngram", "eagle"):
        drafter = make_drafter(name, target, depth=4)
        drafter.check(plan)
        assert helping_plan(plan, drafter).rule == "match"
        generate(target, drafter, [[1, 0, 1, 0]], plan=plan, sampler=Sampler(1.0), max_new_tokens=8)
