"""EAGLE-3, EAGLE that starts with a layer of the target, P-EAGLE and PRISM."""

from __future__ import annotations

import contract
import pytest
import torch
from dense import dense, layer_step, norm
from drafter_checks import (
    CHAIN,
    CHUNKS,
    SAMPLED,
    TREE,
    Follower,
    K,
    V,
    assert_decodes_as_trained,
    batch_of,
    both,
    equal,
    random_texts,
)
from exact import EnumeratingCoin, Script
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from benchmarks.lyanna_ablation import head_products
from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.target import LAST, Target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.base import Batch, Text
from drafters.checkpoint import io as checkpoint_io
from drafters.layers import unroll_attention as unrolled
from drafters.layers.decoder_layer import DecoderLayer
from drafters.models.eagle import Eagle
from drafters.models.eagle3 import Eagle3
from drafters.models.prism import Prism

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
    "biases": {"layers": 2, "qkv_bias": True, "o_bias": True},
}
EAGLES = {
    "eagle": ("eagle", {}),
    "eagle, biases": ("eagle", {"qkv_bias": True, "o_bias": True}),
    **{name: ("eagle3", options) for name, options in OPTIONS.items()},
}
BIASED = {
    "eagle": {"qkv_bias": True, "o_bias": True},
    "p_eagle": {"qkv_bias": True, "o_bias": True, "layers": 2},
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


def check_slopes(drafter, hidden, wanted):
    """Rows and the gradients of a random mix of them, for all weights but the head's."""
    torch.testing.assert_close(hidden, wanted, rtol=0, atol=1e-12)
    pull = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(5), dtype=wanted.dtype)
    weights = [w for name, w in drafter.named_parameters() if name != "lm_head.weight"]
    slopes = [torch.autograd.grad((pull * rows).sum(), weights) for rows in (hidden, wanted)]
    for mine, other in zip(*slopes, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11 * max(1.0, float(other.abs().max())))


