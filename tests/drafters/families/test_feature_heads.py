"""Medusa, Hydra and the speculators in all forms: training = decoding, fresh weights, and a run of each."""

from __future__ import annotations

import json

import pytest
import torch
from faces import K, assert_faces_agree, random_texts, unrolled
from heads import fresh, trained
from workbench import final

from decode.errors import UserError
from drafters.models.hydra import Hydra
from drafters.models.medusa import Medusa
from drafters.models.mlp import Lstm, Mlp

FORMS = [{"own_head": True, "layers": 1}, {"own_head": False, "layers": 1}, {"own_head": True, "layers": 3}]
BY_FEATURE = [(kind, form) for kind in (Medusa, Hydra) for form in FORMS]
SPECULATORS = [
    (Mlp, {"tie_weights": True, "scale_input": True, "inner_size": 0}),
    (Mlp, {"tie_weights": False, "scale_input": False, "inner_size": 24}),
    (Lstm, {"scale_input": True, "inner_size": 0}),
    (Lstm, {"scale_input": False, "inner_size": 24}),
]


@pytest.mark.parametrize(("kind", "form"), [*BY_FEATURE, *SPECULATORS], ids=str)
def test_decoding_computes_the_probs_of_training_in_every_form(tiny_target, kind, form):
    target, drafter = trained(tiny_target, kind, **form)
    assert_faces_agree(drafter, target, random_texts())


@pytest.mark.parametrize(("kind", "form"), BY_FEATURE, ids=str)
def test_a_fresh_drafter_has_the_targets_distribution_at_every_depth(tiny_target, kind, form):
    target, drafter = fresh(tiny_target, kind, **form)
    texts = random_texts()
    rows = target.head(target.read(texts).last).softmax(-1)  # (B, T, V)
    found = unrolled(drafter, target, texts)
    assert {depth for _, _, depth in found} == set(range(1, K + 1))
    for (row, t, _), probs in found.items():
        torch.testing.assert_close(probs, rows[row, t], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, {name: 0}) for kind in (Medusa, Hydra) for name in ("depth", "layers")),
        *((Mlp, SPECULATORS[0][1] | change) for change in ({"depth": 0}, {"inner_size": -3})),
    ],
    ids=str,
)
def test_sizes_below_one_are_refused(tiny_target, kind, changes):
    with pytest.raises(UserError, match=r"drafter\.(depth|layers|inner_size)=(0|-3)"):
        fresh(tiny_target, kind, **changes)


RUNS = [
    "drafter=hydra drafter.own_head=True decode=dynamic decode.depth=2",
    "drafter=lstm decode=dynamic decode.depth=2",
]
MORE_RUNS = [
    "drafter=medusa drafter.own_head=True objective=kl",
    "drafter=medusa drafter.own_head=False objective=ce",
    "drafter=hydra drafter.own_head=False decode=dynamic decode.depth=2",
    "drafter=mlp decode=dynamic decode.depth=2",
]


@pytest.mark.parametrize("options", [*RUNS, *MORE_RUNS])
@pytest.mark.ci(*RUNS)
def test_a_run_trains_and_scores_it(bench, options):
    done = bench.train(*options.split()).succeeded()
    moved = final(done.folder)
    assert all(weight.isfinite().all() for weight in moved.values())
    for name in ("blocks.0.layers.0.weight", "blocks.1.linear.weight"):  # Medusa's and Hydra's begin at 0
        assert name not in moved or moved[name].abs().max() > 0
    assert ("lm_heads.0.weight" in moved) is ("own_head=True" in options)
    card = json.loads((done.folder / "checkpoints" / "6" / "score.json").read_text())
    assert card["audit_passed"]
    assert card["replay_agrees"]
    assert (card["lossless_to"], card["target_drift"]) == ("target", None)
    assert f"drafter={card['drafter']}" in options.split()
