"""P-EAGLE, EAGLE-3 in one pass, and PRISM, EAGLE with a module for each step."""

from __future__ import annotations

import pytest
import torch
from dense import dense, layer_step, norm
from exact import EnumeratingCoin, Script
from faces import CHAIN, CHUNKS, SAMPLED, TREE, Follower, K, V, batch_of, both, equal, random_texts

from benchmarks.lyanna_ablation import head_products
from decode.errors import UserError
from decode.plan import Plan
from decode.sampling import Sampler
from drafters import optional
from drafters.base import Batch
from drafters.checkpoint import io as hub
from drafters.layers import unroll_attention as unrolled
from drafters.layers.decoder_layer import DecoderLayer
from drafters.models.prism import Prism

MASKS = ["010111111101", "111011011000"]


def patchy(target) -> Batch:
    """Two texts of 12 tokens, some of them supervised."""
    texts = random_texts(2, 12)
    return batch_of(target, texts, torch.tensor([[c == "1" for c in text] for text in MASKS]))


@torch.no_grad()
def states(drafter, target, batch) -> dict[tuple[int, int], torch.Tensor]:
    """(anchor, depth) -> what the head reads."""
    return {
        (anchor, step.depth): row
        for step in drafter.unroll(batch, target)
        for anchor, row in zip(step.anchor.tolist(), step.hidden, strict=True)
    }


def drafted(drafter, target, plan):
    """A draft below two texts, as deep as it may be: `Follower` dictates K tokens and no more."""
    follower = Follower(drafter, target, random_texts(), (5, 3))
    with torch.no_grad():
        coin = EnumeratingCoin([Script(0), Script(1)])
        return drafter.propose(follower.state, target, Sampler(1.0), coin, plan)


def slopes_of(drafter, hidden, wanted):
    """Gradients of a random mix of rows, for all weights but the head's."""
    pull = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(5), dtype=wanted.dtype)
    weights = [w for name, w in drafter.named_parameters() if name != "lm_head.weight"]
    return [torch.autograd.grad((pull * rows).sum(), weights) for rows in (hidden, wanted)]


