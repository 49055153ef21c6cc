"""Drafters over a reduced draft vocabulary: training = decoding, fitted and saved."""

from __future__ import annotations

import random

import pytest
import torch
from documented import drafter_options, drafters_with
from drafter_checks import (
    SAMPLED,
    TREE,
    Follower,
    V,
    assert_decodes_as_trained,
    batch_of,
    both,
    paths,
    random_rollouts,
    random_texts,
)
from workbench import options_of

from decode.errors import UserError
from decode.plan import Plan
from drafters import vocabulary
from drafters.base import Text
from drafters.checkpoint import io as checkpoint_io
from drafters.vocabulary import MIN_TOKENS, STEP, TokenCounts, ceiling, draft_vocab_size

SIZE = 7
SHARED = {"own_head": False}
DRAFTERS: dict[str, dict] = {name: {} for name in drafters_with("draft_vocab_size")} | {
    "lyanna": {"hot_tokens": V},
    "lyanna with fewer hot tokens": {"hot_tokens": 4},
    "medusa of one head": SHARED | {"token_info": "gated", "info_rank": 4, "hot_tokens": 5},
    "hydra of one head": SHARED,
    "diffusion with a bias": {"token_info": "recurrent", "info_rank": 4, "hot_tokens": 4},
    "dflash in steps": {"steps": 2},
}


@pytest.fixture(params=DRAFTERS)
def reduced(request, tiny_target, make_drafter):
    """A target, and a drafter that proposes 7 of its tokens."""
    options = DRAFTERS[request.param] | {"draft_vocab_size": SIZE}
    return both(tiny_target, make_drafter, request.param.split()[0], **options)


def test_decoding_computes_the_probs_of_training(reduced):
    target, drafter = reduced
    if "sampled" not in drafter.traits.proposals:
        pytest.skip("draws nothing")
    q = assert_decodes_as_trained(drafter, target, random_texts()).propose(SAMPLED).q
    outside = torch.ones(V, dtype=torch.bool)
    outside[drafter.d2t] = False
    assert q[..., outside].abs().max() == 0
    assert q.sum(-1) == pytest.approx(1.0)


def test_trees_have_tokens_of_the_vocabulary_that_a_checkpoint_keeps(reduced, tmp_path):
    target, drafter = reduced
    checkpoint_io.save(drafter, target, tmp_path)
    loaded = checkpoint_io.load(tmp_path, target)
    assert torch.equal(loaded.d2t, drafter.d2t)
    followers = [Follower(each, target, random_texts(), (6, 4)) for each in (drafter, loaded)]
    one, other = (follower.propose(TREE) for follower in followers)
    assert torch.equal(one.tokens, other.tokens)
    for row in range(2):
        tokens = {token for path in paths(one, row) for token in path}
        assert tokens
        assert tokens <= set(drafter.d2t.tolist())
    drafter.d2t.copy_((drafter.d2t + 1) % V)  # the rows of the target's head are copied once
    moved = followers[0].propose(Plan(2)).tokens
    assert set(moved.flatten().tolist()) <= set(drafter.d2t.tolist())


def first_step(drafter, target):
    """What it predicts at depth 1."""
    return next(step for step in drafter.unroll(batch_of(target, random_texts()), target) if step.depth)


def test_logits_are_rows_of_the_targets_head_and_training_has_all(reduced):
    target, drafter = reduced
    drafter.requires_grad_(True).train()
    step = first_step(drafter, target)
    if step.head.d2t is not None:
        pytest.skip("its head has these rows and no others, in training too")
    logits = step.head(step.hidden)
    assert logits.shape == (len(step.hidden), V)
    logits.logsumexp(-1).sum().backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in drafter.parameters())
    drafter.eval()
    few = first_step(drafter, target)
    if drafter.settings.get("feature_noise") or drafter.settings.get("anchors"):
        return  # other inputs
    torch.testing.assert_close(few.head(few.hidden), logits[:, drafter.d2t])


