"""Block diffusion: one pass for any block, several passes, sampled anchors, and the objectives of streaks."""

from __future__ import annotations

import itertools

import pytest
import torch
from exact import check_lossless
from faces import CHAIN, Follower, K, V, batch_of, both, laws_at, random_texts

from decode.errors import UserError
from decode.model.head import Head
from decode.model.target import LAST
from decode.plan import Plan
from decode.sampling import Sampler
from distill.losses.divergences import hit, nll
from distill.losses.objective import Objective
from distill.losses.weights import DPace, Streak
from drafters.base import DraftStep, sample_anchors
from drafters.families.block import filled_places
from drafters.models.diffusion import Diffusion

# -- the drafter -----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 8])
def test_draft_costs_one_pass_and_one_head_product(tiny_target, make_drafter, depth):
    target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)
    drafter = make_drafter("diffusion", target, depth=depth)
    follower = Follower(drafter, target, random_texts(), (5, 3))
    passes, products = [], []
    run, product = drafter._pass, Head.product
    drafter._pass = lambda *a: passes.append(1) or run(*a)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Head, "product", lambda self, s: products.append(s.shape[1]) or product(self, s))
        draft = follower.propose(Plan(depth, 3, depth + 4))
    assert len(passes) == len(products) == 1
    assert draft.lengths().max() >= 1


def test_shallow_draft_begins_the_deep_one(tiny_target, make_drafter):
    target, drafter = both(tiny_target, make_drafter, "diffusion")
    follower = Follower(drafter, target, random_texts(), (5, 3))
    assert torch.equal(follower.propose(Plan(depth=1)).tokens, follower.propose(CHAIN).tokens[:, :1])
    with pytest.raises(UserError, match=f"this drafter predicts {K} tokens"):
        follower.propose(Plan(depth=K + 1))


def test_masks_see_each_other_and_the_root_sees_none(tiny_target, make_drafter):
    target, drafter = both(tiny_target, make_drafter, "diffusion")
    follower = Follower(drafter, target, random_texts(), (5, 3))
    before = follower.propose(Plan(depth=K, proposal="sampled")).q
    with torch.no_grad():
        drafter.mask[-1] += 1
    after = follower.propose(Plan(depth=K, proposal="sampled")).q
    moved = (after - before).abs().amax((0, 2))  # (K,)
    assert moved[0] == 0
    assert moved[1:].min() > 1e-4


def test_every_layer_reads_the_features(tiny_target, make_drafter):
    """Without them, and only with those up to the one before the root, it drafts otherwise."""
    target, drafter = both(tiny_target, make_drafter, "diffusion", layers=2)
    texts = random_texts()
    probs = []
    for change in (None, 0, 1):
        follower = Follower(drafter, target, texts)
        if change is not None:  # a layer's values of old features
            project = drafter.context
            old = [drafter.layers[change]]
            drafter.context = lambda layer, f, a, p=project, old=old: tuple(
                t * (0.0 if layer is old[0] else 1.0) for t in p(layer, f, a)
            )
        follower.advance((5, 3))
        probs.append(follower.propose(Plan(depth=K, proposal="sampled")).q)
        drafter.__dict__.pop("context", None)
    assert (probs[1] - probs[0]).abs().max() > 1e-3
    assert (probs[2] - probs[0]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["diffusion", "dflash"])
def test_sampled_anchors_stand_for_all(tiny_target, make_drafter, name):
    target, drafter = both(tiny_target, make_drafter, name, anchors=4)
    batch = batch_of(target, random_texts())
    with torch.no_grad():
        all_steps = list(drafter.unroll(batch, target))
    every = all_steps[0].anchor
    states = {(s.depth, a): h for s in all_steps for a, h in zip(s.anchor.tolist(), s.hidden, strict=True)}
    drafter.train()

    def steps(seed):
        return list(drafter.unroll(batch._replace(seed=seed), target))

    first = steps(3)
    if name == "diffusion":  # the root's own state is of the text, and cheap
        assert torch.equal(first[0].anchor, every)
        assert first[0].weight == 1
    for step in first[1:]:
        assert step.weight == len(every) / 8
        assert set(step.anchor.tolist()) <= set(every.tolist())
        assert step.anchor.tolist() == sorted(step.anchor.tolist())
        assert not step.training_only  # of a single pass
        want = torch.stack([states[step.depth, anchor] for anchor in step.anchor.tolist()])
        torch.testing.assert_close(step.hidden, want, rtol=0, atol=1e-5)
    assert len(first[1].anchor) in (7, 8)  # a text's last anchor has one token to predict
    again, other = steps(3), steps(4)
    assert torch.equal(first[1].anchor, again[1].anchor)
    assert not torch.equal(first[1].anchor, other[1].anchor)