def both_unrolls(drafter, target, batch) -> list[torch.Tensor]:
    """Rows of all depths: the drafter's, and the dense unroll's."""
    want, ours, wanted = dense(drafter, batch, target), [], []
    for step in drafter.unroll(batch, target):
        ours.append(step.hidden)
        wanted += [want[a // 12, a % 12, step.depth] for a in step.anchor.tolist()]
    return [torch.cat(ours), torch.stack(wanted)]


@pytest.fixture
def small_blocks(monkeypatch):
    """An unroll has blocks of a few queries."""
    monkeypatch.setattr(unrolled, "MIN_QUERIES", 3)
    monkeypatch.setitem(unrolled.SCORE_BYTES, "cpu", 1)


@pytest.fixture(params=OPTIONS)
def optioned(request, tiny_target, make_drafter):
    return both(tiny_target, make_drafter, "eagle3", **OPTIONS[request.param])


@pytest.mark.ci("plain", "three layers, all norms", "speculators", "last only")
def test_tree_levels_equal_training_with_every_option(optioned, monkeypatch):
    contract.test_every_level_of_a_tree_computes_the_probs_of_training(optioned, monkeypatch)


def test_saved_and_loaded_with_every_option(optioned, tmp_path):
    contract.test_a_saved_drafter_comes_back_bit_for_bit(optioned, tmp_path)


@pytest.mark.parametrize("name", BIASED)
def test_tree_levels_equal_training_with_biases(tiny_target, make_drafter, monkeypatch, name):
    found = both(tiny_target, make_drafter, name, **BIASED[name])
    contract.test_every_level_of_a_tree_computes_the_probs_of_training(found, monkeypatch)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", EAGLES)
@pytest.mark.parametrize("masks", MASKS, ids=lambda m: m[0] + m[1])
@pytest.mark.covering
def test_unroll_of_supervised_anchors_is_the_dense_one(tiny_target, make_drafter, name, masks):
    """Values and gradients of all weights, with blocks of a few queries."""
    target = tiny_target(vocab=V, layers=4, hidden=16)  # float64
    kind, options = EAGLES[name]
    drafter = make_drafter(kind, target, depth=K, **options)
    mask = torch.tensor([[c == "1" for c in text] for text in masks])
    ours, wanted = both_unrolls(drafter, target, batch_of(target, random_texts(2, 12), mask))
    assert len(ours) > 10
    check_slopes(drafter, ours, wanted)


def test_unsupervised_positions_are_not_finished(tiny_target, make_drafter, monkeypatch):
    """What is computed of them: one product of keys and values, in the first step."""
    target, drafter = both(tiny_target, make_drafter, "eagle3")
    rows = []
    layer = drafter.layers[0]
    finish = layer.finish
    monkeypatch.setattr(layer, "finish", lambda x, y: rows.append(len(x)) or finish(x, y))
    mask = torch.zeros(1, 24, dtype=torch.bool)
    mask[0, 10:15] = True
    steps = list(drafter.unroll(batch_of(target, random_texts(1), mask), target))
    assert rows == [len(step.anchor) for step in steps] == [5, 4, 3]


def test_fresh_drafter_is_the_targets_head_on_the_highest_tap(tiny_target):
    """Normalised like the head's own input, but for the weights of the target's last norm."""
    target = tiny_target(vocab=V, layers=4, hidden=16)
    taps = {"taps": [0, 1, "last"], "fc_norm": True, "draft_vocab_size": V}
    drafter = Eagle3.for_target(target, **SETTINGS | taps).double()
    target.tap(drafter.taps)
    batch = batch_of(target, random_texts(1))
    step = next(iter(drafter.unroll(batch, target)))
    unit = torch.nn.functional.rms_norm(batch.last[0, step.anchor], (16,))
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
        batch = batch_of(target, random_texts(1, 12))
        first, second = drafter.unroll(batch, target)
        torch.testing.assert_close(second.hidden, list(drafter.unroll(batch, target))[1].hidden)
        (slopes[name],) = torch.autograd.grad(second.hidden.sum(), first.hidden, allow_unused=True)
    assert slopes["eagle"] is not None
    assert slopes["hass"] is None


# -- drafter.start ---------------------------------------------------------------------------------


SIZES = {"depth": 2, "feature_noise": 0.1, "feature_weight": 1.0, "bias": False}
LAYERS = {"first": 0, "last": 2}


@pytest.fixture
def target(tiny_target):
    """With norms that scale, in fp32 as drafters are made."""
    target = tiny_target(vocab=V, layers=3, hidden=16, dtype=torch.float32)
    dice = torch.Generator().manual_seed(3)
    for module in target.model.modules():
        if isinstance(module, nn.RMSNorm):
            module.weight.copy_(0.5 + torch.rand(module.weight.shape, generator=dice))
    return target


def made(target, start, cls=Eagle, **options):
    torch.manual_seed(5)
    return cls.for_target(target, start=start, **SIZES | options).eval()


@pytest.mark.parametrize("start", LAYERS)
def test_maps_are_the_targets_with_the_norm_folded_in(target, start):
    """The drafter's maps of an input are the target's maps of what its norm makes of an input of size 1."""
    layer, own = target.layers[LAYERS[start]], made(target, start).layer
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(1))
    x = x * x.square().mean(-1, keepdim=True).rsqrt()
    normed = layer.input_layernorm(x)
    want = torch.cat([getattr(layer.self_attn, f"{name}_proj")(normed) for name in "qkv"], -1)
    torch.testing.assert_close(own.qkv_proj(x), want, rtol=0, atol=1e-5)
    normed, read = layer.post_attention_layernorm(x), own.post_attention_layernorm(x)
    want = torch.cat([layer.mlp.gate_proj(normed), layer.mlp.up_proj(normed)], -1)
    torch.testing.assert_close(own.gate_up_proj(read), want, rtol=0, atol=1e-5)
    assert torch.equal(own.gate_up_proj.weight[:32], layer.mlp.gate_proj.weight)


@pytest.mark.parametrize("start", LAYERS)
def test_fresh_drafter_has_the_outputs_of_the_default(target, start):
    default, copied = made(target, "default"), made(target, start)
    batch = batch_of(target, random_texts())
    for one, other in zip(default.unroll(batch, target), copied.unroll(batch, target), strict=True):
        assert torch.equal(one.hidden, other.hidden)
    options = {"max_new_tokens": 12, "sampler": Sampler(0.0), "plan": TREE}
    runs = [generate(target, drafter, [[5, 9, 2], [4]], **options).outputs for drafter in (default, copied)]
    assert [o.emitted for o in runs[0]] == [o.emitted for o in runs[1]]
    grown = dict(copied.named_parameters())
    unlike = {name for name, weight in default.named_parameters() if not torch.equal(weight, grown[name])}
    names = ("qkv_proj", "gate_up_proj", "post_attention_layernorm")
    assert unlike == {f"layer.{name}.weight" for name in names}


def test_every_module_of_prism_starts_from_the_layer(target):
    prism = made(target, "first", Prism, modules=[0, 1])
    assert torch.equal(prism.later[0].layer.qkv_proj.weight, made(target, "first").layer.qkv_proj.weight)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"intermediate_size": 24}, "intermediate_size"),
        ({"hidden_size": 8}, "hidden_size"),
        ({"kv_heads": 2}, "kv_heads"),
        ({"heads": 4, "kv_heads": 2, "head_dim": 4}, "head_dim, heads, kv_heads"),
    ],
    ids=str,
)
def test_layer_of_another_shape_is_refused(target, sizes, said):
    with pytest.raises(UserError, match=rf"drafter\.start=first: .*differ in {said}; set it to default"):
        made(target, "first", **sizes)


SHAPE = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)), r"self_attn\.k_proj\.bias, .*v_proj\.bias"),
        (lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="gelu")), "hidden_act"),
    ],
    ids=["biases", "activation"],
)
def test_layer_of_another_kind_is_refused(model, said):
    with pytest.raises(UserError, match=rf"drafter\.start=first: .*differ in {said}; set it to default"):
        made(Target(model(), [LAST]), "first")


# -- P-EAGLE and PRISM -----------------------------------------------------------------------------


PATCHES = ["010111111101", "111011011000"]


def patchy(target) -> Batch:
    """Two texts of 12 tokens, some of them supervised."""
    texts = random_texts(2, 12)
    return batch_of(target, texts, torch.tensor([[c == "1" for c in text] for text in PATCHES]))


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


def one_pass(drafter, target, tokens, taps):
    """(K, D) of the newest anchor, by one causal pass over pairs of (n + 1) tokens and (n, L, D) taps."""
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


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("layers", [1, 2])
def test_unroll_with_masks_is_one_causal_pass(tiny_target, make_drafter, layers):
    """Values and gradients, of the mask's two vectors too."""
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


ORDERS = [[0, 1], [0, 0, 1], [0, 1, 2], [0, 1, 0, 2]]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_decoding_equals_training_with_modules(tiny_target, make_drafter, order):
    target, drafter = both(tiny_target, make_drafter, "prism", modules=order[:K])
    assert_decodes_as_trained(drafter, target, random_texts())


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_unroll_with_modules_is_the_dense_one(tiny_target, make_drafter, order, detach):
    """Values at every depth, of the module that the order names; and, undetached, gradients."""
    target = tiny_target(vocab=V, layers=4, hidden=16)  # float64
    drafter = make_drafter("prism", target, depth=4, modules=order, detach=detach)
    ours, wanted = both_unrolls(drafter, target, patchy(target))
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
