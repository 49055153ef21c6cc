"""Medusa: its own heads, and drafts that are products of depths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exact import EnumeratingCoin, Script
from faces import (
    CHAIN,
    SAMPLED,
    TREE,
    Follower,
    K,
    V,
    batch_of,
    random_texts,
)
from heads import fresh, trained

from decode.model.head import Head
from decode.plan import Plan
from decode.sampling import Sampler
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