def test_end_tokens_come_first_and_hot_tokens_are_in_the_vocabulary(tiny_target, make_drafter, monkeypatch):
    target = tiny_target(vocab=V)
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", [V - 1])
    drafter = make_drafter("lyanna", target, hot_tokens=3, draft_vocab_size=5)
    said = drafter.fit(random_rollouts(V), target)
    counts = TokenCounts.of(random_rollouts(V), target)
    assert V - 1 in drafter.d2t.tolist()
    assert torch.equal(drafter.d2t, counts.most_frequent(5))
    assert torch.equal(drafter.d2t[drafter.info.rows], drafter.info.hot)
    assert said.startswith(f"5 {counts.share(drafter.d2t)}; 3 hot {counts.share(drafter.info.hot)}")


@pytest.mark.parametrize(
    ("name", "common", "size"),
    [
        ("eagle", 12, 12),
        ("lyanna", 12, 12),
        ("dflash", 12, 12),
        ("eagle", 3, SIZE),  # at least what it drafts
        ("eagle", 25, V),  # half of the tokens would not do
        ("mlp", 12, V),  # its heads train, and engines read all of their rows
    ],
)
def test_training_scores_the_tokens_that_the_target_writes(
    name, common, size, tiny_target, make_drafter, monkeypatch
):
    monkeypatch.setattr(vocabulary, "STEP", 1)
    target = tiny_target(vocab=V)
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", [2])
    options = {"hot_tokens": 4} if name == "lyanna" else {}
    drafter = make_drafter(name, target, draft_vocab_size=SIZE, **options)
    tokens = [2 + i % common for i in range(1100)] + [V - 1]  # one of them once
    drafter.fit([Text(tokens, [1] * len(tokens))], target)
    drafter.requires_grad_(True).train()
    batch = batch_of(target, random_texts())
    steps = list(drafter.unroll(batch, target))
    logits = [step.head(step.hidden) for step in steps]
    assert {block.shape[-1] for block in logits} == {size}
    sum(block.logsumexp(-1).sum() for block in logits).backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in drafter.parameters())
    drafter.scored = None
    every = list(drafter.unroll(batch, target))
    for step, whole, block in zip(steps, every, logits, strict=True):
        ids = torch.arange(V) if step.head.d2t is None else step.head.d2t
        torch.testing.assert_close(whole.head(whole.hidden)[:, ids], block)


@pytest.mark.parametrize(
    ("setting", "vocab", "size"),
    [
        ("auto", 4096, None),
        ("auto", 49152, 12288),
        ("auto", 200000, 32000),
        (None, 4096, None),
        (10, 4096, 10),
    ],
)
def test_auto_means_at_most_a_quarter_of_the_vocabulary(setting, vocab, size):
    assert draft_vocab_size(setting, vocab) == size


@pytest.mark.parametrize("setting", ["half", 0, -1, 0.5, True])
def test_other_sizes_are_refused(setting):
    with pytest.raises(UserError, match=r"draft_vocab_size=.*: give a number of tokens, auto or null"):
        draft_vocab_size(setting, 4096)


LARGE_V = 2**14


def written(answers, rare=30, common=900, repeats=4):
    """Answers of common tokens (Zipf's law), and of rare ones that each repeats."""
    draw = random.Random(0)
    weights = [1 / (rank + 1) for rank in range(common)]
    draw.shuffle(weights)  # ids say which tokens are written, and not how often
    for _ in range(answers):
        tokens = draw.choices(range(common), weights, k=300)
        tokens += [draw.randrange(LARGE_V) for _ in range(rare)] * repeats
        yield Text(tokens, [1] * len(tokens))


def counted(texts):
    folds = torch.zeros(10, LARGE_V, dtype=torch.long)
    for number, text in enumerate(texts):
        folds[number % 10] += torch.bincount(torch.tensor(text.tokens), minlength=LARGE_V)
    return TokenCounts(folds, [5])


