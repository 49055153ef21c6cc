"""The contract of every drafter in conf/drafter: what it decodes with is what was trained."""

from __future__ import annotations

import importlib

import pytest
import torch
from drafter_checks import (
    CHAIN,
    CHUNKS,
    ROUNDING,
    SAMPLED,
    TREE,
    Follower,
    K,
    V,
    alike,
    assert_decodes_as_trained,
    batch_of,
    best_paths,
    equal,
    named,
    paths,
    plans_of,
    probs_at,
    random_texts,
    unrolled,
)
from exact import EnumeratingCoin, Script, paths_of

from decode.draft import Draft
from decode.errors import UserError
from decode.model.head import Head
from decode.plan import Plan
from decode.sampling import Sampler
from drafters import optional
from drafters.base import Batch, supervised_anchors
from drafters.checkpoint import io as checkpoint_io
from drafters.families.two_drafters import TwoDrafters

# -- decoding computes what training computes --------------------------------------------------


def with_probs(pair):
    """A pair whose drafter has distributions to draw from."""
    if "sampled" not in pair[1].traits.proposals:
        pytest.skip("has no distribution")
    return pair


def unmixed(pair, plan):
    """A pair whose fixed nodes follow its own distributions, no mixture."""
    if isinstance(pair[1], TwoDrafters) and pair[1].combines(plan):
        pytest.skip("its fixed nodes are those of a mixture, which a test of its own looks at")
    return with_probs(pair)


@pytest.fixture(params=[False, True], ids=["trainable", "frozen"])
def frozen(request, pair):
    """Frozen weights in inference mode, as they are decoded with: copies of them may stand for them."""
    if request.param:
        trained = pair[1].trains
        pair[1].requires_grad_(False)
        if pair[1].trains != trained:
            pytest.skip("frozen, it has no training to compare with")
    with torch.inference_mode(request.param):
        yield request.param


@pytest.mark.usefixtures("frozen")
def test_decoding_computes_the_probs_of_training(pair):
    target, drafter = with_probs(pair)
    assert_decodes_as_trained(drafter, target, random_texts())


def test_probs_depend_on_the_context_and_the_depth(pair):
    """Else the test above could not fail."""
    target, drafter = with_probs(pair)
    texts = random_texts()
    all_probs = unrolled(drafter, target, texts)
    compared = 0
    for (row, anchor, depth), probs in all_probs.items():
        assert probs.max() < 0.6  # else there is little left to differ in
        for other in [(1 - row, anchor, depth), (row, anchor - 1, depth), (row, anchor, depth - 1)]:
            newest = texts[other[0], other[1] + other[2]]  # a drafter may look at no other token
            if other in all_probs and newest != texts[row, anchor + depth]:
                assert (all_probs[other] - probs).abs().max() > 100 * ROUNDING
                compared += 1
    assert compared > len(all_probs)


def test_a_sampled_chains_probs_are_warped_as_the_sampler_says(pair):
    target, drafter = with_probs(pair)
    follower = Follower(drafter, target, random_texts(), (6, 4))
    plain = follower.propose(SAMPLED).q
    for sampler in [Sampler(0.5), Sampler(1.0, top_k=3), Sampler(0.0), Sampler(0.7, top_p=0.8, min_p=0.05)]:
        want = sampler.probs(plain.flatten(0, 1).log()).view_as(plain)
        torch.testing.assert_close(follower.propose(SAMPLED, sampler).q, want, rtol=0, atol=ROUNDING)


def test_a_sampled_chain_is_drawn_from_the_probs_it_carries(pair):
    target, drafter = with_probs(pair)
    follower = Follower(drafter, target, random_texts(), (6, 4))
    coin, drawn = EnumeratingCoin([Script(0), Script(1)]), []
    draw = coin.draw

    def spy(weights, key, active):
        drawn.append((key.slot, weights, draw(weights, key, active)))
        return drawn[-1][-1]

    coin.draw = spy
    with torch.no_grad():
        draft = drafter.propose(follower.state, target, Sampler(0.5), coin, SAMPLED)
    assert [slot for slot, _, _ in drawn] == list(range(K))
    for slot, weights, token in drawn:
        torch.testing.assert_close(draft.q[:, slot], weights, rtol=0, atol=0)
        assert draft.tokens[:, slot].tolist() == token.tolist()


