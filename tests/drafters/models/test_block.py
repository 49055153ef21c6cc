"""Block drafters: diffusion, and DSpark next to DFlash, in others' files too."""

from __future__ import annotations

import itertools

import pytest
import torch
from drafter_checks import (
    CHAIN,
    Follower,
    K,
    V,
    assert_decodes_as_trained,
    batch_of,
    both,
    probs_at,
    random_texts,
    unrolled,
)
from served_speculators import confidence, load

from decode.errors import UserError
from decode.model.head import Head
from decode.model.target import LAST
from decode.plan import Plan
from distill.losses.weights import Streak
from drafters.base import sample_anchors
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats
from drafters.layers.block_rows import filled_places
from drafters.models.diffusion import Diffusion


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


@pytest.mark.parametrize("name", ["diffusion", "dflash"])
def test_block_of_one_token_decodes_as_trained(tiny_target, make_drafter, name):
    target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)
    drafter = make_drafter(name, target, depth=1)
    texts = random_texts()
    follower = Follower(drafter, target, texts, (5, 3))
    got = follower.propose(Plan(depth=1, proposal="sampled")).q[:, 0]
    want = probs_at(drafter, target, [(prefix, ()) for prefix in follower.known])
    torch.testing.assert_close(got, torch.stack(want), rtol=0, atol=1e-5)


def test_sample_of_anchors_is_fair():
    counts = torch.zeros(10)
    for seed in range(600):
        counts[sample_anchors(torch.arange(10), 3, seed)] += 1
    assert (counts - 180).abs().max() < 60  # five standard deviations
    assert sample_anchors(torch.arange(3), 5, 0).tolist() == [0, 1, 2]


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
@pytest.mark.parametrize("name", ["diffusion", "dflash", "hf_dllm"])
def test_sampled_plans_with_several_passes_are_refused(tiny_target, make_drafter, name, plan):
    target, drafter = both(tiny_target, make_drafter, name, steps=2)
    follower = Follower(drafter, target, random_texts(), (5, 3))
    for refused in (drafter.check, follower.propose):
        with pytest.raises(
            UserError, match=r"set decode\.proposal=fixed|drafter\.steps=2 .* not be lossless"
        ):
            refused(plan)


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
    monkeypatch.setattr(
        "drafters.layers.block_rows.filled_places", lambda *_: (filled, torch.ones(len(filled)))
    )
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


def test_unknown_acceptance_is_refused():
    with pytest.raises(UserError, match=r"weights\.acceptance=all"):
        Streak(0.0, 0.0, "all")


# -- DSpark ----------------------------------------------------------------------------------------


MASK = 7


@pytest.fixture
def target(tiny_target):
    made = tiny_target(vocab=V, layers=8, hidden=16, dtype=torch.float32)
    made.config.pad_token_id = MASK
    made.model.config._name_or_path = made.model.name_or_path = "some/target"
    return made


@pytest.fixture
def drafter(target, make_drafter):
    """With a confidence head of random weights, frozen as a loaded one is."""
    drafter = make_drafter("dspark", target, depth=K, taps=[2, 4], markov_rank=5)
    drafter.add_confidence()
    dice = torch.Generator().manual_seed(1)
    for weight in drafter.confidence.parameters():
        weight.data = torch.randn(weight.shape, generator=dice)
    return drafter.requires_grad_(False)


@torch.no_grad()
def computed(drafter, target):
    """Logits and confidences of every anchor and depth."""
    steps = drafter.unroll(batch_of(target, random_texts()), target)
    return [(step.head(step.hidden), drafter.confidence(step.hidden)) for step in steps]


def written(drafter, target, to="sglang"):
    """Files in the format of DeepSpec, which has the embedding and the head too, or of speculators."""
    return formats.write_layout(checkpoint_io.as_saved(drafter), target, to)


def as_specforge(config):
    """DeepSpec's configuration, some of it nested."""
    nested = {"projector_type": "dspark"} | {
        key: config.pop(key) for key in ("target_layer_ids", "mask_token_id")
    }
    return config | {"architectures": ["DSparkDraftModel"], "model_type": "dspark", "dflash_config": nested}


