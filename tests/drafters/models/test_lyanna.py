"""Lyanna: states without drafted tokens, their reuse after a rejection, lossless modes, costs, training."""

from __future__ import annotations

import random

import contract
import numpy as np
import pytest
import torch
from drafter_checks import ONE, SAMPLED, TREE, Follower, K, V, batch_of, both, random_texts
from exact import check_lossless

from benchmarks.lyanna_ablation import head_products, reuse_ablation, reuse_mode
from decode.draft import PAD
from decode.draft_check import draft_fault
from decode.evaluation.fixed_replay import walk
from decode.evaluation.replay import Rollout, replay, why_inexact
from decode.generation.generate import generate
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from drafters import optional
from drafters.drafting.state_reuse import Reuse

HYBRID = Plan(K, 3, 8, proposal="hybrid")
WARM = Sampler(0.8)
REUSE = {"mode": "tree_merge", "nodes": 3, "weight": 0.25, "least": 1, "tokens": 0.0, "drawn": True}
MODES = ["none", "logit_sum", "tree_merge", "immediate"]
BY_FORM = pytest.mark.parametrize(
    ("root_token", "drafted_states"), [(r, d) for r in ("none", "add") for d in ("shared", "own")]
)


@pytest.fixture
def lyanna(tiny_target, make_drafter):
    """Makes a target and a Lyanna with a mode of reuse."""

    def make(mode="none", **options):
        return both(tiny_target, make_drafter, "lyanna", reuse=REUSE | {"mode": mode}, **options)

    return make


def followed(target, drafter, counts, plan=TREE) -> Follower:
    """Of two texts, which have so many tokens of a first draft."""
    follower = Follower(drafter, target, random_texts(), (5, 7))
    follower.propose(plan)
    follower.advance(counts)
    return follower


def hidden(drafter, target, batch):
    with torch.no_grad():
        return {
            (a, s.depth): h
            for s in drafter.unroll(batch, target)
            for a, h in zip(s.anchor.tolist(), s.head.parts(s.hidden)[0], strict=True)
        }


def test_stale_states_are_those_of_their_place(lyanna):
    """Rows that change places take theirs along."""
    target, drafter = lyanna("tree_merge")
    texts, rows, compared = random_texts(), [0, 1], 0
    states = hidden(drafter, target, batch_of(target, texts))
    follower = Follower(drafter, target, texts, (5, 7))
    for counts in [(1, 2), (2, 1), (3, 1), (1, 3)]:
        follower.propose(TREE)
        follower.select([1, 0])
        rows.reverse()
        anchors, drafted = follower.anchors, follower.state.drafted
        follower.advance(counts)
        state = follower.state
        assert state.left.tolist() == [K - n for n in counts]
        for place, (row, anchor, n) in enumerate(zip(rows, anchors, counts, strict=True)):
            for j in range(K - n):
                assert torch.equal(state.stale[place, j], drafted[place, n + j])
                want = states[row * texts.shape[1] + anchor, n + j + 1]
                torch.testing.assert_close(state.stale[place, j], want, rtol=0, atol=1e-5)
                compared += 1
    assert compared == 2 * 4 * K - sum((1, 2, 2, 1, 3, 1, 1, 3))


def test_logit_sum_adds_a_share_of_the_stale_logits():
    reuse = Reuse("logit_sum", 3, 0.5, 1, 1.0)
    raw = [torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0], [30.0, 40.0]])] * 2
    one, two = reuse.summed(raw, torch.tensor([2, 1]))
    assert one.tolist() == [[6.0, 12.0], [18.0, 24.0]]
    assert two.tolist() == [[6.0, 12.0], [3.0, 4.0]]