@pytest.mark.parametrize("name", ["diffusion", "dflash"])
def test_block_of_one_token_decodes_as_trained(tiny_target, make_drafter, name):
    target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)
    drafter = make_drafter(name, target, depth=1)
    texts = random_texts()
    follower = Follower(drafter, target, texts, (5, 3))
    got = follower.propose(Plan(depth=1, proposal="sampled")).q[:, 0]
    want = laws_at(drafter, target, [(prefix, ()) for prefix in follower.known])
    torch.testing.assert_close(got, torch.stack(want), rtol=0, atol=1e-5)


def test_sample_of_anchors_is_fair():
    counts = torch.zeros(10)
    for seed in range(600):
        counts[sample_anchors(torch.arange(10), 3, seed)] += 1
    assert (counts - 180).abs().max() < 60  # five standard deviations
    assert sample_anchors(torch.arange(3), 5, 0).tolist() == [0, 1, 2]


# -- more than one denoising step ----------------------------------------------------------------


def test_further_passes_fill_in_the_surest_and_keep_them(tiny_target, make_drafter):
    target, drafter = both(tiny_target, make_drafter, "diffusion", steps=K)
    follower = Follower(drafter, target, random_texts(), (5, 3))
    seen, run = [], drafter._pass
    drafter._pass = lambda store, x: seen.append(x) or run(store, x)
    chain = follower.propose(CHAIN)
    assert len(seen) == K
    for before, after in itertools.pairwise(seen):
        moved = (before != after).any(-1)
        assert not moved[:, 0].any()  # the root is known
        assert moved.sum(1).tolist() == [1, 1]
    # What was filled in is what is drafted, however the last pass sees it.
    filled = (
        seen[-1][:, 1:]
        - follower.drafter.inputs(target.embed(follower.state.root), follower.state.newest)[:, 1:]
    )
    for row in range(2):
        for k in range(K - 1):
            if filled[row, k].any():
                want = target.embed(chain.tokens[row, k]) - drafter.mask[k]
                torch.testing.assert_close(filled[row, k], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "plan", [Plan(2, proposal="sampled"), Plan(2, 2, 4, proposal="hybrid")], ids=lambda p: p.name
)
def test_sampled_plans_with_several_passes_are_refused(tiny_target, make_drafter, plan):
    target, drafter = both(tiny_target, make_drafter, "diffusion", steps=2)
    follower = Follower(drafter, target, random_texts(), (5, 3))
    with pytest.raises(UserError, match=r"set decode\.proposal=fixed"):
        follower.propose(plan)


@pytest.mark.parametrize("plan", [Plan(2), Plan(2, 2, 5)], ids=lambda p: p.name)
def test_several_passes_are_lossless(tiny_target, make_drafter, plan):
    target = tiny_target()
    check_lossless(target, make_drafter("diffusion", target, steps=2), plan, Sampler(1.0))


def test_every_supervised_place_counts_once_on_average():
    supervised = torch.tensor([[True] * 4, [True, True, False, False], [True, False, False, False]])
    counted = torch.zeros(3, 4)
    for seed in range(4000):
        filled, counts = filled_places(supervised, seed)
        assert not (filled & ~supervised).any()
        left = supervised & ~filled
        assert left.any(1).all()  # something is left to predict
        assert torch.equal(counts, supervised.sum(1) / left.sum(1))
        counted += counts[:, None] * left
    want = supervised * 4000.0
    assert (counted - want).abs().max() < 250  # five standard deviations
    assert torch.equal(counted[2], want[2])


def test_training_fills_in_masks_as_decoding_does(tiny_target, make_drafter, monkeypatch):
    """A block with the text's own tokens in some of its masks has the states of a later pass."""
    target, drafter = both(tiny_target, make_drafter, "diffusion", steps=2, anchors=0)
    texts = random_texts()
    filled = torch.zeros(2 * (texts.shape[1] - 2), K, dtype=torch.bool)  # all anchors of both texts
    filled[:, 1] = True
    monkeypatch.setattr("drafters.families.block.filled_places", lambda *_: (filled, torch.ones(len(filled))))
    with torch.no_grad():
        steps = list(drafter.train().unroll(batch_of(target, texts), target))
    whole, partly = ([step for step in steps if step.training_only is only] for only in (False, True))
    assert [step.depth for step in whole] == [1, 2, 3]
    assert [step.depth for step in partly] == [2, 3]  # the root's state is the same
    assert [step.weight for step in whole] == [1.0, 0.5, 0.5]
    assert [step.weight.unique().tolist() for step in partly] == [[0.0], [0.5]]
    known = Follower(drafter.eval(), target, texts, (5, 3)).state
    x = drafter.inputs(target.embed(known.root), known.newest)
    following = torch.stack([texts[row, n + 1 : n + 1 + K] for row, n in enumerate((5, 3))])
    token = target.embed(following)
    with torch.no_grad():
        want = drafter._pass(known.store, drafter.fill_in(x, filled[:2], token))  # (2, K, D)
    for row, n in enumerate((5, 3)):
        for step in partly:
            at = (step.anchor == row * texts.shape[1] + n - 1).nonzero().item()
            state = step.hidden[at, : want.shape[-1]]  # before the bias's input
            torch.testing.assert_close(state, want[row, step.depth - 1], rtol=0, atol=1e-5)