@pytest.mark.parametrize("vendor", ["deepspec", "specforge", "speculators"])
def test_checkpoints_of_others_have_the_same_logits(drafter, target, tmp_path, vendor):
    layout = written(drafter, target, "speculators" if vendor == "speculators" else "sglang")
    if vendor == "specforge":
        layout = layout._replace(config=as_specforge(dict(layout.config)))
    layout.write(tmp_path)
    loaded = checkpoint_io.load(tmp_path, target)
    assert loaded.settings == drafter.settings | {"anchors": 0}
    assert loaded.taps == (2, 4)
    for one, other in zip(computed(drafter, target), computed(loaded, target), strict=True):
        assert all(map(torch.equal, one, other))


def test_confidence_head_without_the_bias_or_switched_off(drafter, target, tmp_path):
    layout = written(drafter, target)
    layout.tensors["confidence_head.proj.weight"] = drafter.confidence.weight[None, :16].contiguous()
    layout.write(tmp_path)
    loaded = checkpoint_io.load(tmp_path, target)
    assert loaded.confidence.weight.tolist() == [*drafter.confidence.weight[:16].tolist(), *[0.0] * 5]
    layout.config["enable_confidence_head"] = False
    layout.write(tmp_path)
    assert checkpoint_io.load(tmp_path, target).confidence is None


REFUSED = {
    "a gated bias": (lambda c, t: c.update(markov_head_type="gated"), "markov_head_type is 'gated'"),
    "no bias": (lambda c, t: c.update(markov_rank=0), "its markov_rank is 0; a DSpark needs"),
    "a head of its own": (lambda c, t: t["lm_head.weight"].add_(1), "it has its own lm_head.weight"),
    "half of the bias": (lambda c, t: t.pop("markov_head.markov_w1.weight"), "damaged checkpoint"),
    "another rank": (lambda c, t: c.update(markov_rank=4), "info.emb.weight"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_checkpoint_that_is_no_dspark_is_refused(drafter, target, tmp_path, what):
    change, said = REFUSED[what]
    layout = written(drafter, target)
    change(layout.config, layout.tensors)
    layout.write(tmp_path)
    with pytest.raises(UserError, match=said) as caught:
        checkpoint_io.load(tmp_path, target)
    assert "\n" not in str(caught.value)


@torch.no_grad()
@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_engine_computes_the_drafters_confidence(drafter, target, to):
    layout = written(drafter, target, to)
    assert layout.config["enable_confidence_head"] is layout.config["confidence_head_with_markov"] is True
    served, texts = load(layout.config, layout.tensors), random_texts()
    for step in drafter.unroll(batch_of(target, texts), target):
        before = texts.flatten()[step.anchor + step.depth]
        theirs = confidence(served, step.hidden[:, :16], before)
        torch.testing.assert_close(theirs, drafter.confidence(step.hidden).sigmoid())


def test_export_to_sglang_has_embedding_head_and_command(drafter, target):
    layout = written(drafter, target)
    assert layout.tensors["embed_tokens.weight"].equal(target.embed.weight)
    assert layout.tensors["lm_head.weight"].equal(target.head.weight)
    command = layout.command("T", "D")
    assert "--speculative-algorithm DSPARK --speculative-draft-model-path D" in command
    assert f"--speculative-num-draft-tokens {K + 1}" in command


def test_without_bias_and_with_masks_it_is_dflash(tiny_target, make_drafter):
    target, drafter = both(tiny_target, make_drafter, "dspark", sample_from_anchor=False)
    plain = make_drafter("dflash", target)
    plain.load_state_dict({k: v for k, v in drafter.state_dict().items() if not k.startswith("info.")})
    drafter.info.out.weight.data.zero_()
    probs, same = (unrolled(one, target, random_texts()) for one in (drafter, plain))
    assert probs.keys() == same.keys()
    assert all(torch.equal(p, same[place]) for place, p in probs.items())


@pytest.mark.parametrize("anchor", [True, False])
def test_block_is_shorter_where_the_root_predicts(tiny_target, make_drafter, anchor):
    target, drafter = both(tiny_target, make_drafter, "dspark", sample_from_anchor=anchor)
    root = torch.zeros(2, target.hidden_size)
    assert drafter.inputs(root, root).shape == (2, K + (not anchor), target.hidden_size)
    assert_decodes_as_trained(drafter, target, random_texts())


def test_block_of_the_root_only(target, make_drafter):
    drafter = make_drafter("dspark", target, depth=1)
    assert drafter.masks == 0
    (step,) = drafter.unroll(batch_of(target, random_texts()), target)
    assert step.depth == 1