def test_immediate_mode_skips_drafting_when_all_rows_have_enough(lyanna):
    target, drafter = lyanna("immediate")
    follower = Follower(drafter, target, random_texts(), (5, 7))
    follower.propose(TREE)
    drafting = drafter.module_at(2)
    calls, before = [], drafting.run_layers
    drafting.run_layers = lambda *a: calls.append(1) or before(*a)
    follower.advance((1, 2))
    calls.clear()
    draft = follower.propose(TREE)
    assert not calls
    assert draft.lengths().tolist() == [K - 1, K - 2]
    follower.advance((1, 1))
    assert follower.state.stale is None  # they would be two rounds old
    follower.propose(TREE)
    follower.advance((K, 1))
    calls.clear()
    follower.propose(TREE)
    assert calls  # a row has none


def test_tree_merge_leaves_chains_as_they_are(lyanna):
    target, drafter = lyanna("tree_merge")
    follower = followed(target, drafter, (1, 2))
    assert follower.state.stale is not None
    draft = follower.propose(SAMPLED)
    with reuse_mode(drafter, "none"):
        assert torch.equal(draft.q, follower.propose(SAMPLED).q)
    assert "states are not reused" in optional.remark(drafter, SAMPLED)
    assert not optional.remark(drafter, TREE)
    assert not drafter.depends_on_rounds(SAMPLED)
    assert drafter.depends_on_rounds(TREE)


def drawn(drafter, follower, plan):
    """Drafted by the production coin, the same draws in every call."""
    coin = KeyedCoin(0, range(len(follower.texts))).at(*np.zeros((2, len(follower.texts)), np.int64))
    with torch.no_grad():
        return drafter.propose(follower.state, follower.target, WARM, coin, plan)


def nodes_of(draft, row):
    """(path, whether it was drawn) of every node."""
    names = [()]
    for token, parent in zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True):
        names.append((*names[parent + 1], token))
    sampled = draft.probs.sampled[row].tolist()
    return [(n, s) for n, s in zip(names[1:], sampled, strict=True) if PAD not in n]


def test_tree_merge_adds_fixed_nodes_to_drawn_ones(lyanna):
    target, drafter = lyanna("tree_merge")
    follower = followed(target, drafter, (K, 1))  # all kept, and all rejected
    merged = drawn(drafter, follower, HYBRID)
    with reuse_mode(drafter, "none"):
        fresh = drawn(drafter, follower, HYBRID)
    assert merged.tokens.shape == fresh.tokens.shape
    assert set(nodes_of(merged, 0)) == set(nodes_of(fresh, 0))  # a row without old states
    assert torch.equal(merged.q, fresh.q)
    new, kept = set(nodes_of(merged, 1)), set(nodes_of(fresh, 1))
    assert not any(was_drawn for _, was_drawn in new - kept)
    assert 0 < len(new - kept) <= REUSE["nodes"] + sum(was_drawn for _, was_drawn in kept)
    best = fresh.score[1].double().sort(descending=True, stable=True).indices[: 8 - REUSE["nodes"]]
    assert {nodes_of(fresh, 1)[i] for i in best.tolist()} <= new
    assert not draft_fault(merged, V, reads_probs=True).any()
    assert "earlier rounds" in why_inexact(HYBRID, WARM, drafter)


@BY_FORM
def test_immediate_chain_is_drawn_from_stale_states(lyanna, root_token, drafted_states):
    target, drafter = lyanna("immediate", root_token=root_token, drafted_states=drafted_states)
    follower = followed(target, drafter, (1, 2), SAMPLED)
    stale = follower.state.stale
    draft = follower.propose(SAMPLED)
    assert draft.lengths().tolist() == [K - 1, K - 2]
    root = torch.tensor([known[-1] for known in follower.known])
    head = drafter.biased_head(target.head)
    with torch.no_grad():
        low, _ = drafter.info.low_rank_input(root, stale[:, 0], None)
        first = head(torch.cat([stale[:, 0], low], -1)).softmax(-1)
    torch.testing.assert_close(draft.q[:, 0], first, rtol=0, atol=1e-6)
    assert "other rows" in why_inexact(SAMPLED, ONE, drafter)


