"""Lyanna: no drafted token enters a state, so states outlive a rejection and K head products are one."""

from __future__ import annotations

import random

import contract
import pytest
import torch
from exact import check_lossless
from faces import SAMPLED, Follower, K, V, batch_of, both, paths, random_texts

from benchmarks.lyanna_ablation import head_products, reuse_ablation, reuse_mode
from decode.errors import UserError
from decode.evaluation.replay import Rollout, replay, why_inexact
from decode.evaluation.stateful_replay import walk
from decode.generation.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.families.state_reuse import Reuse

TREE = Plan(K, 3, 8)
REUSE = {"mode": "tree_merge", "nodes": 3, "weight": 0.25, "least": 1, "tokens": 0.0}
MODES = ["none", "logit_sum", "tree_merge", "immediate"]


def lyanna(tiny_target, make_drafter, mode="none", **options):
    return both(tiny_target, make_drafter, "lyanna", reuse=REUSE | {"mode": mode}, **options)


def hidden(drafter, target, batch):
    with torch.no_grad():
        return {
            (a, s.depth): h
            for s in drafter.unroll(batch, target)
            for a, h in zip(s.anchor.tolist(), s.head.parts(s.hidden)[0], strict=True)
        }


# -- no token enters a state (LY1) ---------------------------------------------------------------


@pytest.mark.parametrize("root_token", ["none", "add"])
def test_no_drafted_token_moves_a_bit_of_any_state(tiny_target, make_drafter, root_token):
    target, drafter = lyanna(tiny_target, make_drafter, root_token=root_token)
    texts = random_texts(rows=1)
    batch = batch_of(target, texts)
    before, moved = hidden(drafter, target, batch), 0
    for anchor in range(4, 12):
        other = texts.clone()
        other[0, anchor + 2 :] = (other[0, anchor + 2 :] + 1) % V  # all that is behind the root
        after = hidden(drafter, target, batch._replace(tokens=other))
        assert all(torch.equal(before[anchor, d], after[anchor, d]) for d in range(1, K + 1))
        other[0, : anchor + 2] = (other[0, : anchor + 2] + 1) % V
        after = hidden(drafter, target, batch._replace(tokens=other))
        moved += sum(not torch.equal(before[anchor, d], after[anchor, d]) for d in range(1, K + 1))
    assert moved == (8 * K if root_token == "add" else 0)


@pytest.mark.parametrize("root_token", ["none", "add"])
def test_no_drafted_token_moves_a_bit_of_any_state_in_decoding(tiny_target, make_drafter, root_token):
    target, drafter = lyanna(tiny_target, make_drafter, "tree_merge", root_token=root_token)
    texts = random_texts()
    follower, drafted = Follower(drafter, target, texts), []
    follower.advance((6, 4))
    for shift in (0, 1):
        follower.texts = texts + shift - V * (texts + shift >= V)  # a sampled chain is told these
        draft = follower.propose(SAMPLED)
        drafted.append((draft.tokens, follower.state.drafted))
    assert not torch.equal(drafted[0][0], drafted[1][0])
    assert torch.equal(drafted[0][1], drafted[1][1])


# -- states outlive a rejection (LY2, LY3) -------------------------------------------------------


def test_old_states_are_those_of_the_place_where_they_were_made(tiny_target, make_drafter):
    target, drafter = lyanna(tiny_target, make_drafter, "tree_merge")
    texts = random_texts()
    states = hidden(drafter, target, batch_of(target, texts))
    follower = Follower(drafter, target, texts, (5, 7))
    follower.propose(TREE)
    compared = 0
    for counts in [(1, 2), (2, 1), (3, 1), (1, 3)]:
        anchors, drafted = follower.anchors, follower.state.drafted
        follower.advance(counts)
        state = follower.state
        assert state.left.tolist() == [K - n for n in counts]
        for row, (anchor, n) in enumerate(zip(anchors, counts, strict=True)):
            for j in range(K - n):
                assert torch.equal(state.stale[row, j], drafted[row, n + j])
                want = states[row * texts.shape[1] + anchor, n + j + 1]
                torch.testing.assert_close(state.stale[row, j], want, rtol=0, atol=1e-5)
                compared += 1
        follower.propose(TREE)
    assert compared == 2 * 4 * K - sum((1, 2, 2, 1, 3, 1, 1, 3))


def test_old_states_are_used_once(tiny_target, make_drafter):
    target, drafter = lyanna(tiny_target, make_drafter, "tree_merge")
    follower = Follower(drafter, target, random_texts(), (5, 7))
    follower.propose(TREE)
    follower.advance((1, 1))
    assert follower.state.stale is not None
    follower.advance((1, 1))
    assert follower.state.stale is None


