"""Medusa: its own heads and its trees; Hydra: its formula written out and its blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exact import EnumeratingCoin, Script
from faces import CHAIN, ROUNDING, SAMPLED, TREE, Follower, K, V, batch_of, laws_below, random_texts, unrolled
from heads import fresh, trained

from decode.model.head import Head
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.models.hydra import Hydra
from drafters.models.medusa import Medusa

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
    bench.train("drafter=medusa", "drafter.depth=1").refused("set decode.depth=1 or less")
    assert not bench.runs()


# -- Hydra ---------------------------------------------------------------------------------------

FORMS = [{"own_head": True, "layers": 1}, {"own_head": False, "layers": 1}, {"own_head": True, "layers": 3}]


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


def test_hydra_children_depend_on_the_whole_path(tiny_target):
    """Medusa's do not, and a recurrent cell may forget: here the first token is an input of the last head."""
    target, drafter = trained(tiny_target, Hydra)
    prefix = random_texts(rows=1, length=6)[0].tolist()
    probs = [laws_below(drafter, target, prefix, [first, 7])[-1] for first in (3, 4)]
    assert (probs[0] - probs[1]).abs().max() > 100 * ROUNDING


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