@pytest.mark.parametrize("mode", MODES[1:])
def test_draft_may_be_deeper_than_the_last_one(lyanna, mode):
    target, drafter = lyanna(mode)
    follower = followed(target, drafter, (1, 1), Plan(2, 2, 6))
    deep = follower.propose(Plan(4, 2, 14))
    assert deep.lengths().tolist() == ([1, 1] if mode == "immediate" else [4, 4])


SMALL = ((0,), (1,), (0, 0))
SHARP = {"proposal": "hybrid", "draft_temperature": 0.4}  # else three tokens leave nothing to reject
PLANS = {
    "tree": Plan(2, 2, 4),
    "token": Plan(2, proposal="sampled"),
    "block": Plan(2, proposal="sampled", rule="block"),
    "two drafts": Plan(2, proposal="sampled", drafts=2),
    "siblings": Plan(tree=SMALL, proposal="sampled", rule="traversal"),
    "static hybrid": Plan(tree=SMALL, **SHARP),
    "hybrid": Plan(2, 2, 3, **SHARP),
    "deep hybrid": Plan(3, 2, 4, **SHARP),
    "hybrid, matched": Plan(2, 2, 3, rule="match", **SHARP),
}
CASES = [("logit_sum", name) for name in PLANS if name != "deep hybrid"]
CASES += [("tree_merge", name) for name in ("tree", "hybrid", "deep hybrid", "hybrid, matched")]
CASES += [("immediate", name) for name in ("tree", "token", "block", "hybrid")]


@pytest.mark.parametrize(
    "sampler",
    [Sampler(0.5, top_k=2), *(pytest.param(Sampler(t), marks=pytest.mark.proof) for t in (0.5, 1.0))],
    ids=str,
)
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_plans_with_stale_states_are_lossless(tiny_target, make_drafter, case, sampler):
    """In a batch; `immediate` in one of a row, where it verifies stale states if there are any."""
    mode, plan = case[0], PLANS[case[1]]
    # Three levels of three tokens have millions of outcomes.
    two = plan.width == 1 or (plan.depth == 3 and not sampler.top_k)
    target = tiny_target(vocab=2 if two else 3)
    drafter = make_drafter("lyanna", target, reuse=REUSE | {"mode": mode, "nodes": 2, "weight": 1.0}, seed=1)
    seen, propose = [], drafter.propose

    def noted(state, *arguments):
        if state.stale is not None:
            usable = state.left >= 1
            seen.append(bool(usable.all() if mode == "immediate" else usable.any()))
        return propose(state, *arguments)

    drafter.propose = noted
    single = {"prompts": [[1, 0, 0, 1]], "abreast": 1, "length": 3}
    batch = {"prompts": [[1, 0, 0, 1], [1], [0, 1]], "length": 4, "rows": [0]}
    check_lossless(target, drafter, plan, sampler, **(single if mode == "immediate" else batch))
    assert any(seen)


def rollouts_of(target, count=6, length=20):
    dice = random.Random(1)
    prompts = [[dice.randrange(V) for _ in range(dice.randint(2, 6))] for _ in range(count)]
    outputs = generate(target, None, prompts, max_new_tokens=length, sampler=WARM).outputs
    return [Rollout(p, o.tokens) for p, o in zip(prompts, outputs, strict=True)]


@pytest.mark.parametrize("mode", MODES[:3])
def test_draft_costs_one_head_product(lyanna, mode):
    target, drafter = lyanna(mode)
    for depth in (2, 3, 5):
        assert head_products(target, drafter, [1, 2, 3], Plan(depth, 3, 8)) == 1


@pytest.mark.parametrize("mode", MODES)
def test_replay_counts_the_decoders_rounds(lyanna, mode):
    target, drafter = lyanna(mode)
    sampler, rollouts = WARM, rollouts_of(target)
    prompts = [r.prompt for r in rollouts]
    outputs = generate(target, drafter, prompts, max_new_tokens=20, sampler=sampler, plan=TREE).outputs
    assert [o.tokens for o in outputs] == [r.answer for r in rollouts]
    if mode == "immediate":  # all rows of a batch have to be willing, so there is nothing to replay
        assert "other rows" in why_inexact(TREE, sampler, drafter)
        return
    assert not why_inexact(TREE, sampler, drafter)
    (one,) = replay(target, drafter, rollouts, [TREE], sampler)
    assert one.counts.rounds == [len(o.emitted) for o in outputs]


