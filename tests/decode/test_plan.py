"""Plans: what is refused because it would not be lossless, and what becomes of decode.proposal=auto."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rule_cases import LOSSY
from workbench import CONF

from decode.errors import UserError
from decode.generation.generate import generate
from decode.plan import MOVED, Plan, plan_of
from decode.sampling import Sampler
from distill.config.compose import compose
from distill.config.read import read_options
from distill.options import RolloutCommandOptions
from distill.rollouts.build import HELPING, helping_plan

AUTO = Plan(3, 2, 6, proposal="auto")
FIXED, HYBRID = Plan(3, 2, 6), Plan(3, 2, 6, proposal="hybrid")


# -- auto ----------------------------------------------------------------------------------------


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
    assert (resolved.proposal, resolved.rule.name) == (proposal, rule)
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
    options = read_options(RolloutCommandOptions, cfg)
    plan = options.decode
    assert plan.proposal == "auto"
    target = tiny_target()
    for name in ("ngram", "eagle"):
        drafter = make_drafter(name, target, depth=4)
        drafter.check(plan)
        assert helping_plan(options, drafter).rule.name == "match"
        measured = replace(options, rollout=replace(options.rollout, decode="auto"))
        assert helping_plan(measured, drafter) is HELPING
        generate(target, drafter, [[1, 0, 1, 0]], plan=plan, sampler=Sampler(1.0), max_new_tokens=8)


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", LOSSY)
def test_a_lossy_plan_says_so_wherever_it_is_named(rule):
    shapes = [DRAWN, DYNAMIC | {"proposal": "hybrid"}, {"tree": TREE, "proposal": "sampled"}]
    if rule != "lenience":  # which weighs drawn tokens
        shapes += [{"depth": 2}, DYNAMIC, {"tree": TREE}]
    if rule == "sprint":  # up to where the drafter doubts
        shapes = [{"depth": 2, "min_confidence": 0.5}, DRAWN | {"min_confidence": 0.5}]
    for shape in shapes:
        assert "LOSSY" in Plan(**shape, rule=rule, lossy=True).name
        assert "LOSSY" not in Plan(**shape).name


def test_plans_of_another_lenience_have_another_name():
    rules = [{"name": "lenience", "factor": e} for e in (0.5, 0.9)]
    names = {Plan(2, proposal="sampled", rule=rule, lossy=True).name for rule in rules}
    assert names == {"chain-2-sampled lenience 0.5 LOSSY", "chain-2-sampled lenience 0.9 LOSSY"}


TREE = [[0], [1], [0, 0]]
DYNAMIC = {"depth": 2, "width": 2, "nodes": 4}
DRAWN, SEVERAL = {"depth": 2, "proposal": "sampled"}, {"depth": 2, "proposal": "sampled", "drafts": 2}
NO_CHAIN = {
    "a tree": {"tree": TREE, "proposal": "sampled"},
    "a hybrid": {"tree": TREE, "proposal": "hybrid"},
    "several drafts": SEVERAL,
}
NO_SINGLE_CHAIN = {"a dynamic tree": DYNAMIC, "a static tree": {"tree": TREE}, "several drafts": SEVERAL}
REFUSED = {
    **{
        f"{rule} on {what}": (options | {"rule": rule}, "verifies a chain drawn from distributions q")
        for rule in ("token", "block")
        for what, options in NO_CHAIN.items()
    },
    **{
        f"confidence in {what}": (options | {"min_confidence": 0.5}, "for a single chain")
        for what, options in NO_SINGLE_CHAIN.items()
    },
    "a drawn dynamic tree": (
        DYNAMIC | {"proposal": "sampled"},
        "changes its distribution, which is not lossless",
    ),
    "token on chosen nodes": ({"depth": 2, "rule": "token"}, "a fixed token has no q"),
    "block on chosen nodes": ({"depth": 2, "rule": "block"}, "a fixed token has no q"),
    "traversal of a dynamic hybrid": (
        {"depth": 3, "width": 2, "nodes": 4, "proposal": "hybrid", "rule": "traversal"},
        "the tokens drawn in one decide which nodes of another are kept: not lossless.*rule=recursive",
    ),
    "typical without consent": (
        {"depth": 2, "rule": "typical"},
        "changes the target's distribution.*lossy=true",
    ),
    "threshold without consent": (
        {"depth": 2, "rule": "threshold"},
        "changes the target's distribution.*lossy=true",
    ),
    "lenience without consent": (
        DRAWN | {"rule": "lenience"},
        "changes the target's distribution.*lossy=true",
    ),
    "lenience to chosen nodes": (
        {"depth": 2, "rule": "lenience", "lossy": True},
        "weighs drawn tokens by their q: set decode.proposal=sampled",
    ),
    "lenience to a plan that may choose": (
        DYNAMIC | {"proposal": "auto", "rule": "lenience", "lossy": True},
        "weighs drawn tokens by their q",
    ),
    "no lenience": (
        DRAWN | {"rule": {"name": "lenience", "factor": 0.0}, "lossy": True},
        "decode.rule.factor=0.0: must be above 0 and at most 1",
    ),
    "lenience above one": (DRAWN | {"rule": {"name": "lenience", "factor": 1.5}}, "above 0 and at most 1"),
    "one tag": ({"depth": 2, "rule": {"name": "topk", "within": [1]}, "lossy": True}, "two different tags"),
    "a number of another rule": ({"depth": 2, "rule": {"name": "bild", "top": 2}}, "no such number of bild"),
    "a rule without a name": ({"depth": 2, "rule": {"top": 2}}, "give its name"),
    "a rule that is a number": ({"depth": 2, "rule": 3}, "give its name"),
    "a text for a number": ({"depth": 2, "rule": {"name": "topk", "top": "2"}}, "must be a number"),
    "a number for tags": ({"depth": 2, "rule": {"name": "topk", "within": 3}}, "must be a list"),
    "consent without need": ({"depth": 2, "lossy": True}, "rule=match is lossless"),
    "drafts that are chosen": ({"depth": 2, "drafts": 2}, "drawn side by side; set decode.proposal=sampled"),
    "drafts of a tree": (NO_CHAIN["a tree"] | {"drafts": 2}, "drawn side by side.*without a tree"),
    "no draft": ({"depth": 2, "drafts": 0}, "decode.drafts=0 must be at least 1"),
    "selection among one draft": (DRAWN | {"rule": "select"}, "set decode.drafts=2 or more"),
    "more than certainty": ({"depth": 2, "min_confidence": 1.0}, "from 0 to less than 1"),
    "a temperature of chosen tokens": ({"depth": 2, "draft_temperature": 1.0}, "for tokens that are drawn"),
    "a negative draft temperature": (DRAWN | {"draft_temperature": -1.0}, "must be at least 0"),
    "repeated siblings that are chosen": (
        {"tree": TREE, "replacement": True},
        "replacement is for sampled trees",
    ),
    "repeated siblings of a hybrid": (
        NO_CHAIN["a hybrid"] | {"replacement": True},
        "replacement is for sampled trees",
    ),
    "a hybrid chain": ({"depth": 2, "proposal": "hybrid"}, "two children or more"),
    "a child without a parent": ({"tree": [[0], [1, 0]]}, r"\[1, 0\] has no \[1\]"),
    "a child without its elder": ({"tree": [[0], [2]]}, r"\[2\] has no \[1\]"),
    "no such proposal": ({"depth": 2, "proposal": "drawn"}, "choose one of auto, fixed, sampled, hybrid"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_be_lossless_is_refused_and_why(name):
    options, reason = REFUSED[name]
    with pytest.raises(UserError, match=reason):
        Plan(**options)


@pytest.mark.parametrize("name", ["greedy", "", "Match"])
def test_an_unknown_rule_is_answered_with_the_known_ones(name):
    with pytest.raises(UserError, match="choose one of auto, block, kseq"):
        Plan(1, rule=name)


@pytest.mark.parametrize("name", MOVED)
def test_a_number_that_was_a_setting_of_plans_is_named(name):
    with pytest.raises(UserError, match=rf"decode\.{name} belongs to its rule now: rule: {{name: "):
        plan_of({"depth": 2, name: 0.5})
    with pytest.raises(UserError, match=rf"decode\.{name} is decode\.rule\.\w+ of decode/rule=\w+ now"):
        compose([f"decode.{name}=0.5"], Path(CONF))


def test_a_plan_is_made_again_from_its_settings():
    rule = {"name": "topk", "top": 2, "ratio": 0.5, "within": [3, 4]}
    for plan in (FIXED, HYBRID, AUTO, Plan(tree=TREE), Plan(2, rule=rule, lossy=True)):
        assert plan_of(plan.settings) == plan
        assert plan_of(json.loads(json.dumps(plan.settings))) == plan


def test_a_setting_that_plans_do_not_have_is_named():
    with pytest.raises(UserError, match=r"decode\.dept: no such setting of a plan"):
        plan_of({"dept": 2})
