"""Terms of a sum of losses, from overrides to divergences and weights."""

from __future__ import annotations

import pytest
from workbench import CONF, options_of

from decode.errors import UserError
from distill.config.choices import objective_name
from distill.losses.mix import terms_of
from distill.losses.weights import DPace, Focal, Streak

EXACT = Streak(smoothing=0.0, warmup=0.0, acceptance="token")
PRESETS = ("ce_chain", "ce_focal", "ce_focal_chain")
ADDED = "objective.terms={tv: {objective: tv, weights: {name: dpace, warmup: 0.1}, factor: 0.5}}"


@pytest.mark.parametrize("name", PRESETS)
def test_terms_of_the_presets(name):
    options = options_of(f"objective={name}", "weights=decay_dspark")
    terms = terms_of(options.objective, options.weights)
    assert [term.name for term in terms] == name.split("_")
    ce, *others = terms
    assert ce.weights is options.weights
    assert [type(term.weights) for term in others] == [
        {"focal": Focal, "chain": Streak}[term.name] for term in others
    ]
    chained = [term.weights for term in others if term.name == "chain"]
    assert chained in ([], [EXACT])


def test_terms_and_their_options_are_overridden_and_recorded():
    options = options_of(
        "objective=ce_chain",
        ADDED,
        "objective.terms.chain.weights.warmup=0.2",
        "objective.terms.chain.factor=3",
        "objective.terms.more.objective=nll",
    )
    terms = {term.name: term for term in terms_of(options.objective, options.weights)}
    assert terms["chain"].weights == Streak(0.0, 0.2, "token")
    assert terms["tv"].weights == DPace(0.5, 0.1)
    assert [term.factor for term in terms.values()] == [1.0, 3.0, 0.5, 1.0]
    assert terms["more"].divergence is terms["ce"].divergence, "computed once"
    recorded = options.config.values["objective"]["terms"]["tv"]
    assert recorded["weights"] == {
        "_target_": "distill.losses.weights.DPace",
        "smoothing": 0.5,
        "warmup": 0.1,
        "acceptance": "overlap",
    }


def test_run_is_named_after_its_terms():
    options = options_of("objective=ce_chain").config.values["objective"]
    assert objective_name(CONF, options) == "ce+chain"
    assert objective_name(CONF, options_of("objective=jsd").config.values["objective"]) == "jsd"


def test_null_removes_a_term():
    options = options_of("objective=ce_focal_chain", "objective.terms.focal=null")
    assert [term.name for term in terms_of(options.objective, options.weights)] == ["ce", "chain"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["objective=mix"], "objective.terms: give at least one"),
        (["objective=mix", "objective.terms={a: {objective: ce_chain}}"], "is a sum of terms itself"),
        (["objective=mix", "objective.terms={a: {objective: kll}}"], "objective=kll: did you mean kl?"),
        (["objective=mix", "objective.terms={a: {objective: kl, wieghts: x}}"], "did you mean weights?"),
        (["objective=mix", "objective.terms={a: kl}"], "objective.terms.a: write {objective: nll}"),
        (
            ["objective=mix", "objective.terms={a: {objective: {name: topk, kk: 1}}}"],
            "no such option of topk",
        ),
        (["objective=ce_chain", "objective.terms.chain.weights.warmup=x"], "warmup=x: must be a number"),
        (["objective=kl", "objective.terms.a.objective=tv"], "write objective=mix, too"),
        (["objective=mix", "objective.terms=3"], "objective.terms=3: must be like {}"),
        (["objective=kl", "weights=decay", "weights.rate=-0.5"], "weights: depth 2 has weight -0.5"),
    ],
)
def test_wrong_options_of_a_mix_are_one_line(overrides, said):
    with pytest.raises(UserError) as error:
        options_of(*overrides)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
