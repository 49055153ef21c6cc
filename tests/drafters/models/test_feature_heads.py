"""Medusa, Hydra and the speculators: formulas written out, fresh weights, costs, and a run of each."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from drafter_checks import (
    CHAIN,
    SAMPLED,
    TREE,
    Follower,
    K,
    V,
    assert_decodes_as_trained,
    batch_of,
    random_texts,
    unrolled,
)
from exact import EnumeratingCoin, Script
from heads import fresh, trained
from safetensors.torch import load_file
from workbench import final

from decode.model.head import Head
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.checkpoint import io as checkpoint_io
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
    assert_decodes_as_trained(drafter, target, random_texts())


@pytest.mark.parametrize(("kind", "form"), BY_FEATURE, ids=str)
def test_a_fresh_drafter_has_the_targets_distribution_at_every_depth(tiny_target, kind, form):
    target, drafter = fresh(tiny_target, kind, **form)
    texts = random_texts()
    rows = target.head(target.read(texts).last).softmax(-1)  # (B, T, V)
    found = unrolled(drafter, target, texts)
    assert {depth for _, _, depth in found} == set(range(1, K + 1))
    for (row, t, _), probs in found.items():
        torch.testing.assert_close(probs, rows[row, t], rtol=0, atol=1e-6)


TREES = "decode=dynamic decode.depth=2"
RUNS = [f"drafter=hydra drafter.own_head=True {TREES}", f"drafter=lstm {TREES}"]
MORE_RUNS = [f"drafter=hydra drafter.own_head=False {TREES}", f"drafter=mlp {TREES}"]
MORE_RUNS += [f"drafter=medusa drafter.own_head={own} objective=kl" for own in (True, False)]


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
    assert card["audit_passed"] is card["replay_agrees"] is True
    assert (card["lossless_to"], card["target_drift"]) == ("target", None)
    assert f"drafter={card['drafter']}" in options.split()


STATIC = Plan(tree=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 0, 0), (1, 0, 1)))


@pytest.mark.parametrize("own_head", [True, False])
def test_own_heads_are_trainable_copies(tiny_target, own_head):
    target, drafter = fresh(tiny_target, Medusa, own_head=own_head)
    names = dict(drafter.named_parameters())
    assert sorted(n for n in names if n.startswith("lm_heads")) == (
        [f"lm_heads.{i}.weight" for i in range(K)] if own_head else []
    )
    places = {w.data_ptr() for n, w in names.items() if n.startswith("lm_heads")}
    assert len(places) == K * own_head
    assert target.head.weight.data_ptr() not in places
    for step in drafter.unroll(batch_of(target, random_texts()), target):
        assert step.head.weight.requires_grad is own_head


def test_own_heads_keep_the_targets_scale_cap_and_bias(tiny_target):
    target, drafter = trained(tiny_target, Medusa)
    target.head = replace(target.head, scale=0.5, softcap=3.0, bias=torch.randn(V))
    for step in drafter.unroll(batch_of(target, random_texts()), target):
        own = drafter.lm_heads[step.depth - 1].weight
        want = torch.tanh((step.hidden @ own.T + target.head.bias) * 0.5 / 3.0) * 3.0
        torch.testing.assert_close(step.head(step.hidden), want)


@pytest.mark.parametrize("plan", [STATIC, replace(STATIC, proposal="hybrid")], ids=lambda p: p.proposal)
def test_static_tree_has_each_depths_best_tokens(tiny_target, plan):
    target, drafter = trained(tiny_target, Medusa)
    follower = Follower(drafter, target, random_texts(), (6, 4))
    probs = follower.propose(SAMPLED).q  # of every depth, whatever is above
    coin = EnumeratingCoin([Script(0), Script(1)])
    with torch.no_grad():
        draft = drafter.propose(follower.state, target, Sampler(1.0), coin, plan)
    for row in range(2):
        best = probs[row].argsort(-1, descending=True)
        for node, path in enumerate(plan.tree):
            rank = path[-1] - (plan.proposal == "hybrid")  # rank 0 is drawn; the likeliest come after it
            if rank >= 0:
                assert draft.tokens[row, node] == best[len(path) - 1, rank]


@pytest.mark.parametrize(
    ("own_head", "plan", "products"),
    [(True, TREE, K), (False, TREE, 1), (True, Plan(2), 2), (False, CHAIN, 1), (False, STATIC, 1)],
    ids=str,
)
def test_heads_are_read_once_a_draft(tiny_target, monkeypatch, own_head, plan, products):
    target, drafter = trained(tiny_target, Medusa, own_head=own_head)
    follower = Follower(drafter, target, random_texts(), (6, 4))
    calls, product = [], Head.product
    monkeypatch.setattr(Head, "product", lambda self, states: calls.append(0) or product(self, states))
    follower.propose(plan)
    assert len(calls) == products


def test_draft_deeper_than_the_heads_is_refused_before_work(bench):
    before = bench.runs()
    bench.train("drafter=medusa", "drafter.depth=1").refused("set decode.depth=1 or less")
    assert bench.runs() == before


def silu(x):
    return x / (1 + torch.exp(-x))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_hydra_probs_are_those_of_the_formula(tiny_target, form):
    target, drafter = trained(tiny_target, Hydra, **form)
    texts = random_texts(rows=1)
    features, w = target.read(texts).last[0], drafter.state_dict()
    embedding, found = target.model.get_input_embeddings().weight, unrolled(drafter, target, texts)
    for t in (0, 3, 11):
        for depth in range(1, K + 1):
            i = depth - 1
            x = torch.cat([features[t], *embedding[texts[0, t + 1 : t + 1 + depth]]])
            assert x.shape == (16 * (1 + depth),)
            x = w[f"blocks.{i}.skip.weight"] @ x + silu(w[f"blocks.{i}.linear.weight"] @ x)
            for layer in range(form["layers"] - 1):
                x = x + silu(w[f"blocks.{i}.rest.layers.{layer}.weight"] @ x)
            head = w[f"lm_heads.{i}.weight"] if form["own_head"] else target.head.weight
            torch.testing.assert_close(found[(0, t, depth)], (head @ x).softmax(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layers", [1, 3])
def test_no_two_hydra_blocks_share_a_weight(tiny_target, layers):
    _, drafter = fresh(tiny_target, Hydra, layers=layers)
    weights = [w for _, w in drafter.named_parameters(remove_duplicate=False)]
    assert len({w.data_ptr() for w in weights}) == len(weights) == K * (2 + (layers - 1) + 1)
    widths = [block.linear.in_features for block in drafter.blocks]
    assert widths == [block.skip.in_features for block in drafter.blocks] == [32, 48, 64]


def test_fresh_hydra_blocks_have_gradients_for_every_token(tiny_target):
    """Blocks that begin at 0 are no saddle: the columns of every embedding have a gradient at once."""
    target, drafter = fresh(tiny_target, Hydra)
    for step in drafter.unroll(batch_of(target, random_texts()), target):
        step.head(step.hidden).log_softmax(-1)[:, 0].sum().backward()
    for block in drafter.blocks:
        for part in (block.skip, block.linear):
            assert all(columns.abs().max() > 0 for columns in part.weight.grad.split(16, 1))


# -- the MLP and LSTM speculators ------------------------------------------------------------------


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


def speculated_by_hand(w, feature, tokens, inner, scaled):
    """The recurrence of fms-fsdp, or ArcticTraining's sum_lstm, at one position; `w`: tensors by name."""
    keep = 0.5 ** (0.5 / len(tokens))
    weight = math.sqrt((1 - keep**2) * (inner / 2)) / keep
    state, memory, rows = rms(feature) / 2**0.5 if scaled else feature, torch.zeros(inner), []
    for i, token in enumerate(tokens):
        if "cell_ln.weight" in w:  # gates to forget, take and give, then the candidate
            z = w[f"proj.{min(i, 1)}.weight"] @ state + (weight * w["emb.weight"][token]).repeat(4)
            forget, take, give, candidate = z.split(inner)
            candidate = gelu(rms(candidate) * w["cell_ln.weight"] + w["cell_ln.bias"])
            memory = memory * forget.sigmoid() + candidate * take.sigmoid()
            state = gelu(rms(memory) * w["state_ln.weight"] + w["state_ln.bias"]) * give.sigmoid()
        else:
            z = w[f"proj.{i}.weight"] @ state + weight * w[f"emb.{i}.weight"][token]
            state = gelu(rms(z) * w[f"ln.{i}.weight"] + w[f"ln.{i}.bias"])
        rows.append(w[f"head.{i}.weight"] @ state)
    return rows


@pytest.mark.parametrize(("kind", "options"), SPECULATORS, ids=str)
def test_speculators_probs_are_those_of_the_formula(tiny_target, kind, options):
    target, drafter = trained(tiny_target, kind, **options)
    texts = random_texts(rows=1)
    features, found = target.read(texts).last[0], unrolled(drafter, target, texts)
    for t in (0, 3, 11):
        tokens = texts[0, t + 1 : t + 1 + K].tolist()  # the first is the root
        inner = options["inner_size"] or 16
        rows = speculated_by_hand(drafter.state_dict(), features[t], tokens, inner, options["scale_input"])
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
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
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
