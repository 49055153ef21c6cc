"""What Medusa, Hydra and the speculators have in common: both faces, how they begin, and a run of each."""

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
def test_both_faces_agree_in_every_form(tiny_target, kind, form):
    target, drafter = trained(tiny_target, kind, **form)
    assert_faces_agree(drafter, target, random_texts())


@pytest.mark.parametrize(("kind", "form"), BY_FEATURE, ids=str)
def test_a_fresh_drafter_says_at_every_depth_what_the_target_says_next(tiny_target, kind, form):
    target, drafter = fresh(tiny_target, kind, **form)
    texts = random_texts()
    rows = target.head(target.read(texts).last).softmax(-1)  # (B, T, V)
    found = unrolled(drafter, target, texts)
    assert {depth for _, _, depth in found} == set(range(1, K + 1))
    for (row, t, _), law in found.items():
        torch.testing.assert_close(law, rows[row, t], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Medusa, {"depth": 0}),
        (Medusa, {"layers": 0}),
        (Hydra, {"depth": 0}),
        (Hydra, {"layers": 0}),
        (Mlp, SPECULATORS[0][1] | {"depth": 0}),
        (Mlp, SPECULATORS[0][1] | {"inner_size": -3}),
    ],
    ids=str,
)
def test_a_drafter_of_nothing_is_refused(tiny_target, kind, changes):
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
    assert "lossless to" not in done.out
    assert "moved" not in done.out
    assert f"drafter={card['drafter']}" in options.split()