def test_rows_take_their_old_states_along(tiny_target, make_drafter):
    target, drafter = lyanna(tiny_target, make_drafter, "tree_merge")
    texts = random_texts(3)
    whole, part = Follower(drafter, target, texts), Follower(drafter, target, texts)
    for follower in (whole, part):
        follower.advance((3, 6, 2))
        follower.propose(TREE)
    part.select([2, 0])
    whole.advance((1, 2, 1))
    part.advance((1, 1))
    for place, row in enumerate([2, 0]):
        assert part.state.left[place] == whole.state.left[row]
        torch.testing.assert_close(part.state.stale[place], whole.state.stale[row], rtol=0, atol=1e-5)
        assert paths(part.propose(TREE), place) == paths(whole.propose(TREE), row)


# -- modes ---------------------------------------------------------------------------------------


def test_a_row_without_old_states_drafts_as_if_there_were_no_reuse(tiny_target, make_drafter):
    target, drafter = lyanna(tiny_target, make_drafter, "tree_merge")
    follower = Follower(drafter, target, random_texts(), (5, 7))
    follower.propose(TREE)
    follower.advance((K, 1))  # all kept, and all rejected
    merged = follower.propose(TREE)
    with reuse_mode(drafter, "none"):
        fresh = follower.propose(TREE)
    assert set(paths(merged, 0)) == set(paths(fresh, 0))
    assert set(paths(merged, 1)) != set(paths(fresh, 1))
    assert merged.tokens.shape == fresh.tokens.shape


def test_the_sum_of_logits_adds_a_share_of_the_old_ones(tiny_target, make_drafter):
    reuse = Reuse("logit_sum", 3, 0.5, 1, 1.0)
    raw = [torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0], [30.0, 40.0]])] * 2
    one, two = reuse.summed(raw, torch.tensor([2, 1]))
    assert one.tolist() == [[6.0, 12.0], [18.0, 24.0]]
    assert two.tolist() == [[6.0, 12.0], [3.0, 4.0]]


def test_immediate_verification_drafts_nothing_when_all_rows_have_enough(tiny_target, make_drafter):
    target, drafter = lyanna(tiny_target, make_drafter, "immediate")
    follower = Follower(drafter, target, random_texts(), (5, 7))
    follower.propose(TREE)
    calls, before = [], drafter.run_layers
    drafter.run_layers = lambda *a: calls.append(1) or before(*a)
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


@pytest.mark.parametrize("mode", ["tree_merge", "immediate"])
def test_where_tokens_are_drawn_old_states_are_left_alone(tiny_target, make_drafter, mode):
    target, drafter = lyanna(tiny_target, make_drafter, mode)
    follower = Follower(drafter, target, random_texts(), (5, 7))
    follower.propose(TREE)
    follower.advance((1, 2))
    draft = follower.propose(SAMPLED)
    with reuse_mode(drafter, "none"):
        assert torch.equal(draft.q, follower.propose(SAMPLED).q)
    assert not drafter.depends_on_rounds(SAMPLED)
    assert drafter.depends_on_rounds(TREE)


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_draft_may_be_deeper_than_the_one_before(tiny_target, make_drafter, mode):
    target, drafter = lyanna(tiny_target, make_drafter, mode)
    follower = Follower(drafter, target, random_texts(), (5, 7))
    follower.propose(Plan(2, 2, 6))
    follower.advance((1, 1))
    deep = follower.propose(Plan(4, 2, 14))
    assert deep.lengths().tolist() == ([1, 1] if mode == "immediate" else [4, 4])


@pytest.mark.parametrize("changes", [{"mode": "all"}, {"nodes": 0}, {"least": 0}, {"weight": 0.0}], ids=str)
def test_a_reuse_that_is_none_is_refused(changes):
    with pytest.raises(UserError, match=f"drafter.reuse.*{next(iter(changes))}="):
        Reuse(**REUSE | changes)


# -- lossless (LY8) ------------------------------------------------------------------------------

DYNAMIC = Plan(2, 2, 4)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.ci("immediate-0.0", "tree_merge-0.5", "logit_sum-0.5", "immediate-1.0")
def test_a_tree_with_old_states_is_lossless(tiny_target, make_drafter, mode, temperature):
    target = tiny_target()
    drafter = make_drafter("lyanna", target, reuse=REUSE | {"mode": mode, "nodes": 2})
    check_lossless(target, drafter, DYNAMIC, Sampler(temperature), length=4)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("mode", ["logit_sum", "immediate"])
@pytest.mark.covering
def test_what_is_drawn_beside_old_states_is_lossless(tiny_target, make_drafter, mode, rule):
    target = tiny_target(vocab=2)
    drafter = make_drafter("lyanna", target, reuse=REUSE | {"mode": mode, "weight": 1.0})
    plan = Plan(2, proposal="sampled", rule=rule)
    check_lossless(target, drafter, plan, Sampler(1.0), length=5, prompts=[[1, 0, 0, 1]])