@pytest.mark.usefixtures("frozen")
def test_every_level_of_a_tree_computes_the_probs_of_training(pair, monkeypatch):
    """Drive the step of `expand` along arbitrary beams, which scores would seldom choose."""
    target, drafter = with_probs(pair)
    follower = Follower(drafter, target, random_texts())
    dice = torch.Generator().manual_seed(3)
    grown = []

    def drive(logits, step, sampler, coin, plan, vocabulary=None, confidence=None, limit=None):
        del sampler, coin, plan
        assert limit is None  # no states of an earlier round
        entries, found = [[()], [()]], [(((), ()), logits)]
        for _ in range(K - 1):
            tokens = torch.randint(V, (2, 4), generator=dice)
            parents = torch.randint(len(entries[0]), (2, 4), generator=dice)
            logits = step(tokens, parents)
            lines = [zip(t, p, strict=True) for t, p in zip(tokens.tolist(), parents.tolist(), strict=True)]
            entries = [[(*old[p], t) for t, p in line] for old, line in zip(entries, lines, strict=True)]
            each = logits.expand(-1, 4, -1)  # one row stands for all where they are alike
            found += [((entries[0][w], entries[1][w]), each[:, w]) for w in range(4)]
        ids = None if vocabulary is None else vocabulary.ids
        grown.append([(names, named(ids, rows.softmax(-1), V)) for names, rows in found])
        return Draft.chain(torch.zeros(2, K, dtype=torch.long))

    homes = [base.__module__ for base in type(drafter).__mro__]
    growing = [home for home in homes if hasattr(importlib.import_module(home), "expand")]
    if not growing:
        return  # it drafts without looking at its own tokens, so nothing grows
    monkeypatch.setattr(f"{growing[0]}.expand", drive)
    for counts in CHUNKS[:4]:
        follower.advance(counts)
        follower.propose(TREE)
        known = follower.known
        rows = [(row, path, found[row]) for names, found in grown.pop() for row, path in enumerate(names)]
        wanted = probs_at(drafter, target, [(known[row], path) for row, path, _ in rows])
        for (*_, probs), want in zip(rows, wanted, strict=True):
            torch.testing.assert_close(probs, want, rtol=0, atol=ROUNDING)


def test_parallel_drafts_carry_the_probs_of_training(pair):
    plan = Plan(depth=K, proposal="sampled", drafts=5)
    target, drafter = with_probs(pair)
    follower, places, got = Follower(drafter, target, random_texts()), [], []
    for counts in CHUNKS[:3]:
        follower.advance(counts)
        coin = EnumeratingCoin([Script(sum(counts)), Script(1)])
        with torch.no_grad():
            draft = drafter.propose(follower.state, follower.target, Sampler(0.3), coin, plan)
        for row, prefix in enumerate(follower.known):
            known = paths_of(draft.tokens[row].tolist(), draft.parents[row].tolist())
            for entry, slot in enumerate(draft.probs.owner[row].tolist()):
                if slot >= 0:
                    places.append((prefix, known[slot]))
                    got.append(draft.q[row, entry])
    want = Sampler(0.3).probs(torch.stack(probs_at(drafter, target, places)).log())
    torch.testing.assert_close(torch.stack(got), want, rtol=0, atol=10 * ROUNDING)


@pytest.mark.usefixtures("frozen")
def test_a_chosen_chain_holds_the_likeliest_tokens(pair):
    target, drafter = unmixed(pair, CHAIN)
    follower, places, chosen = Follower(drafter, target, random_texts()), [], []
    for counts in CHUNKS:
        follower.advance(counts)
        draft = follower.propose(CHAIN)
        assert draft.q is None
        assert draft.tokens.shape == (2, K)
        for prefix, chain in zip(follower.known, draft.tokens.tolist(), strict=True):
            places += [(prefix, chain[:depth]) for depth in range(K)]
            chosen += chain
    assert [int(probs.argmax()) for probs in probs_at(drafter, target, places)] == chosen