def check_slopes(drafter, hidden, wanted):
    torch.testing.assert_close(hidden, wanted, rtol=0, atol=1e-12)
    for mine, other in zip(*slopes_of(drafter, hidden, wanted), strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize("name", ["p_eagle", "prism"])
def test_it_trains_in_mixed_precision(tiny_target, make_drafter, name):
    """All depths in one dtype, whatever a mask's own is."""
    target, drafter = both(tiny_target, make_drafter, name)
    batch = patchy(target)
    with torch.autocast("cpu", torch.bfloat16):
        steps = list(drafter.unroll(batch, target))
    assert [step.hidden.dtype for step in steps] == [torch.bfloat16] * K
    want = states(drafter, target, batch)
    for step in steps:
        for anchor, row in zip(step.anchor.tolist(), step.hidden.float(), strict=True):
            assert torch.cosine_similarity(row, want[anchor, step.depth], dim=0) > 0.99


# -- P-EAGLE -------------------------------------------------------------------------------------


def one_pass(drafter, target, tokens, taps):
    """(K, D) of the newest anchor: one causal pass over the pairs of a text, masks behind them.

    Args:
        tokens: (n + 1,), the root among them.
        taps: (n, L, D).
    """
    feature = torch.stack([norm(t, m) for t, m in zip(taps.unbind(1), drafter.fc_norm, strict=True)], 1)
    feature = feature.flatten(1) @ drafter.fc.weight.T
    masks = drafter.depth - 1
    embedded = torch.cat([target.embed(tokens[1:]), drafter.mask_token.expand(masks, -1)])
    x = torch.cat([feature, drafter.mask_hidden.expand(masks, -1)])
    times = torch.arange(len(x))
    for i, layer in enumerate(drafter.stack):
        y = norm(x if i else embedded, layer.input_layernorm)
        y = y if i else torch.cat([y, norm(x, drafter.hidden_norm)], 1)
        x = layer_step(layer, y, x, times, drafter.rotary.theta, [])
    return norm(x, drafter.norm)[-drafter.depth :]


@pytest.mark.parametrize("layers", [1, 2])
def test_an_unroll_with_masks_is_one_causal_pass(tiny_target, make_drafter, layers, monkeypatch):
    """Values and gradients, of the mask's two vectors too."""
    monkeypatch.setattr("drafters.layers.unroll_attention.MIN_QUERIES", 3)
    monkeypatch.setitem(unrolled.SCORE_BYTES, "cpu", 1)
    target = tiny_target(vocab=V, layers=4, hidden=16)  # float64
    drafter = make_drafter("p_eagle", target, depth=4, layers=layers)
    batch = batch_of(target, random_texts(2, 12))
    ours, wanted = [], []
    for step in drafter.unroll(batch, target):
        for flat, row in zip(step.anchor.tolist(), step.hidden, strict=True):
            text, t = divmod(flat, 12)
            ours.append(row)
            found = one_pass(drafter, target, batch.tokens[text, : t + 2], batch.taps[text, : t + 1])
            wanted.append(found[step.depth - 1])
    assert len(ours) == 2 * (10 + 9 + 8 + 7)
    check_slopes(drafter, torch.stack(ours), torch.stack(wanted))


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.covering
def test_a_draft_is_one_pass_and_one_head_product(tiny_target, make_drafter, depth, layers, monkeypatch):
    target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)
    passes, finish = [], DecoderLayer.finish
    monkeypatch.setattr(DecoderLayer, "finish", lambda *args: passes.append(1) or finish(*args))
    for name, want in [("p_eagle", (min(depth - 1, 1), 1)), ("eagle3", (depth - 1, depth))]:
        drafter = make_drafter(name, target, depth=5, layers=layers)
        for plan in (Plan(depth), Plan(depth, 3, 8), Plan(depth, proposal="sampled", drafts=2)):
            draft = drafted(drafter, target, plan)
            assert draft.depth == depth
            assert len(passes) / layers - 1 == want[0]  # one reads the settled pairs
            passes.clear()
        assert head_products(target, drafter, [1, 2, 3], Plan(depth, 3, 8)) == want[1]
        passes.clear()


def test_no_drafted_token_moves_a_bit_of_any_state(tiny_target, make_drafter):
    target, drafter = both(tiny_target, make_drafter, "p_eagle")
    texts = random_texts(rows=1)
    batch = batch_of(target, texts)
    before = states(drafter, target, batch)
    for anchor in range(4, 12):
        for first, same in [(anchor + 2, True), (anchor + 1, False)]:  # behind the root, or with it
            other = texts.clone()
            other[0, first:] = (other[0, first:] + 1) % V
            after = states(drafter, target, batch._replace(tokens=other))
            for depth in range(1, K + 1):
                assert torch.equal(before[anchor, depth], after[anchor, depth]) == same


def test_drafted_tokens_change_no_law_of_a_draft(tiny_target, make_drafter):
    target, drafter = both(tiny_target, make_drafter, "p_eagle")
    texts = random_texts()
    follower = Follower(drafter, target, texts, (5, 3))
    first = follower.propose(SAMPLED)
    for row, end in enumerate(follower.settled):
        follower.texts[row, end + 1 :] = (follower.texts[row, end + 1 :] + 1) % V
    second = follower.propose(SAMPLED)
    assert (first.tokens != second.tokens).all()
    assert torch.equal(first.q, second.q)


def test_a_draft_deeper_than_its_masks_were_trained_is_refused(tiny_target, make_drafter):
    target, drafter = both(tiny_target, make_drafter, "p_eagle")
    follower = Follower(drafter, target, random_texts(), (5, 3))
    with pytest.raises(UserError, match=rf"set decode\.depth={K} or less"):
        follower.propose(Plan(K + 1))