def test_old_states_are_in_play_in_what_was_enumerated(tiny_target, make_drafter):
    """Else the enumeration could not see them."""
    target = tiny_target()
    drafter = make_drafter("lyanna", target, reuse=REUSE | {"mode": "tree_merge", "nodes": 2})
    used, merged = [], Reuse.merged

    def spy(self, both, left, coin, plan):
        used.append(int(left.max()))
        return merged(self, both, left, coin, plan)

    Reuse.merged = spy
    try:
        check_lossless(target, drafter, DYNAMIC, Sampler(1.0), length=4, rows=[0])
    finally:
        Reuse.merged = merged
    assert max(used) == 1


# -- what it costs and gives (LY5, LY6, LY9) ---------------------------------------------------


WARM = Sampler(0.8)


def rollouts_of(target, count=6, length=20):
    dice = random.Random(1)
    prompts = [[dice.randrange(V) for _ in range(dice.randint(2, 6))] for _ in range(count)]
    outputs = generate(target, None, prompts, max_new_tokens=length, sampler=WARM).outputs
    return [Rollout(p, o.tokens) for p, o in zip(prompts, outputs, strict=True)]


@pytest.mark.parametrize("mode", MODES[:3])
def test_one_head_product_a_draft_whatever_its_depth_and_mode(tiny_target, make_drafter, mode):
    target, drafter = lyanna(tiny_target, make_drafter, mode)
    for depth in (2, 3, 5):
        assert head_products(target, drafter, [1, 2, 3], Plan(depth, 3, 8)) == 1


def test_eagle_and_medusa_pay_one_for_every_depth(tiny_target, make_drafter):
    target, eagle = both(tiny_target, make_drafter, "eagle")
    assert head_products(target, eagle, [1, 2, 3], Plan(3, 2, 5)) == 3
    target, medusa = both(tiny_target, make_drafter, "medusa")
    assert head_products(target, medusa, [1, 2, 3], Plan(3, 2, 5)) == 3
    target, shared = both(tiny_target, make_drafter, "medusa", own_head=False)
    assert head_products(target, shared, [1, 2, 3], Plan(3, 2, 5)) == 1


@pytest.mark.parametrize("mode", MODES)
def test_replay_is_what_the_decoder_does(tiny_target, make_drafter, mode):
    target, drafter = lyanna(tiny_target, make_drafter, mode)
    sampler, rollouts = WARM, rollouts_of(target)
    prompts = [r.prompt for r in rollouts]
    outputs = generate(target, drafter, prompts, max_new_tokens=20, sampler=sampler, plan=TREE).outputs
    assert [o.tokens for o in outputs] == [r.answer for r in rollouts]
    if mode == "immediate":  # all rows of a batch have to be willing, so there is nothing to replay
        assert "rows beside" in why_inexact(TREE, sampler, drafter)
        return
    assert not why_inexact(TREE, sampler, drafter)
    (one,) = replay(target, drafter, rollouts, [TREE], sampler)
    assert one.counts.rounds == [len(o.emitted) for o in outputs]


def test_what_reuse_is_worth_is_counted_as_defined(tiny_target, make_drafter):
    target, drafter = lyanna(tiny_target, make_drafter, "tree_merge")
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


# -- training --------------------------------------------------------------------------------------


def test_states_alone_are_taught_beside_the_draft_and_ever_less(tiny_target, make_drafter):
    target, drafter = lyanna(tiny_target, make_drafter)
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


@pytest.mark.parametrize(
    "changes", [{"root_token": "all"}, {"layers": 0}, {"warmup": 1.0}, {"token_info": "full"}], ids=str
)
def test_an_option_that_is_none_is_refused(tiny_target, make_drafter, changes):
    with pytest.raises(UserError, match=f"drafter.*{next(iter(changes))}="):
        lyanna(tiny_target, make_drafter, **changes)


def test_it_comes_back_from_its_folder_with_its_hot_tokens_and_its_mode(tiny_target, make_drafter, tmp_path):
    pair = lyanna(tiny_target, make_drafter, "logit_sum", hot_tokens=V // 2)
    contract.test_a_saved_drafter_comes_back_bit_for_bit(pair, tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_without_reuse_is_remarked_on(tiny_target, make_drafter, mode):
    _, drafter = lyanna(tiny_target, make_drafter, mode)
    auto = Plan(K, 3, 8, proposal="auto")
    remarks = [drafter.remark(auto.resolved(temperature)) for temperature in (0.0, 1.0)]
    assert remarks[0] == drafter.remark(Plan()) == ""
    assert ("decode.proposal=fixed" in remarks[1]) == (mode == "tree_merge")
    assert (remarks[1] != "") == (mode in ("tree_merge", "immediate"))