def test_the_estimated_coverage_is_that_of_new_answers():
    """Though every answer repeats its rare tokens, so that few of all occur once."""
    texts = list(written(400, rare=10))
    old, new = counted(texts[:300]), counted(texts[300:])
    coverage = old.coverage()
    for size in (200, 1000, 4096):
        share = new.counts[old.most_frequent(size)].sum() / new.counts.sum()
        assert coverage[size - 1] == pytest.approx(float(share), abs=0.02)
    assert coverage[-1] == 1
    assert (coverage.diff() >= 0).all()
    once = (old.counts == 1).sum() / old.counts.sum()
    assert once < 0.001
    assert 1 - new.counts[old.counts > 0].sum() / new.counts.sum() > 0.05, "what it would have promised"


def test_fewer_answers_and_rarer_tokens_need_more():
    few, many = (counted(written(n, rare=0, common=4000)).enough(0)[0] for n in (20, 400))
    assert many < few <= ceiling(LARGE_V)
    assert few % STEP == many % STEP == 0
    counts = counted(written(100, rare=0, common=300))
    sizes = [counts.enough(least)[0] for least in (0, 700, 10**6)]
    assert sizes == [512, 768, ceiling(LARGE_V)]


def auto(make_drafter, target, name, **options):
    drafter = make_drafter(name, target, draft_vocab_size=draft_vocab_size("auto", LARGE_V), **options)
    drafter.sizes_vocabulary = True
    return drafter


@pytest.mark.parametrize("name", drafters_with("draft_vocab_size"))
def test_the_size_is_known_after_fit_and_a_checkpoint_has_it(tiny_target, make_drafter, name, tmp_path):
    target, hot = tiny_target(vocab=LARGE_V), 3000
    more = {"hot_tokens": hot} if drafter_options(name).get("token_info", "none") != "none" else {}
    drafter = auto(make_drafter, target, name, **more)
    said = drafter.fit(written(100, rare=0, common=300), target)
    size = -(-(hot + 1) // STEP) * STEP if more else MIN_TOKENS
    assert len(drafter.d2t) == drafter.settings["draft_vocab_size"] == size
    assert said.startswith(f"{size} of {LARGE_V} tokens make 100.00% of the answers")
    checkpoint_io.save(drafter, target, tmp_path)
    loaded = checkpoint_io.load(tmp_path, target)
    assert loaded.d2t.equal(drafter.d2t)
    shapes = [{k: w.shape for k, w in each.state_dict().items()} for each in (loaded, drafter)]
    assert shapes[0] == shapes[1]
    again = auto(make_drafter, target, name, **more)
    for _ in range(2):
        again.fit(written(100, rare=0, common=300), target)
        assert again.d2t.equal(drafter.d2t), "a resumed run, or another rank"
    new = auto(make_drafter, target, name, seed=2, **more)
    assert checkpoint_io.warm_start(new, tmp_path, target) == []
    assert new.d2t.equal(drafter.d2t)
    if more:
        assert torch.equal(drafter.d2t[drafter.info.rows], drafter.info.hot)


def test_a_drafter_inside_a_union_is_sized_too(tiny_target, tmp_path):
    target = tiny_target(vocab=LARGE_V)
    union = options_of("drafter=union", "drafter.first=eagle").drafter.build(target)
    assert union.first.sizes_vocabulary
    union.fit(list(written(100, rare=0, common=300)), target)
    assert len(union.first.d2t) == union.settings["first"]["settings"]["draft_vocab_size"] == MIN_TOKENS
    checkpoint_io.save(union, target, tmp_path)
    assert checkpoint_io.load(tmp_path, target).first.d2t.equal(union.first.d2t)


@pytest.mark.parametrize(("setting", "sizes"), [("auto", True), ("9", False), ("null", False)])
def test_only_auto_sizes_the_vocabulary(tiny_target, setting, sizes):
    options = options_of("drafter=eagle", f"drafter.draft_vocab_size={setting}")
    assert options.drafter.build(tiny_target(vocab=LARGE_V)).sizes_vocabulary == sizes
    assert not options.drafter.build(tiny_target(vocab=V)).sizes_vocabulary
