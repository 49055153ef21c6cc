"""The MLP and LSTM speculators: their formulas written out, and tied weights."""

from __future__ import annotations

import math

import pytest
import torch
from faces import K, random_texts, unrolled
from heads import trained
from safetensors.torch import load_file

from drafters.checkpoint import io as checkpoint_io
from drafters.models.mlp import Lstm, Mlp

FORMS = [
    (Mlp, {"tie_weights": True, "scale_input": True, "inner_size": 0}),
    (Mlp, {"tie_weights": False, "scale_input": False, "inner_size": 24}),
    (Lstm, {"scale_input": True, "inner_size": 0}),
    (Lstm, {"scale_input": False, "inner_size": 24}),
]


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def mlp_by_hand(w, feature, tokens, depth, inner, scaled):
    """The recurrence of fms-fsdp, one position; `w` are the saved tensors by name."""
    keep = 0.5 ** (0.5 / depth)
    weight = math.sqrt((1 - keep**2) * (inner / 2))
    state, rows = rms(feature) / 2**0.5 if scaled else feature, []
    for i, token in enumerate(tokens):
        z = w[f"proj.{i}.weight"] @ state + weight / keep * w[f"emb.{i}.weight"][token]
        state = gelu(rms(z) * w[f"ln.{i}.weight"] + w[f"ln.{i}.bias"])
        rows.append(w[f"head.{i}.weight"] @ state)
    return rows


def lstm_by_hand(w, feature, tokens, depth, inner, scaled):
    """ArcticTraining's sum_lstm: forget, input and output gates, then the candidate."""
    keep = 0.5 ** (0.5 / depth)
    weight = math.sqrt((1 - keep**2) * (inner / 2))
    state, rows = rms(feature) / 2**0.5 if scaled else feature, []
    memory = torch.zeros(inner)
    for i, token in enumerate(tokens):
        z = w[f"proj.{min(i, 1)}.weight"] @ state + (weight / keep * w["emb.weight"][token]).repeat(4)
        forget, take, give, candidate = z.split(inner)
        candidate = gelu(rms(candidate) * w["cell_ln.weight"] + w["cell_ln.bias"])
        memory = memory * forget.sigmoid() + candidate * take.sigmoid()
        state = gelu(rms(memory) * w["state_ln.weight"] + w["state_ln.bias"]) * give.sigmoid()
        rows.append(w[f"head.{i}.weight"] @ state)
    return rows


@pytest.mark.parametrize(("kind", "options"), FORMS, ids=str)
def test_probs_are_those_of_the_formula(tiny_target, kind, options):
    target, drafter = trained(tiny_target, kind, **options)
    texts = random_texts(rows=1)
    features = target.read(texts).last[0]
    by_hand = {Mlp: mlp_by_hand, Lstm: lstm_by_hand}[kind]
    found = unrolled(drafter, target, texts)
    for t in (0, 3, 11):
        tokens = texts[0, t + 1 : t + 1 + K].tolist()  # the first is the root
        w, inner = drafter.state_dict(), options["inner_size"] or 16
        rows = by_hand(w, features[t], tokens, K, inner, options["scale_input"])
        for depth, row in enumerate(rows, 1):
            torch.testing.assert_close(found[(0, t, depth)], row.softmax(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("tied", "inner"), [(True, 16), (False, 24)])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_tied_weights_are_saved_once(tiny_target, tmp_path, tied, inner, depth):
    options = {"tie_weights": tied, "scale_input": True, "inner_size": inner}
    target, drafter = trained(tiny_target, Mlp, depth=depth, **options)
    checkpoint_io.save(drafter, target, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for part, own in {"emb": 1, "head": 1, "ln": 1, "proj": 2}.items():
        held = [n for n in saved if n.startswith(f"{part}.") and n.endswith("weight")]
        assert len(held) == (min(own, depth) if tied else depth)
    loaded = checkpoint_io.load(tmp_path, target)
    assert isinstance(loaded, Mlp)
    assert checkpoint_io.load(tmp_path, target).state_dict().keys() == drafter.state_dict().keys()
    assert (loaded.emb[0] is loaded.emb[-1]) is (tied or depth == 1)
    assert (loaded.proj[0] is loaded.proj[-1]) is (depth == 1)
    assert len(list(loaded.parameters())) == len(saved)


def test_fresh_states_share_power_like_the_paper(tiny_target):
    """After K depths half of the feature's share of the power is left, by the choice of weights."""
    target = tiny_target(vocab=400, layers=2, hidden=512, dtype=torch.float32)
    options = {"inner_size": 0, "tie_weights": True, "scale_input": True}
    drafter = Mlp.for_target(target, depth=4, **options)
    token = drafter.token_weight * drafter.emb[0].weight
    state = drafter.proj[0](drafter.initial_state(torch.randn(200, 512)))
    share = state.square().mean() / (state.square().mean() + token.square().mean())
    assert share.item() ** 4 == pytest.approx(0.5, abs=0.02)