def test_it_goes_on_from_an_eagle3(tiny_target, make_drafter, tmp_path):
    target, old = both(tiny_target, make_drafter, "eagle3", norm_output=True)
    hub.save(old, target, tmp_path)
    _, new = both(tiny_target, make_drafter, "p_eagle", seed=1)
    assert hub.warm_start(new, tmp_path, target) == ["mask_token (not there)", "mask_hidden (not there)"]
    batch = batch_of(target, random_texts())
    ours, theirs = (states(drafter, target, batch) for drafter in (new, old))
    assert all(torch.equal(row, theirs[at]) == (at[1] == 1) for at, row in ours.items())


# -- PRISM ---------------------------------------------------------------------------------------

# Which depths, of four, differ when a module does: those that use it, and what is fed by them.
ORDERS = [
    ([0, 1], [[1, 2, 3, 4], [2, 3, 4]]),
    ([0, 0, 1], [[1, 2, 3, 4], [3, 4]]),
    ([0, 1, 2], [[1, 2, 3, 4], [2, 3, 4], [3, 4]]),
    ([0, 1, 0, 2], [[1, 2, 3, 4], [2, 3, 4], [4]]),
]


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("order", [order for order, _ in ORDERS], ids=str)
def test_an_unroll_with_modules_is_the_dense_one(tiny_target, make_drafter, order, detach, monkeypatch):
    """Values at every depth, of the module that the order names; and, undetached, gradients."""
    monkeypatch.setattr("drafters.layers.unroll_attention.MIN_QUERIES", 3)
    monkeypatch.setitem(unrolled.SCORE_BYTES, "cpu", 1)
    target = tiny_target(vocab=V, layers=4, hidden=16)  # float64
    drafter = make_drafter("prism", target, depth=4, modules=order, detach=detach)
    want, ours, wanted = dense(drafter, batch := patchy(target), target), [], []
    for step in drafter.unroll(batch, target):
        ours.append(step.hidden)
        wanted += [want[a // 12, a % 12, step.depth] for a in step.anchor.tolist()]
    assert step.depth == 4
    ours, wanted = torch.cat(ours), torch.stack(wanted)
    if detach:
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)
    else:
        check_slopes(drafter, ours, wanted)


@pytest.mark.parametrize(("order", "differ"), ORDERS, ids=str)
def test_a_module_moves_the_depths_from_its_first_step_on(tiny_target, make_drafter, order, differ):
    """In both faces."""
    target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)
    drafter = make_drafter("prism", target, depth=4, modules=order)
    batch, plan = batch_of(target, random_texts()), Plan(4, proposal="sampled")

    def faces():
        return states(drafter, target, batch), drafted(drafter, target, plan).q

    before, law = faces()
    for module, depths in zip([drafter, *drafter.later], differ, strict=True):
        for weight in (module.fc.weight, module.layer.down_proj.weight):
            kept = weight.detach().clone()
            weight.data.mul_(1.5)
            after, other = faces()
            weight.data.copy_(kept)
            assert {at[1] for at, row in after.items() if not torch.equal(row, before[at])} == {*depths}
            assert [d for d in range(1, 5) if not torch.equal(law[:, d - 1], other[:, d - 1])] == depths


def test_a_step_reads_the_keys_and_values_that_other_modules_wrote(tiny_target, make_drafter):
    """With the first module's values gone, but not its feature, the second step's state is another."""
    target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)
    drafter = make_drafter("prism", target, modules=[0, 1])
    layer = drafter.layer
    layer.o_proj.weight.data.zero_()  # the first step does not look
    batch = batch_of(target, random_texts())
    before = states(drafter, target, batch)
    layer.qkv_proj.weight.data[layer.queries :].mul_(0.5)
    after = states(drafter, target, batch)
    for (anchor, depth), row in after.items():
        assert torch.equal(row, before[anchor, depth]) == (depth == 1)