def test_a_tree_keeps_the_likeliest_of_all_paths_it_looked_at(pair):
    """EAGLE-2's rerank (arXiv:2406.16858, section 4.2), scored by the unroll of training."""
    target, drafter = unmixed(pair, TREE)
    follower = Follower(drafter, target, random_texts())
    for counts in CHUNKS[:3]:
        follower.advance(counts)
        draft = follower.propose(TREE)
        assert draft.q is None
        assert draft.depth == K
        for row, prefix in enumerate(follower.known):

            def log_probs(found, prefix=prefix):
                places = [(prefix, path) for path in found]
                return [row.log() for row in probs_at(drafter, target, places)]

            assert set(paths(draft, row)) - {()} == set(best_paths(log_probs, TREE))


# -- proposing and selecting -------------------------------------------------------------------


def test_proposing_twice_gives_the_same_draft(pair):
    target, drafter = pair
    follower = Follower(drafter, target, random_texts())
    for counts in CHUNKS[:3]:
        follower.advance(counts)
        for plan in plans_of(drafter):
            assert equal(follower.propose(plan), follower.propose(plan))


def test_proposing_changes_nothing_for_later_rounds(pair):
    target, drafter = pair
    texts = random_texts()
    quiet, busy = Follower(drafter, target, texts), Follower(drafter, target, texts)
    plans = plans_of(drafter)
    for counts in CHUNKS:
        quiet.advance(counts)
        busy.advance(counts)
        for plan in reversed(plans):
            busy.propose(plan)
    for plan in reversed(plans):
        assert equal(quiet.propose(plan), busy.propose(plan), atol=ROUNDING)


def test_a_text_may_come_in_any_pieces(pair):
    target, drafter = pair
    texts = random_texts()
    once, pieces = Follower(drafter, target, texts), Follower(drafter, target, texts)
    once.advance([sum(counts[row] for counts in CHUNKS) for row in range(2)])
    for counts in CHUNKS:
        pieces.advance(counts)
    for plan in plans_of(drafter):
        drafts = once.propose(plan), pieces.propose(plan)
        assert all(alike(drafts[0], row, drafts[1], row) for row in range(2))


def test_proposing_changes_no_settled_slot_of_the_targets_cache(pair):
    target, drafter = pair
    if not drafter.traits.reads_cache:
        pytest.skip("does not read it")
    follower = Follower(drafter, target, random_texts())
    written = 0
    for counts in CHUNKS:
        follower.advance(counts)
        store = follower.cache.store
        for plan in plans_of(drafter):
            lengths, before = list(store.lengths), [part.clone() for part in store._data.unbind(2)]
            follower.propose(plan)
            assert store.lengths == lengths
            for row, length in enumerate(lengths):
                old, new = before[row], store._data[:, :, row, : before[row].shape[2]]
                assert torch.equal(new[:, :, :length], old[:, :, :length])
                written += int((new[:, :, length:] != old[:, :, length:]).any())
    assert written or optional.kv_bytes_per_token(drafter, follower.state)  # else behind a cache of its own


@pytest.mark.parametrize("rows", [[2, 0], [2, 1, 0]], ids=str)
@pytest.mark.covering
def test_select_keeps_these_rows_in_this_order(pair, rows):
    target, drafter = pair
    texts = random_texts(3)
    whole, part = Follower(drafter, target, texts), Follower(drafter, target, texts)
    for follower in (whole, part):
        follower.advance((3, 6, 2))
        follower.advance((2, 1, 4))
    part.select(rows)
    for _ in range(2):
        for plan in plans_of(drafter):
            want, got = whole.propose(plan), part.propose(plan)
            assert all(alike(got, place, want, row) for place, row in enumerate(rows))
        whole.advance((1, 2, 3))
        part.advance([(1, 2, 3)[r] for r in rows])