def test_reuse_ablation_counts_as_defined(lyanna):
    target, drafter = lyanna("tree_merge")
    sampler, rollouts = WARM, rollouts_of(target)
    report = reuse_ablation(target, drafter, rollouts, TREE, sampler)
    steps = []
    walk(target, drafter, rollouts, TREE, sampler, on_step=steps.append)
    kept = [a for s in steps for a, more in zip(s.accepted, s.goes_on, strict=True) if more and a < K]
    assert sum(not more for s in steps for more in s.goes_on) == len(rollouts)  # each ends once
    assert report.states_reused == pytest.approx(sum(K - a - 1 for a in kept) / sum(K - a for a in kept))
    assert 0 <= report.salvage_rate < 0.5
    for name, plan, mode in [
        ("equal_nodes", TREE, "tree_merge"),
        ("equal_forwards", Plan(K, 3, 11), "tree_merge"),
        ("fresh_control", Plan(K, 3, 11), "none"),
    ]:
        taus = []
        for arm, form in [(mode, plan), ("none", TREE)]:
            with reuse_mode(drafter, arm):
                (one,) = replay(target, drafter, rollouts, [form], sampler)
            taus.append(one.counts.tau)
        difference, (low, high) = getattr(report, name)
        assert difference == pytest.approx(taus[0] - taus[1])
        assert low <= difference <= high
    assert drafter.reuse.mode == "tree_merge"


def test_state_loss_has_its_schedule(lyanna):
    target, drafter = lyanna(base_weight=0.5, root_token="none")
    batch = batch_of(target, random_texts())
    for progress, main, base, feature in [
        (0.05, 0.1, 0.1, 1.0),
        (0.15, 1.0, 0.5, 0.1),
        (0.575, 1.0, 0.25, 0.1),
    ]:
        steps = list(drafter.unroll(batch._replace(progress=progress), target))
        assert [s.depth for s in steps] == [d for d in range(1, K + 1) for _ in range(2)]
        for draft, aside in zip(steps[::2], steps[1::2], strict=True):
            assert (draft.training_only, aside.training_only) == (False, True)
            assert (draft.weight, aside.weight) == (pytest.approx(main), pytest.approx(base))
            assert torch.equal(aside.head(aside.hidden), target.head(draft.head.parts(draft.hidden)[0]))
        weights = drafter.aux_weights_at(progress)
        assert weights["feature"] * main == pytest.approx(feature)  # a step's weight scales both
    assert not any(s.training_only for s in drafter.unroll(batch, target))


@BY_FORM
def test_every_form_keeps_the_contract(lyanna, root_token, drafted_states):
    """Training's distributions are decoding's, and its gradient is its loss's."""
    for promise in (
        contract.test_decoding_computes_the_probs_of_training,
        contract.test_gradients_reach_every_trainable_weight_and_none_of_the_targets,
        contract.test_the_gradient_of_training_is_the_derivative_of_its_loss,
    ):
        promise(lyanna(root_token=root_token, drafted_states=drafted_states))


def test_own_drafted_states_send_no_gradient_to_settled_places(lyanna):
    """The losses of later depths reach neither the first state nor the keys and values of settled places."""
    target, drafter = lyanna()
    others = ("later", "info")
    settled = [weight for name, weight in drafter.named_parameters() if not name.startswith(others)]
    for step in drafter.unroll(batch_of(target, random_texts()), target):
        step.head(step.hidden).log_softmax(-1)[:, 0].sum().backward(retain_graph=True)
        reached = [weight.grad is not None and bool(weight.grad.any()) for weight in settled]
        assert all(reached) if step.depth == 1 else not any(reached)
        drafter.zero_grad()
