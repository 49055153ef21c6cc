"""EAGLE-3: every option, the unroll against a dense one, fresh weights, vocabulary and taps."""

from __future__ import annotations

import contract
import pytest
import torch
from dense import dense
from faces import K, V, both, random_texts

from decode.errors import UserError
from drafters.base import Batch, Text
from drafters.layers import unroll_attention as unrolled
from drafters.models.eagle3 import Eagle3

NORMS = {"norm_before_residual": True, "norm_output": True}
OPTIONS = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True, "fc_norm": False},
    "no fc_norm": {"fc_norm": False},
    "norm_output": {"norm_output": True},
    "speculators": NORMS | {"norm_before_fc": True, "fc_norm": False},
    "two layers": {"layers": 2},
    "three layers, all norms": NORMS | {"layers": 3},
    "whole vocabulary": {"draft_vocab_size": 32000},
    "five taps": {"taps": [0, 1, 2, 3, "last"]},
    "last only": {"taps": ["last"]},
    "a window and a sink": {"window": 3, "sinks": 1},
    "two layers with a window shorter than a draft": {"layers": 2, "window": 2},
}
MASKS = [
    ["111111111111", "111111111111"],
    ["000000111111", "000111111000"],
    ["010111011101", "111011000000"],
    ["000000000000", "001110011101"],
]
SETTINGS = {
    "taps": [0, 1, 3],
    "layers": 1,
    "depth": K,
    "draft_vocab_size": 10,
    **dict.fromkeys(["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"], False),
}


@pytest.fixture(params=OPTIONS)
def optioned(request, tiny_target, make_drafter):
    return both(tiny_target, make_drafter, "eagle3", **OPTIONS[request.param])


def test_decoding_equals_training_with_every_option(optioned):
    contract.test_decoding_computes_the_laws_that_training_taught(optioned)


@pytest.mark.ci("plain", "three layers, all norms", "speculators", "last only")
def test_tree_levels_equal_training_with_every_option(optioned, monkeypatch):
    contract.test_every_level_of_a_tree_computes_the_laws_that_training_taught(optioned, monkeypatch)


def test_saved_and_loaded_with_every_option(optioned, tmp_path):
    contract.test_a_saved_drafter_comes_back_bit_for_bit(optioned, tmp_path)


