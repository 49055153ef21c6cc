"""Boosted: weights of the anchors, drafts that mix two trees, what is frozen, and refusals."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from draft_models import quick
from drafter_checks import (
    CHAIN,
    CHUNKS,
    SAMPLED,
    TREE,
    Follower,
    K,
    batch_of,
    both,
    equal,
    paths,
    random_texts,
    unrolled,
)
from workbench import same, train, weights

from decode.errors import UserError
from decode.generation.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler
from drafters import optional
from drafters.drafting.merge import mix_trees
from drafters.export import formats
from drafters.zoo.boosted import Boosted

OTHERS = {
    "chain": CHAIN,
    "drawn chain": SAMPLED,
    "hybrid": Plan(K, 3, 8, proposal="hybrid"),
    "static": Plan(tree=((0,), (1,), (0, 0), (1, 0))),
}


def boosted(tiny_target, make_drafter, first="eagle", second="eagle", **options):
    """Two drafters with random weights; names may have settings, (name, {...})."""
    names = [name if isinstance(name, tuple) else (name, {}) for name in (first, second)]
    target, one = both(tiny_target, make_drafter, names[0][0], **names[0][1])
    two = make_drafter(names[1][0], target, seed=7, **{"depth": K} | names[1][1])
    drafter = Boosted(one, two, **options).eval()
    target.tap(drafter.taps)
    return target, drafter


@contextmanager
def taps_of(target, drafter, part):
    """The target is tapped for one of the two."""
    target.tap(part.taps)
    yield
    target.tap(drafter.taps)


def wanted(target, drafter, texts) -> dict[tuple[int, int, int], bool]:
    """(row, anchor, depth) -> whether the first's most probable token is the text's."""
    with taps_of(target, drafter, drafter.first):
        probs = unrolled(drafter.first, target, texts)
    return {(row, t, j): int(p.argmax()) == int(texts[row, t + 1 + j]) for (row, t, j), p in probs.items()}


def lucky(target, drafter, length=24):
    """Texts half of which the first continues: each token is its most probable one, or another."""
    texts, dice = random_texts(2, length), torch.Generator().manual_seed(5)
    for place in range(4, length):
        with taps_of(target, drafter, drafter.first):
            probs = unrolled(drafter.first, target, texts[:, : place + 1])
        for row in range(2):
            if torch.rand((), generator=dice) < 0.6:
                texts[row, place] = probs[row, place - 2, 1].argmax()
    return texts


@pytest.mark.parametrize(
    "first", ["eagle", "medusa", "lm", "diffusion", ("eagle3", {"draft_vocab_size": 25})]
)
@pytest.mark.parametrize("hit_weight", [0.0, 0.25, 1.0])
@pytest.mark.covering
def test_anchors_that_the_first_predicts_count_less(tiny_target, make_drafter, first, hit_weight):
    target, drafter = boosted(tiny_target, make_drafter, first, hit_weight=hit_weight)
    texts = lucky(target, drafter)
    hits, seen = wanted(target, drafter, texts), []
    with torch.no_grad():
        for step in drafter.unroll(batch_of(target, texts), target):
            places = [(a // texts.shape[1], a % texts.shape[1], step.depth) for a in step.anchor.tolist()]
            counts = [hit_weight if hits[place] else 1.0 for place in places]
            mean = sum(counts) / len(counts)
            assert step.weight.tolist() == pytest.approx([count / mean for count in counts], rel=1e-6)
            seen += [hits[place] for place in places]
    assert 0 < sum(seen) < len(seen)


def test_steps_that_only_train_the_first_predict_nothing(tiny_target, make_drafter):
    target, drafter = boosted(tiny_target, make_drafter, ("lyanna", {"base_weight": 0.5}))
    batch = batch_of(target, lucky(target, drafter))
    early, late = (
        [step.weight.tolist() for step in drafter.unroll(batch._replace(progress=progress), target)]
        for progress in (0.2, 1.0)
    )
    assert early == late


def test_depths_below_the_firsts_count_as_missed(tiny_target, make_drafter):
    target, drafter = boosted(tiny_target, make_drafter)
    drafter.first.depth = 1
    texts = lucky(target, drafter)
    with torch.no_grad():
        one, *later = drafter.unroll(batch_of(target, texts), target)
    assert one.weight.unique().numel() == 2
    assert later
    assert all(step.weight.eq(1).all() for step in later)


def test_weights_multiply_those_of_the_second(tiny_target, make_drafter):
    """Lyanna's extra steps have those of their depth, and sampled anchors of diffusion stand for all."""
    for second in ("lyanna", ("diffusion", {"anchors": 3})):
        target, drafter = boosted(tiny_target, make_drafter, second=second, hit_weight=0.5)
        texts = lucky(target, drafter)
        hits = wanted(target, drafter, texts)
        drafter.train()
        with taps_of(target, drafter, drafter.second):
            batch = batch_of(target, texts)
        own = drafter.second.unroll(batch, target)
        for step, plain in zip(drafter.unroll(batch_of(target, texts), target), own, strict=True):
            assert (step.depth, step.training_only) == (plain.depth, plain.training_only)
            assert step.anchor.equal(plain.anchor)
            places = [(a // texts.shape[1], a % texts.shape[1], step.depth) for a in step.anchor.tolist()]
            counts = torch.tensor([0.5 if hits[place] else 1.0 for place in places])
            torch.testing.assert_close(step.weight, plain.weight * counts / counts.mean())


def test_batch_without_a_miss_counts_nothing(tiny_target, make_drafter):
    _, drafter = boosted(tiny_target, make_drafter)
    hit = torch.ones(5, dtype=torch.bool)
    assert drafter._row_weights(hit).eq(0).all()
    assert drafter._row_weights(~hit).eq(1).all()
    assert drafter._row_weights(hit[:0]).shape == (0,)


def test_first_stays_frozen_in_evaluation_mode(tiny_target, make_drafter):
    target, drafter = boosted(tiny_target, make_drafter)
    before = {name: weight.clone() for name, weight in drafter.first.state_dict().items()}
    drafter.train()
    assert drafter.second.training
    assert not drafter.first.training
    (group,) = drafter.param_groups()
    assert {id(weight) for weight in group.weights} == {id(weight) for weight in drafter.second.parameters()}
    step = next(iter(drafter.unroll(batch_of(target, random_texts()), target)))
    step.head(step.hidden).sum().backward()
    assert all(weight.grad is None for weight in drafter.first.parameters())
    assert same(drafter.first.state_dict(), before)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "names",
    [("eagle", "eagle"), ("eagle", "eagle3"), ("eagle3", "medusa"), ("lyanna", "diffusion")],
    ids="-".join,
)
@pytest.mark.covering
def test_draft_has_the_most_probable_paths_of_both(tiny_target, make_drafter, names, weight):
    target, drafter = boosted(tiny_target, make_drafter, *names, first_weight=weight)
    follower = Follower(drafter, target, random_texts())
    parts, shared = [], 0
    for part in (drafter.first, drafter.second):
        with taps_of(target, drafter, part):
            parts.append(Follower(part, target, random_texts()))
    for counts in CHUNKS:
        for one in (follower, *parts):
            one.advance(counts)
        draft = follower.propose(TREE)
        first, second = (one.propose(TREE) for one in parts)
        want = mix_trees(first, second, weight, TREE.nodes)
        assert equal(draft, want)
        torch.testing.assert_close(draft.score, want.score, rtol=1e-4, atol=0)
        shared += sum(len(paths(first, row).keys() & paths(second, row).keys()) - 1 for row in range(2))
    assert shared


@pytest.mark.parametrize("name", list(OTHERS))
def test_other_plans_are_left_to_the_first_with_a_remark(tiny_target, make_drafter, name):
    plan = OTHERS[name]
    target, drafter = boosted(tiny_target, make_drafter)
    options = {"plan": plan, "sampler": Sampler(1.0), "max_new_tokens": 12}
    runs = [generate(target, one, [[5, 1, 2, 3, 9]], **options) for one in (drafter, drafter.first)]
    ours, firsts = (run.outputs[0] for run in runs)
    assert (ours.tokens, ours.emitted) == (firsts.tokens, firsts.emitted)
    drafter.check(plan)
    assert "drafter.second=eagle: adds nothing to" in optional.remark(drafter, plan)
    assert not optional.remark(drafter, TREE)


def test_second_with_fewer_levels_drafts_those(tiny_target, make_drafter):
    target, drafter = boosted(tiny_target, make_drafter, "eagle", "medusa", first_weight=0.0)
    plan = replace(TREE, depth=K + 1)
    drafter.check(plan)
    draft = Follower(drafter, target, random_texts(), (9, 7)).propose(plan)
    assert max(map(len, paths(draft, 0))) <= K
    target, drafter = boosted(tiny_target, make_drafter, "medusa", "eagle")
    with pytest.raises(UserError, match=rf"train with drafter\.first\.depth={K + 1}"):
        drafter.check(plan)


def test_drafters_that_cannot_be_combined_are_refused(tiny_target, make_drafter):
    target, drafter = boosted(tiny_target, make_drafter)
    eagle = drafter.second
    for name in ("ngram", "prompt", "medusa2", "lyanna", "union"):
        part = make_drafter(name, target, **{"reuse": {"mode": "tree_merge"}} if name == "lyanna" else {})
        with pytest.raises(UserError, match=rf"drafter\.first={name}: "):
            Boosted(part, eagle)
        with pytest.raises(UserError, match=rf"drafter\.second={name}: "):
            Boosted(eagle, part)
    certain = make_drafter("eagle", target)
    certain.add_confidence()
    with pytest.raises(UserError, match=r"drafter\.first=eagle: .*confidence"):
        Boosted(certain, eagle)
    with pytest.raises(UserError, match=r"drafter\.confidence=true"):
        drafter.add_confidence()
    with pytest.raises(UserError, match=r"drafter\.first=eagle: not trained"):
        Boosted.for_target(target, first=lambda _: eagle, second=lambda _: eagle)


def test_no_engine_drafts_with_two(tiny_target, make_drafter):
    target, drafter = boosted(tiny_target, make_drafter)
    assert formats.accepting("boosted", drafter.settings, target) == []
    with pytest.raises(UserError, match="no program drafts with two models"):
        formats.check("boosted", drafter.settings, target, "vllm")


@pytest.fixture(scope="module")
def first_checkpoint(bench):
    """Checkpoint of the first drafter."""
    return bench.train("score.enabled=false").succeeded().folder / "checkpoints" / "6"


def part(checkpoint, name) -> dict[str, torch.Tensor]:
    stem = f"{name}."
    return {key.removeprefix(stem): w for key, w in weights(checkpoint).items() if key.startswith(stem)}


def test_run_scores_two_trained_drafters(bench, first_checkpoint):
    more = [f"drafter.first={first_checkpoint}", f"drafter.second={first_checkpoint}"]
    run = train(quick(bench, *more, drafter="boosted")).succeeded()
    assert "nothing is trained" in run.out
    assert same(part(run.folder / "checkpoints" / "0", "second"), weights(first_checkpoint))


def test_run_trains_the_second_and_keeps_the_first(bench, first_checkpoint):
    more = [f"drafter.first={first_checkpoint}", "drafter.second.depth=2"]
    run = train(quick(bench, *more, drafter="boosted")).succeeded()
    checkpoint = run.folder / "checkpoints" / "6"
    assert same(part(checkpoint, "first"), weights(first_checkpoint))
    assert not same(part(checkpoint, "second"), weights(first_checkpoint))
    card = json.loads((checkpoint / "score.json").read_text())
    assert card["drafter"] == "boosted"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "drafter.first: give the name"),
        (("drafter.first=eagle",), "drafter.first=eagle: not trained"),
        (("drafter.first=/no/where",), "drafter.first=/no/where: no such drafter"),
        (("drafter.first=lm_given", "drafter.second.depth=0"), "drafter.second.depth=0"),
        (("drafter.second=/no/where",), "drafter.second=/no/where: no such drafter"),
    ],
)
def test_wrong_part_is_refused(bench, overrides, said):
    train(quick(bench, *overrides, drafter="boosted")).refused(said)
