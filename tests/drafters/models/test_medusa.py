"""Medusa: its own heads, and drafts that are products of depths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from faces import (
    CHAIN,
    SAMPLED,
    TREE,
    Follower,
    K,
    V,
    batch_of,
    paths,
    random_texts,
)
from heads import fresh, trained
from workbench import train

from decode.model.head import Head
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.models.medusa import Medusa

STATIC = Plan(tree=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 0, 0), (1, 0, 1)))


@pytest.mark.parametrize("own_head", [True, False])
def test_own_heads_are_copies_and_train(tiny_target, own_head):
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


def test_what_the_targets_family_puts_behind_its_head_stays(tiny_target):
    target, drafter = trained(tiny_target, Medusa)
    target.head = replace(target.head, scale=0.5, softcap=3.0, bias=torch.randn(V))
    for step in drafter.unroll(batch_of(target, random_texts()), target):
        own = drafter.lm_heads[step.depth - 1].weight
        want = torch.tanh((step.hidden @ own.T + target.head.bias) * 0.5 / 3.0) * 3.0
        torch.testing.assert_close(step.head(step.hidden), want)


@pytest.mark.parametrize("plan", [STATIC, replace(STATIC, proposal="hybrid")], ids=lambda p: p.proposal)
def test_a_static_tree_is_made_of_each_depths_best_tokens(tiny_target, plan):
    target, drafter = trained(tiny_target, Medusa)
    follower = Follower(drafter, target, random_texts(), (6, 4))
    laws = follower.propose(SAMPLED).q  # of every depth, whatever is above
    draft = follower.propose(plan) if plan.proposal == "fixed" else None
    if draft is None:  # rank 0 is drawn; the likeliest come after it
        coin = torch.Generator().manual_seed(0)

        class Dice:
            def draw(self, weights, key, active):
                shape = weights.shape[:-1]
                return torch.multinomial(weights.flatten(0, -2), 1, generator=coin).view(shape)

        with torch.no_grad():
            draft = drafter.propose(follower.state, target, Sampler(1.0), Dice(), plan)
    for row in range(2):
        best = laws[row].argsort(-1, descending=True)
        for node, path in enumerate(plan.tree):
            rank = path[-1] - (plan.proposal == "hybrid")
            if rank >= 0:
                assert draft.tokens[row, node] == best[len(path) - 1, rank]


def test_a_dynamic_tree_is_the_best_of_the_product(tiny_target):
    target, drafter = trained(tiny_target, Medusa)
    follower = Follower(drafter, target, random_texts(), (6, 4))
    logs = follower.propose(SAMPLED).q.log()  # (B, K, V)
    draft = follower.propose(TREE)
    for row in range(2):
        one, two = (logs[row, j].topk(TREE.width) for j in (0, 1))
        pairs = {
            (int(a), int(b)): float(x + y)
            for a, x in zip(one.indices, one.values, strict=True)
            for b, y in zip(two.indices, two.values, strict=True)
        }
        kept = [path for path in paths(draft, row) if len(path) == 2]
        assert set(kept) == set(sorted(pairs, key=lambda p: -pairs[p])[: len(kept)])
        assert kept


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


def test_a_draft_deeper_than_the_heads_is_refused_before_work_starts(bench):
    before = sorted((bench.root / "outputs").rglob("*"))
    done = train([*bench.command, "drafter=medusa", "drafter.depth=1", "seed=77"])
    done.refused("this drafter predicts 1 tokens; set decode.depth=1 or less")
    assert not [p for p in sorted((bench.root / "outputs").rglob("run.json")) if p not in before]
