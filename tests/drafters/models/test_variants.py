"""P-EAGLE (EAGLE-3 in one pass) and PRISM (EAGLE with a module for each step)."""

from __future__ import annotations

import pytest
import torch
from dense import dense, layer_step, norm
from exact import EnumeratingCoin, Script
from faces import (
    CHAIN,
    CHUNKS,
    SAMPLED,
    TREE,
    Follower,
    K,
    V,
    assert_faces_agree,
    batch_of,
    both,
    equal,
    random_texts,
)

from benchmarks.lyanna_ablation import head_products
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.base import Batch
from drafters.checkpoint import io as checkpoint_io
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


def check_slopes(drafter, hidden, wanted):
    """Rows and the gradients of a random mix of them, for all weights but the head's."""
    torch.testing.assert_close(hidden, wanted, rtol=0, atol=1e-12)
    pull = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(5), dtype=wanted.dtype)
    weights = [w for name, w in drafter.named_parameters() if name != "lm_head.weight"]
    slopes = [torch.autograd.grad((pull * rows).sum(), weights) for rows in (hidden, wanted)]
    for mine, other in zip(*slopes, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize("name", ["p_eagle", "prism"])
def test_trains_in_mixed_precision(tiny_target, make_drafter, name):
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
def test_unroll_with_masks_is_one_causal_pass(tiny_target, make_drafter, layers, monkeypatch):
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
def test_draft_costs_one_pass_and_one_head_product(tiny_target, make_drafter, depth, layers, monkeypatch):
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


def test_p_eagle_starts_from_eagle3(tiny_target, make_drafter, tmp_path):
    target, old = both(tiny_target, make_drafter, "eagle3", norm_output=True)
    checkpoint_io.save(old, target, tmp_path)
    _, new = both(tiny_target, make_drafter, "p_eagle", seed=1)
    missing = ["mask_token (not there)", "mask_hidden (not there)"]
    assert checkpoint_io.warm_start(new, tmp_path, target) == missing
    batch = batch_of(target, random_texts())
    ours, theirs = (states(drafter, target, batch) for drafter in (new, old))
    assert all(torch.equal(row, theirs[at]) == (at[1] == 1) for at, row in ours.items())


# -- PRISM ---------------------------------------------------------------------------------------

ORDERS = [[0, 1], [0, 0, 1], [0, 1, 2], [0, 1, 0, 2]]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_decoding_equals_training_with_modules(tiny_target, make_drafter, order):
    target, drafter = both(tiny_target, make_drafter, "prism", modules=order[:K])
    assert_faces_agree(drafter, target, random_texts())


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_unroll_with_modules_is_the_dense_one(tiny_target, make_drafter, order, detach, monkeypatch):
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


def test_one_module_is_eagle_bit_for_bit(tiny_target, make_drafter):
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


def test_fresh_modules_are_alike(tiny_target):
    target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)
    sizes = {"depth": K, "detach": True, "feature_noise": 0.1, "feature_weight": 1.0}
    prism = Prism.for_target(target, modules=[0, 1, 2], **sizes)
    for module in prism.later:
        assert all(torch.equal(w, prism.state_dict()[name]) for name, w in module.state_dict().items())
        assert module.fc.weight.data_ptr() != prism.fc.weight.data_ptr()


def test_every_module_starts_from_an_eagle(tiny_target, make_drafter, tmp_path):
    target, eagle = both(tiny_target, make_drafter, "eagle")
    _, prism = both(tiny_target, make_drafter, "prism", seed=1, modules=[0, 1, 2])
    for drafter in (eagle, prism):
        drafter.add_confidence()  # which is of the whole, and of no module
    checkpoint_io.save(eagle, target, tmp_path)
    assert checkpoint_io.warm_start(prism, tmp_path, target) == []
    batch = batch_of(target, random_texts())
    ours, theirs = (states(drafter, target, batch) for drafter in (prism, eagle))
    assert all(torch.equal(row, theirs[at]) for at, row in ours.items())