@pytest.mark.parametrize("name", ["eagle", *OPTIONS])
@pytest.mark.parametrize("masks", MASKS, ids=lambda m: m[0] + m[1])
@pytest.mark.covering
def test_unroll_of_supervised_anchors_is_the_dense_one(tiny_target, make_drafter, name, masks, monkeypatch):
    """Values and gradients of all weights, with blocks of a few queries."""
    monkeypatch.setattr("drafters.layers.unroll_attention.MIN_QUERIES", 3)
    monkeypatch.setitem(unrolled.SCORE_BYTES, "cpu", 1)
    target = tiny_target(vocab=V, layers=4, hidden=16)  # float64
    drafter = make_drafter(name if name == "eagle" else "eagle3", target, depth=K, **OPTIONS.get(name, {}))
    mask = torch.tensor([[c == "1" for c in text] for text in masks])
    texts = random_texts(2, mask.shape[1])
    read = target.read(texts)
    batch = Batch(texts, mask, read.taps, read.last)
    want, compared = dense(drafter, batch, target), 0
    dice = torch.Generator().manual_seed(5)
    ours, theirs = torch.zeros(()), torch.zeros(())
    for step in drafter.unroll(batch, target):
        hidden = torch.stack([want[a // 12, a % 12, step.depth] for a in step.anchor.tolist()])
        torch.testing.assert_close(step.hidden, hidden, rtol=0, atol=1e-12)
        pull = torch.randn(hidden.shape, generator=dice, dtype=hidden.dtype)
        ours, theirs = ours + (pull * step.hidden).sum(), theirs + (pull * hidden).sum()
        compared += len(hidden)
    assert compared > 10
    weights = [w for n, w in drafter.named_parameters() if n != "lm_head.weight"]
    slopes = [torch.autograd.grad(total, weights) for total in (ours, theirs)]
    for mine, other in zip(*slopes, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11 * max(1.0, float(other.abs().max())))


def test_unsupervised_positions_are_not_finished(tiny_target, make_drafter, monkeypatch):
    """What is computed of them: one product of keys and values, in the first step."""
    target, drafter = both(tiny_target, make_drafter, "eagle3")
    rows = []
    layer = drafter.layers[0]
    finish = layer.finish
    monkeypatch.setattr(layer, "finish", lambda x, y: rows.append(len(x)) or finish(x, y))
    mask = torch.zeros(1, 24, dtype=torch.bool)
    mask[0, 10:15] = True
    texts = random_texts(1)
    read = target.read(texts)
    steps = list(drafter.unroll(Batch(texts, mask, read.taps, read.last), target))
    assert rows == [len(step.anchor) for step in steps] == [5, 4, 3]


# -- how it begins -----------------------------------------------------------------------------


def test_fresh_drafter_is_the_targets_head_on_the_highest_tap(tiny_target):
    """Normalised like the head's own input, but for the weights of the target's last norm."""
    target = tiny_target(vocab=V, layers=4, hidden=16)
    taps = {"taps": [0, 1, "last"], "fc_norm": True, "draft_vocab_size": V}
    drafter = Eagle3.for_target(target, **SETTINGS | taps).double()
    target.tap(drafter.taps)
    texts = random_texts(1)
    read = target.read(texts)
    batch = Batch(texts, torch.ones_like(texts, dtype=torch.bool), read.taps, read.last)
    step = next(iter(drafter.unroll(batch, target)))
    unit = torch.nn.functional.rms_norm(read.last[0, step.anchor], (16,))
    with torch.no_grad():  # what `fc` mixes in is small
        drafter.fc.weight[:, :32] = 0
        drafter.fc.weight[:, 32:] = torch.eye(16)
        exact = next(iter(drafter.unroll(batch, target)))
    torch.testing.assert_close(exact.hidden, unit, rtol=1e-5, atol=1e-5)
    assert torch.cosine_similarity(step.hidden, unit, dim=-1).mean() > 0.7
    torch.testing.assert_close(step.head(unit), target.head(unit), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rate", [0.25, 1.0])
def test_rate_is_a_share_of_the_learning_rate(tiny_target, rate):
    drafter = Eagle3.for_target(tiny_target(vocab=V, layers=4, hidden=16), **SETTINGS | {"rate": rate})
    (group,) = drafter.param_groups()
    assert group.rate(0.0) == group.rate(1.0) == rate
    assert {id(weight) for weight in group.weights} == {id(weight) for weight in drafter.parameters()}


@pytest.mark.parametrize("hidden", [32, 512])
def test_lower_taps_weigh_the_same_at_any_width(tiny_target, hidden):
    """And the highest is the highest, wherever it stands."""
    target = tiny_target(vocab=V, layers=4, hidden=hidden)
    drafter = Eagle3.for_target(target, **SETTINGS | {"taps": ["last", 0, 2]})
    taps = torch.randn(64, 3, hidden, generator=torch.Generator().manual_seed(0))
    found = torch.cosine_similarity(drafter.fuse(taps), taps[:, 0], dim=-1)
    assert 0.75 < found.mean() < 0.95


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (8, 1)])
def test_half_of_the_fresh_heads_attend_to_their_own_place(tiny_target, heads, kv_heads):
    """With independent queries and keys, as in the other half, all places have about the same share."""
    target = tiny_target(vocab=64, layers=4, hidden=256)
    drafter = Eagle3.for_target(target, **SETTINGS, heads=heads, kv_heads=kv_heads, head_dim=32)
    tokens = torch.arange(64)[None]  # each once
    with torch.no_grad():
        _, qkv = drafter.pair(target.embed(tokens).float(), torch.randn(1, 64, 256))
        q, k, _ = drafter.stack[0].split(qkv, drafter.rotary.table(64, qkv)[:64])
        keys = k.repeat_interleave(heads // kv_heads, -2)
        logits = torch.einsum("bqhd,bkhd->bhqk", q, keys) / q.shape[-1] ** 0.5
    share = logits.softmax(-1).diagonal(dim1=-2, dim2=-1)[0].mean(-1)  # (heads,)
    assert share[: heads // 2].min() > 0.8
    assert share[heads // 2 :].max() < 0.1


# -- its vocabulary ----------------------------------------------------------------------------


def test_vocabulary_has_the_most_frequent_and_end_tokens(tiny_target, monkeypatch):
    target = tiny_target(vocab=V, layers=4, hidden=16)
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", [39, 7])
    drafter = Eagle3.for_target(target, **SETTINGS | {"draft_vocab_size": 5})
    assert drafter.needs_fit
    assert set(drafter.d2t.tolist()) == {-1}  # before any are counted, not the target's first tokens
    texts = [Text([9] * 50 + [3, 3, 3, 1, 1, 20, 39], [0] * 50 + [1] * 7), Text([20, 20, 8], [0, 1, 1])]
    assert "88.89%" in drafter.fit(texts, target)
    assert drafter.d2t.tolist() == [1, 3, 7, 20, 39]
    assert torch.equal(drafter.lm_head.weight, target.head.weight[[1, 3, 7, 20, 39]].float())
    drafter.fit([Text([30, 20, 30, 10, 25], [1] * 5)], target)  # of equally frequent tokens the first
    assert drafter.d2t.tolist() == [7, 10, 20, 30, 39]


@pytest.mark.parametrize(("size", "want"), [(10, 10), (40, 40), (32000, 40)])
def test_small_target_keeps_its_whole_vocabulary(tiny_target, size, want):
    target = tiny_target(vocab=V, layers=4, hidden=16)
    drafter = Eagle3.for_target(target, **SETTINGS | {"draft_vocab_size": size})
    assert drafter.lm_head.weight.shape[0] == drafter.settings["draft_vocab_size"] == want
    assert drafter.needs_fit == (want < 40)
    if want == 40:
        assert drafter.head(target).d2t is None
        assert torch.equal(drafter.lm_head.weight, target.head.weight.float())


def test_taps_that_are_no_layer_are_refused(tiny_target):
    target = tiny_target(vocab=V, layers=4, hidden=16)
    with pytest.raises(UserError, match=r"use 0\.\.3 or 'last'"):
        target.tap(Eagle3.for_target(target, **SETTINGS | {"taps": [0, 1, 4]}).taps)


def test_default_taps_are_a_low_middle_and_high_layer(tiny_target):
    for layers, want in [(7, (2, 3, 4)), (12, (2, 6, 9)), (32, (2, 16, 29))]:
        target = tiny_target(vocab=V, layers=layers, hidden=8)
        assert Eagle3.for_target(target, **SETTINGS | {"taps": None}).taps == want


def test_detached_depth_has_no_gradient_in_earlier_ones(tiny_target, make_drafter):
    """The last depth's loss reaches the first depth's keys, but no further."""
    slopes = {}
    for name in ("eagle", "hass"):
        target = tiny_target(vocab=V, layers=4, hidden=16)
        drafter = make_drafter(name, target, depth=2)
        texts = random_texts(1, 12)
        read = target.read(texts)
        batch = Batch(texts, torch.ones_like(texts, dtype=torch.bool), read.taps, read.last)
        first, second = drafter.unroll(batch, target)
        torch.testing.assert_close(second.hidden, list(drafter.unroll(batch, target))[1].hidden)
        (slopes[name],) = torch.autograd.grad(second.hidden.sum(), first.hidden, allow_unused=True)
    assert slopes["eagle"] is not None
    assert slopes["hass"] is None