@pytest.mark.parametrize("begun", [True, False], ids=["drafting", "read"])
@pytest.mark.covering
def test_rows_that_join_draft_as_they_would_alone(pair, begun):
    target, drafter = pair
    texts = random_texts(4)
    apart = [Follower(drafter, target, texts[rows]) for rows in ([0, 1], [2, 3])]
    both, late = [Follower(drafter, target, texts[rows]) for rows in ([0, 1], [2, 3])]
    for follower in (apart[0], both):
        follower.advance((3, 1))
        if begun:
            follower.propose(plans_of(drafter)[0])
            follower.advance((1, 2))
    for follower in (apart[1], late):
        follower.advance((6, 2))
    both.append(late)
    for _ in range(2):
        for plan in plans_of(drafter):
            want, got = [follower.propose(plan) for follower in apart], both.propose(plan)
            for place in range(4):
                assert alike(got, place, want[place // 2], place % 2)
        for follower, counts in zip(apart, [(1, 2), (3, 1)], strict=True):
            follower.advance(counts)
        both.advance((1, 2, 3, 1))


def test_rows_may_be_dropped_before_anything_was_absorbed(pair):
    """A request may end with the token of its prefill."""
    target, drafter = pair
    texts = random_texts(3)
    part, fresh = Follower(drafter, target, texts), Follower(drafter, target, texts[[2, 1]])
    part.select([2, 1])
    for follower in (part, fresh):
        follower.advance((3, 5))
    for plan in plans_of(drafter):
        assert equal(part.propose(plan), fresh.propose(plan), atol=ROUNDING)


def test_a_row_does_not_depend_on_its_neighbours(pair):
    target, drafter = pair
    texts = random_texts(3)
    batch, single = Follower(drafter, target, texts), Follower(drafter, target, texts[1:2])
    for counts in [(7, 3, 1), (1, 2, 3), (2, 4, 1)]:
        batch.advance(counts)
        single.advance(counts[1:2])
        for plan in plans_of(drafter):
            assert alike(batch.propose(plan), 1, single.propose(plan), 0)


@pytest.mark.parametrize("plan", [SAMPLED, Plan(K, 3, 8, proposal="hybrid")], ids=lambda p: p.name)
def test_a_plan_of_nodes_that_it_cannot_make_is_refused(pair, plan):
    target, drafter = pair
    if plan.proposal in drafter.traits.proposals:
        drafter.check(plan)
        return
    follower = Follower(drafter, target, random_texts(), (6, 4))
    with pytest.raises(UserError, match=r"set decode\.proposal=fixed"):
        follower.propose(plan)


def test_nothing_is_kept_on_the_module(pair):
    target, drafter = pair
    before = {k: v.clone() for k, v in drafter.state_dict().items()}
    names = set(vars(drafter))
    follower = Follower(drafter, target, random_texts(), (4, 3))
    follower.propose(TREE)
    assert set(vars(drafter)) == names
    assert all(torch.equal(before[k], v) for k, v in drafter.state_dict().items())


# -- training ----------------------------------------------------------------------------------


def taught(pair):
    """A pair whose drafter trains."""
    if not pair[1].trains:
        pytest.skip("used as it is")
    return pair


def some_loss(drafter, target, batch: Batch) -> torch.Tensor:
    """Of a token and all auxiliary rows."""
    total = torch.zeros((), dtype=batch.last.dtype)
    for step in drafter.unroll(batch, target):
        total = total + step.head(step.hidden).log_softmax(-1)[:, 0].sum()
        total = total + sum(rows.sum() for rows in step.aux.values())
    return total


def test_gradients_reach_every_trainable_weight_and_none_of_the_targets(pair):
    target, drafter = taught(pair)
    drafter.train()
    some_loss(drafter, target, batch_of(target, random_texts())).backward()
    for name, weight in drafter.named_parameters():
        if weight.requires_grad:
            assert weight.grad is not None, name
            assert weight.grad.abs().max() > 0, name
    assert all(weight.grad is None for weight in target.model.parameters())
    assert not any(weight.requires_grad for weight in target.model.parameters())


def test_the_gradient_of_training_is_the_derivative_of_its_loss(pair):
    """Along a random direction of all weights, by central differences: some backward passes are our own."""
    target, drafter = taught(pair)
    target.model.double()
    drafter.double().train()
    # transformers' norms compute in fp32, whose rounding a longer difference has to exceed.
    rounds = any(type(module).__module__.startswith("transformers") for module in drafter.modules())
    length, error = (3e-4, 2e-4) if rounds else (1e-6, 1e-6)
    drafter.detach = False  # of HASS and of diffusion, which leave a part of it out
    batch = batch_of(target, random_texts())
    weights = [weight for weight in drafter.parameters() if weight.requires_grad]
    dice = torch.Generator().manual_seed(2)
    towards = [torch.randn(weight.shape, generator=dice, dtype=weight.dtype) for weight in weights]

    @torch.no_grad()
    def moved(by: float) -> torch.Tensor:
        torch._foreach_add_(weights, towards, alpha=by)
        value = some_loss(drafter, target, batch)
        torch._foreach_sub_(weights, towards, alpha=by)
        return value

    grads = torch.autograd.grad(some_loss(drafter, target, batch), weights)
    want = (moved(length) - moved(-length)) / (2 * length)
    got = sum((grad * way).sum() for grad, way in zip(grads, towards, strict=True))
    torch.testing.assert_close(got, want, rtol=error, atol=error)


def test_the_target_is_no_part_of_the_drafter(pair):
    target, drafter = pair
    theirs = {id(w) for w in target.model.parameters()}
    assert not any(id(w) in theirs for w in drafter.parameters())


def test_noise_in_training_is_a_function_of_the_batchs_seed(pair):
    target, drafter = taught(pair)
    drafter.train()
    batch = batch_of(target, random_texts())

    def hidden(seed):
        return next(iter(drafter.unroll(batch._replace(seed=seed), target))).hidden

    first = hidden(3)
    torch.manual_seed(77)
    assert torch.equal(hidden(3), first)
    if getattr(drafter, "feature_noise", 0):
        assert not torch.equal(hidden(4), first)
    drafter.eval()
    assert torch.equal(hidden(3), hidden(4))


MASKS = {"all": "1" * 12, "answer": "000011111111", "cut": "000011110000", "turns": "001111011111"}
MASKS |= {"short": "000000000011", "first": "110000000000", "scattered": "010111010111", "none": "0" * 12}


def golden_batch(target, masks) -> Batch:
    """Token i is i, and so says the feature at i - 1: the teacher's row at i names token i + 1."""
    rows, length = len(masks), len(masks[0])
    mask = torch.tensor([[c == "1" for c in text] for text in masks])
    tokens = torch.arange(length).repeat(rows, 1)
    place = torch.nn.functional.one_hot(tokens, target.hidden_size).to(target.dtype)
    return Batch(tokens, mask, place[:, :, None].repeat(1, 1, len(target.taps), 1), place)


def check_golden(drafter, target, masks):
    batch = golden_batch(target, masks)
    names = torch.zeros(V, target.hidden_size)
    for i in range(target.hidden_size):
        names[(i + 1) % V, i] = 1  # the head that reads "token i + 1" off the feature of position i
    teacher = Head(names)
    length = len(masks[0])
    left = {(row, t): True for row in range(len(masks)) for t in range(length)}
    depths = []
    for step in drafter.unroll(batch, target):
        depths += [step.depth] * (step.depth > 0 and len(step.anchor) > 0)
        want = []
        for row, text in enumerate(masks):
            for t in range(length):
                here = t + 1 + step.depth
                alive = here < length and text[here] == "1"
                if step.depth:  # an anchor drafts from depth 1 on
                    alive = left[row, t] = left[row, t] and alive
                if alive:
                    want.append(row * length + t)
        assert step.anchor.tolist() == want
        assert step.hidden.shape[0] == len(want)
        row = batch.last.flatten(0, 1)[step.anchor + step.depth]
        assert teacher(row).argmax(-1).tolist() == [a % length + 1 + step.depth for a in want]
        for name, values in step.aux.items():
            assert values.shape == (len(want),), name
        if "feature" in step.aux:
            states, _ = step.head.parts(step.hidden)
            loss = torch.nn.functional.smooth_l1_loss(states, row, reduction="none").mean(-1)
            torch.testing.assert_close(step.aux["feature"], loss)
    longest = max(len(run) for text in masks for run in text[2:].replace("0", " ").split(" "))
    deepest = 1 if drafter.traits.depth_invariant else K
    assert depths == list(range(1, min(deepest, longest) + 1))


@pytest.mark.parametrize("mask", ["short", "none"])
@pytest.mark.covering
def test_anchors_depths_and_teacher_rows_are_where_the_conventions_say(pair, mask):
    target, drafter = taught(pair)
    with torch.no_grad():
        check_golden(drafter, target, [MASKS[mask]])
        check_golden(drafter, target, [MASKS[mask], *MASKS.values()])


def test_an_anchor_leaves_at_its_first_unsupervised_depth():
    mask = torch.tensor([[False, False, True, True, False, True, True]])
    alive = [supervised_anchors(mask, depth)[0].nonzero()[:, 0].tolist() for depth in (1, 2, 3)]
    assert alive == [[0, 1, 3, 4], [0, 3], []]


def test_an_anchor_knows_tokens_up_to_its_depth_and_taps_up_to_itself(pair):
    """Perturb one position: what may not see it does not change, what is nearest to it does.

    The nearest token is as far from every anchor: the newest drafted one, the root, or the one that its
    feature was made from. Some heads look at the feature only; a drafter that tunes the target, or drafts as
    it verifies, makes the feature itself, from tokens.
    """
    target, drafter = taught(pair)
    makes = drafter.traits.tunes_target or drafter.traits.drafts_in_verification
    texts = random_texts(rows=1, length=12)
    batch = batch_of(target, texts)

    @torch.no_grad()
    def hidden(tokens, taps):
        found = {}
        for step in drafter.unroll(batch._replace(tokens=tokens, taps=taps), target):
            found |= {(a, step.depth): h for a, h in zip(step.anchor.tolist(), step.hidden, strict=True)}
        return found

    before, newest, heard = hidden(texts, batch.taps), {}, {}
    for i in range(texts.shape[1]):
        tokens, taps = texts.clone(), batch.taps.clone()
        tokens[0, i] = (tokens[0, i] + 1) % V
        taps[0, i] += 1
        for place, value in hidden(tokens, batch.taps).items():
            if not torch.equal(value, before[place]):
                newest[place] = (i, value)
        for place, value in hidden(texts, taps).items():
            if not torch.equal(value, before[place]):
                heard[place] = (i, value)
    for at, latest in ((newest, (0, 1)), (heard, (0,))):
        assert all((value - before[place]).abs().max() > 1e-4 for place, (_, value) in at.items())
        for depth in {depth for _, depth in at}:
            (ahead,) = {i - t for (t, d), (i, _) in at.items() if d == depth}
            assert ahead in latest or (at is newest and ahead == depth)
    assert newest.keys() in ({}.keys(), before.keys())
    assert heard.keys() == ({} if makes or not drafter.taps else before).keys()
    assert newest or heard


# -- saved drafters (perfect ones: tests/drafters/models/test_lm.py) ------------------------------


def test_a_saved_drafter_comes_back_bit_for_bit(pair, tmp_path):
    target, drafter = pair
    drafter.requires_grad_(False)  # as the loaded one is, for the same kernels
    checkpoint_io.save(drafter, target, tmp_path, "some/target")
    loaded = checkpoint_io.load(tmp_path, target)
    assert type(loaded) is type(drafter)
    assert loaded.settings == drafter.settings
    assert not loaded.training
    ours, theirs = drafter.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    texts = random_texts()
    drafts = []
    for one in (drafter, loaded):
        follower = Follower(one, target, texts, (5, 3))
        drafts.append([follower.propose(plan) for plan in plans_of(drafter)])
    assert all(equal(*both) for both in zip(*drafts, strict=True))
