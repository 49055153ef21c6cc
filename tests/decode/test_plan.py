"""Plans: what is refused because it would not be lossless, and what becomes of decode.proposal=auto."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from rule_cases import LOSSY
from workbench import CONF

from decode.errors import UserError
from decode.generation.generate import generate
from decode.plan import MOVED, Plan, plan_of
from decode.planning.auto import Auto
from decode.planning.calibrated_tree import Calibrated
from decode.sampling import Sampler
from decode.verification.rule import rule_class, rule_names
from distill.config.compose import compose
from distill.config.read import read_options
from distill.options.commands import RolloutCommandOptions
from distill.rollouts.build import HELPING, helping_plan

AUTO = Plan(3, 2, 6, proposal="auto")
FIXED, HYBRID = Plan(3, 2, 6), Plan(3, 2, 6, proposal="hybrid")
TREE = [[0], [1], [0, 0]]
CHAIN, DYNAMIC = {"depth": 2}, {"depth": 2, "width": 2, "nodes": 4}
DRAWN, SEVERAL = {"depth": 2, "proposal": "sampled"}, {"depth": 2, "proposal": "sampled", "drafts": 2}
STATIC, SAMPLED_TREE, HYBRID_TREE = ({"tree": TREE, "proposal": p} for p in ("fixed", "sampled", "hybrid"))
UNSURE = {"min_confidence": 0.5}


@pytest.mark.parametrize(
    ("options", "temperature", "proposal", "rule"),
    [
        ({}, 0.0, "fixed", "match"),
        ({}, 0.01, "hybrid", "recursive"),
        ({"rule": "recursive"}, 1.0, "hybrid", "recursive"),
        ({"rule": "match"}, 1.0, "fixed", "match"),  # has no use for q
        ({"rule": "typical", "lossy": True}, 1.0, "fixed", "typical"),
        ({"width": 1, "nodes": 0}, 1.0, "sampled", "token"),  # a hybrid chain does not exist
        ({"width": 1, "nodes": 0}, 0.0, "fixed", "match"),
        ({"width": 1, "nodes": 0, "rule": "match"}, 1.0, "fixed", "match"),
        ({"depth": 0, "width": 1, "nodes": 0}, 1.0, "fixed", "match"),
    ],
)
def test_auto_draws_where_tokens_are_drawn(options, temperature, proposal, rule):
    plan = Plan(**{"depth": 3, "width": 2, "nodes": 6, "proposal": "auto"} | options)
    resolved = plan.resolved(temperature)
    assert (resolved.proposal, resolved.rule.name) == (proposal, rule)
    assert plan.resolved(temperature, ("fixed",)).proposal == "fixed"
    assert resolved.resolved(0.0) is resolved


def test_default_plan_suits_lookup_and_rollouts_stay_matched(tiny_target, make_drafter):
    cfg = compose([], Path(CONF), "rollout_alone")
    cfg.rollout.max_new_tokens, cfg.max_tokens = 8, 64
    options = read_options(RolloutCommandOptions, cfg)
    plan, target = options.decode, tiny_target()
    assert plan.proposal == "auto"
    for name in ("ngram", "eagle"):
        drafter = make_drafter(name, target, depth=4)
        drafter.check(plan)
        assert helping_plan(options, drafter).rule.name == "match"
        measured = replace(options, rollout=replace(options.rollout, decode="auto"))
        assert helping_plan(measured, drafter) is HELPING
        generate(target, drafter, [[1, 0, 1, 0]], plan=plan, sampler=Sampler(1.0), max_new_tokens=8)


@pytest.mark.parametrize("rule", LOSSY)
def test_lossy_plan_has_lossy_in_its_name_and_needs_consent(rule):
    shapes = [DRAWN, DYNAMIC | {"proposal": "hybrid"}, SAMPLED_TREE]
    if rule != "lenience":  # which weighs drawn tokens
        shapes += [CHAIN, DYNAMIC, STATIC]
    if rule == "sprint":  # up to where the drafter doubts
        shapes = [CHAIN | UNSURE, DRAWN | UNSURE]
    for shape in shapes:
        assert "LOSSY" in Plan(**shape, rule=rule, lossy=True).name
        assert "LOSSY" not in Plan(**shape).name
        with pytest.raises(UserError, match="changes the target's distribution"):
            Plan(**shape, rule=rule)


NO_CHAIN = (SAMPLED_TREE, HYBRID_TREE, SEVERAL)
REFUSED = [
    *((shape | {"rule": rule}, "a chain drawn") for rule in ("token", "block") for shape in NO_CHAIN),
    *((shape | UNSURE, "for a single chain") for shape in (DYNAMIC, STATIC, SEVERAL)),
    (DYNAMIC | {"proposal": "sampled"}, "not lossless"),
    (CHAIN | {"rule": "token"}, "a fixed token has no q"),
    (CHAIN | {"rule": "block"}, "a fixed token has no q"),
    (DYNAMIC | {"proposal": "hybrid", "rule": "traversal"}, "not lossless.*rule=recursive"),
    (CHAIN | {"rule": "lenience", "lossy": True}, "by their q: set decode.proposal=sampled"),
    (DYNAMIC | {"proposal": "auto", "rule": "lenience", "lossy": True}, "by their q"),
    (DRAWN | {"rule": {"name": "lenience", "factor": 0.0}, "lossy": True}, r"decode\.rule\.factor=0\.0"),
    (DRAWN | {"rule": {"name": "lenience", "factor": 1.5}}, "at most 1"),
    (CHAIN | {"rule": {"name": "topk", "within": [1]}, "lossy": True}, "two different tags"),
    (CHAIN | {"rule": {"name": "bild", "top": 2}}, "not a parameter of bild"),
    (CHAIN | {"rule": {"top": 2}}, "give its name"),
    (CHAIN | {"rule": 3}, "give its name"),
    (CHAIN | {"rule": {"name": "topk", "top": "2"}}, "give an integer"),
    (CHAIN | {"rule": {"name": "topk", "within": 3}}, "must be a list"),
    (CHAIN | {"rule": {"name": "topk", "within": [1.5, [2]]}}, "two different tags"),
    (CHAIN | {"lossy": True}, "rule=match is lossless"),
    (CHAIN | {"drafts": 2}, "side by side; set decode.proposal=sampled"),
    (SAMPLED_TREE | {"drafts": 2}, "side by side.*without a tree"),
    (CHAIN | {"drafts": 0}, "decode.drafts=0"),
    (DRAWN | {"rule": "select"}, "decode.drafts=2 or more"),
    (CHAIN | {"min_confidence": 1.0}, "less than 1"),
    (CHAIN | {"draft_temperature": 1.0}, "for tokens that are drawn"),
    (DRAWN | {"draft_temperature": -1.0}, "at least 0"),
    (DYNAMIC | {"proposal": "auto", "draft_temperature": 1.0}, "draft_temperature"),
    (STATIC | {"replacement": True}, "replacement is for sampled trees"),
    (HYBRID_TREE | {"replacement": True}, "replacement is for sampled trees"),
    (CHAIN | {"proposal": "hybrid"}, "two children or more"),
    ({"tree": [[0], [1, 0]]}, r"\[1, 0\] has no \[1\]"),
    ({"tree": [[0], [2]]}, r"\[2\] has no \[1\]"),
    (CHAIN | {"proposal": "drawn"}, "choose one of auto, fixed, sampled, hybrid"),
    *((CHAIN | {"rule": name}, "choose one of auto, block, kseq") for name in ("greedy", "", "Match")),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED, ids=str)
def test_plan_that_is_not_lossless_is_refused(options, reason):
    with pytest.raises(UserError, match=reason):
        Plan(**options)


@pytest.mark.parametrize("name", MOVED)
def test_number_that_was_a_setting_of_plans_is_named(name):
    with pytest.raises(UserError, match=rf"decode\.{name} belongs to its rule: rule: {{name: "):
        plan_of({"depth": 2, name: 0.5})
    with pytest.raises(UserError, match=rf"decode\.{name}: moved; write decode/rule=\w+ decode\.rule\.\w+"):
        compose([f"decode.{name}=0.5"], Path(CONF))


WRONG: dict[str, tuple] = {
    **dict.fromkeys(("depth", "width", "nodes", "drafts"), ("3", 2.5, True, None, [1], {})),
    **dict.fromkeys(("min_confidence", "draft_temperature"), ("0.5", True, [0.5], math.nan, math.inf)),
    **dict.fromkeys(("replacement", "lossy"), ("yes", 1, None, [])),
    "proposal": (3, None, ["fixed"], {}),
    "tree": (5, "ab", None, [0], [["a"]], [[0.5]], [[True]], [None], [[]], {}),
    "rule": (3, None, ["match"], {"name": ["match"]}),
    "adapt": ("x", 1, [1], {"costs": "a"}, {"prior": "a", "costs": {1: [1.0, 2.0]}}),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WRONG.items() for v in values], ids=str)
def test_setting_of_another_type_is_one_line(name, value):
    with pytest.raises(UserError, match=rf"^decode\.{name}\b[^\n]*$"):
        plan_of({"depth": 2, "proposal": "sampled", name: value})


def test_every_field_of_a_plan_is_tried_with_other_types():
    assert WRONG.keys() == {one.name for one in fields(Plan)}


@pytest.mark.parametrize("rule", [name for name in rule_names() if fields(rule_class(name))])
def test_number_of_a_rule_of_another_type_is_one_line(rule):
    for field in fields(rule_class(rule)):
        values = ["2", True, None, [1.0], math.nan, math.inf, *([1.5] if field.type == "int" else [])]
        for value in values:
            if field.name == "within" and isinstance(value, list):
                continue
            with pytest.raises(UserError, match=r"^decode\.rule\b[^\n]*$"):
                plan_of({"depth": 2, "lossy": True, "rule": {"name": rule, field.name: value}})


def test_plan_is_no_mapping():
    for value in ("chain", None, 3, [1], ["depth"]):
        with pytest.raises(UserError, match=r"^decode: [^\n]*a mapping"):
            plan_of(value)


def test_integers_of_other_libraries_are_integers():
    assert plan_of({"depth": np.int64(3)}) == Plan(3)
    assert json.loads(json.dumps(Plan(np.int64(3)).settings))["depth"] == 3


@pytest.mark.parametrize("value", ["16", 2.5, True, None])
def test_sizes_of_measured_plans_are_integers(value):
    with pytest.raises(UserError, match=r"decode\.nodes"):
        Calibrated(nodes=value, depth=3, width=2)
    with pytest.raises(UserError, match=r"decode\.prompts"):
        Auto([{"depth": 1}], prompts=value)
    with pytest.raises(UserError, match=r"decode\.depth"):
        Auto([{"depth": value}])


def test_plan_is_made_again_from_its_settings():
    rule = {"name": "topk", "top": 2, "ratio": 0.5, "within": [3, 4]}
    for plan in (FIXED, HYBRID, AUTO, Plan(tree=TREE), Plan(2, rule=rule, lossy=True)):
        assert plan_of(plan.settings) == plan
        assert plan_of(json.loads(json.dumps(plan.settings))) == plan
    with pytest.raises(UserError, match=r"decode\.dept: no setting of a plan"):
        plan_of({"dept": 2})