def test_with_one_module_it_is_eagle_bit_for_bit(tiny_target, make_drafter):
    target, eagle = both(tiny_target, make_drafter, "eagle")
    _, prism = both(tiny_target, make_drafter, "prism", seed=1, modules=[0], detach=False)
    prism.load_state_dict(eagle.state_dict())
    batch, found = patchy(target), []
    for drafter in (eagle, prism):
        drafter.train()
        steps = list(drafter.unroll(batch, target))
        loss = sum(step.hidden.square().sum() + step.aux["feature"].sum() for step in steps)
        slopes = torch.autograd.grad(loss, list(drafter.parameters()))
        follower = Follower(drafter.eval(), target, random_texts())
        drafts = []
        for counts in CHUNKS[:3]:
            follower.advance(counts)
            drafts += [follower.propose(plan) for plan in (SAMPLED, CHAIN, TREE)]
        found.append(([step.hidden for step in steps], slopes, drafts))
    (hidden, slopes, drafts), (other, others, redrawn) = found
    assert all(torch.equal(*pair) for pair in zip(hidden, other, strict=True))
    assert all(torch.equal(*pair) for pair in zip(slopes, others, strict=True))
    assert all(equal(*pair) for pair in zip(drafts, redrawn, strict=True))


def test_more_modules_cost_weights_and_nothing_else(tiny_target, make_drafter):
    target, eagle = both(tiny_target, make_drafter, "eagle")
    _, prism = both(tiny_target, make_drafter, "prism", modules=[0, 1, 2])
    assert hub.count_parameters(prism) == 3 * hub.count_parameters(eagle)
    held = []
    for drafter in (eagle, prism):
        follower = Follower(drafter, target, random_texts(), (5, 3))
        held.append(optional.kv_bytes_per_token(drafter, follower.state))
    assert held[0] == held[1] > 0


def test_all_modules_begin_alike(tiny_target):
    target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)
    sizes = {"depth": K, "detach": True, "feature_noise": 0.1, "feature_weight": 1.0}
    prism = Prism.for_target(target, modules=[0, 1, 2], **sizes)
    for module in prism.later:
        assert all(torch.equal(w, prism.state_dict()[name]) for name, w in module.state_dict().items())
        assert module.fc.weight.data_ptr() != prism.fc.weight.data_ptr()


def test_every_module_goes_on_from_an_eagle(tiny_target, make_drafter, tmp_path):
    target, eagle = both(tiny_target, make_drafter, "eagle")
    _, prism = both(tiny_target, make_drafter, "prism", seed=1, modules=[0, 1, 2])
    for drafter in (eagle, prism):
        drafter.add_confidence()  # which is of the whole, and of no module
    hub.save(eagle, target, tmp_path)
    assert hub.warm_start(prism, tmp_path, target) == []
    batch = batch_of(target, random_texts())
    ours, theirs = (states(drafter, target, batch) for drafter in (prism, eagle))
    assert all(torch.equal(row, theirs[at]) for at, row in ours.items())


def test_it_goes_on_from_a_prism_module_by_module(tiny_target, make_drafter, tmp_path):
    target, old = both(tiny_target, make_drafter, "prism")
    hub.save(old, target, tmp_path)
    _, new = both(tiny_target, make_drafter, "prism", seed=1)
    assert hub.warm_start(new, tmp_path, target) == []
    assert all(torch.equal(w, old.state_dict()[name]) for name, w in new.state_dict().items())
    _, eagle = both(tiny_target, make_drafter, "eagle")
    with pytest.raises(UserError, match="drafter 'prism', not 'eagle'"):
        hub.warm_start(eagle, tmp_path, target)


@pytest.mark.parametrize("order", [[], [1, 0], [0, 2], [0, -1], [0, 0, 0, 1]], ids=str)
def test_an_order_that_is_none_is_refused(tiny_target, make_drafter, order):
    with pytest.raises(UserError, match=r"drafter\.modules=.* 0 first and none left out in the 3"):
        both(tiny_target, make_drafter, "prism", modules=order)