# -- what enters a block ---------------------------------------------------------------------------


def test_masks_train_nothing_of_the_first_token(tiny_target, make_drafter):
    target, drafter = both(tiny_target, make_drafter, "diffusion", token_info="vanilla", info_rank=4)
    first, *others = drafter.train().unroll(batch_of(target, random_texts()), target)
    names = [name for name, _ in drafter.named_parameters()]

    def reached(steps):
        total = sum(step.head(step.hidden).log_softmax(-1)[:, 0].sum() for step in steps)
        grads = torch.autograd.grad(total, list(drafter.parameters()), retain_graph=True, allow_unused=True)
        return {name for name, grad in zip(names, grads, strict=True) if grad is not None and grad.any()}

    assert not reached([first]) & reached(others)
    assert reached([first]) | reached(others) == set(names)


def test_fresh_masks_differ(tiny_target):
    """The masks are as large as the feature: with masks of 0 all places begin as one."""
    target = tiny_target(vocab=V, layers=4, hidden=64, dtype=torch.float32)
    torch.manual_seed(0)
    options = {"depth": 4, "layers": 2, "anchors": 0, "taps": [1, LAST]}
    fresh = Diffusion.for_target(target, **options)
    target.tap(fresh.taps)
    batch = batch_of(target, random_texts())
    states = torch.stack([step.hidden[:10] for step in fresh.unroll(batch, target)])  # (K, 10, D)
    alike = torch.nn.functional.cosine_similarity(states[:1], states[1:], dim=-1)
    assert alike.max() < 0.9
    newest = batch.taps.flatten(0, 1)[:10, -1]
    own = torch.nn.functional.cosine_similarity(states, newest, dim=-1)
    assert own.min() > 0.2  # each still says what the feature does


# -- streaks ---------------------------------------------------------------------------------------


def block(vocab, depth, seed):
    """Hidden states of one anchor's depths, a head, the target's features and its text."""
    dice = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=dice, dtype=torch.float64)

    hidden = [draw(1, 5).requires_grad_() for _ in range(depth)]
    text = torch.randint(vocab, (1, depth + 2), generator=dice)
    return hidden, Head(draw(vocab, 5)), draw(1, depth + 2, 5), text


def graded(objective, hidden, head, last, text):
    steps = [DraftStep(h, torch.tensor([0]), j, head, {}) for j, h in enumerate(hidden, 1)]
    total, scored = objective(steps, last, head, {}, 1.0, text)
    return torch.autograd.grad(total, hidden), scored


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "objective",
    [Objective(hit, Streak(0.0, 0.0, "token")), Objective(nll, DPace(0.0, 0.0, "token"))],
    ids=["streak", "dpace without smoothing"],
)
def test_gradient_is_that_of_the_streak(objective, seed):
    """- sum_j prod_{i <= j} q_i(x_i), taken directly and as D-PACE weighs logarithms."""
    hidden, head, last, text = block(7, 4, seed)
    q = torch.stack([head(h)[0].softmax(-1) for h in hidden])
    streak = q.gather(1, text[0, 2:, None])[:, 0].cumprod(0).sum()
    want = torch.autograd.grad(-streak, hidden)
    got, scored = graded(objective, hidden, head, last, text)
    assert sum(float(s.survival) for s in scored) == pytest.approx(float(streak.detach()), abs=1e-12)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-12)


def test_unknown_acceptance_is_refused():
    with pytest.raises(UserError, match=r"weights\.acceptance=all"):
        Streak(0.0, 0.0, "all")


def test_token_outside_the_draft_vocabulary_ends_a_streak():
    hidden, head, last, _ = block(4, 2, 0)
    small = Head(head.weight[:3], d2t=torch.arange(3))
    steps = [DraftStep(h, torch.tensor([0]), j, small, {}) for j, h in enumerate(hidden, 1)]
    objective = Objective(hit, Streak(0.0, 0.0, "token"))
    total, scored = objective(steps, last, head, {}, 1.0, torch.tensor([[0, 0, 3, 1]]))
    assert [s.survival for s in scored] == [0.0, 0.0]
    assert torch.autograd.grad(total, hidden)[1].abs().max() == 0  # nothing behind a miss counts
