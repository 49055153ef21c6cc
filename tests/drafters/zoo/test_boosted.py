"""A drafter beside a trained one: what its anchors count, whose nodes a draft has, and what is frozen."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from draft_models import quick
from faces import (
    CHAIN,
    CHUNKS,
    SAMPLED,
    Follower,
    K,
    batch_of,
    best_paths,
    both,
    paths,
    random_texts,
    unrolled,
)
from workbench import Bench, make_target, same, train, weights

from decode.errors import UserError
from decode.evaluation.replay import Rollout, replay
from decode.generation.generate import generate
from decode.model.load import load_target
from decode.model.target import LAST
from decode.plan import Plan
from decode.sampling import Sampler
from drafters import optional
from drafters.export import formats as table
from drafters.models.lm import DraftLM
from drafters.zoo.boosted import Boosted

TREE = Plan(depth=K, width=3, nodes=8)
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


def tapped(drafter, part, target, texts):
    """A batch with the taps of one of the two."""
    target.tap(part.taps)
    batch = batch_of(target, texts)
    target.tap(drafter.taps)
    return batch


# -- training --------------------------------------------------------------------------------------


def wanted(target, drafter, texts) -> dict[tuple[int, int, int], bool]:
    """(row, anchor, depth) -> whether the first's most probable token is the text's, from its laws alone."""
    target.tap(drafter.first.taps)
    laws = unrolled(drafter.first, target, texts)
    target.tap(drafter.taps)
    return {(row, t, j): int(law.argmax()) == int(texts[row, t + 1 + j]) for (row, t, j), law in laws.items()}


def lucky(target, drafter, length=24):
    """Texts half of which the first continues: each token is its most probable one, or another."""
    texts, dice = random_texts(2, length), torch.Generator().manual_seed(5)
    for place in range(4, length):
        told = wanted_token(target, drafter, texts, place)
        for row in range(2):
            if torch.rand((), generator=dice) < 0.6:
                texts[row, place] = told[row]
    return texts


def wanted_token(target, drafter, texts, place):
    target.tap(drafter.first.taps)
    laws = unrolled(drafter.first, target, texts[:, : place + 1])
    target.tap(drafter.taps)
    return [int(laws[row, place - 2, 1].argmax()) for row in range(2)]


@pytest.mark.parametrize(
    "first", ["eagle", "medusa", "lm", "diffusion", ("eagle3", {"draft_vocab_size": 25})]
)
@pytest.mark.parametrize("hit_weight", [0.0, 0.25, 1.0])
def test_an_anchor_counts_by_what_the_first_says_there(tiny_target, make_drafter, first, hit_weight):
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


def test_a_row_that_the_first_has_not_predicted_is_missed(tiny_target, make_drafter):
    target, drafter = boosted(tiny_target, make_drafter)
    drafter.first.depth = 1
    texts = lucky(target, drafter)
    with torch.no_grad():
        one, *later = drafter.unroll(batch_of(target, texts), target)
    assert one.weight.unique().numel() == 2
    assert later
    assert all(step.weight.eq(1).all() for step in later)


def test_weights_of_the_second_are_multiplied(tiny_target, make_drafter):
    """Lyanna's extra steps have those of their depth, and sampled anchors of diffusion stand for all."""
    for second in ("lyanna", ("diffusion", {"anchors": 3})):
        target, drafter = boosted(tiny_target, make_drafter, second=second, hit_weight=0.5)
        texts = lucky(target, drafter)
        hits = wanted(target, drafter, texts)
        drafter.train()
        batch, own = batch_of(target, texts), tapped(drafter, drafter.second, target, texts)
        for step, alone in zip(
            drafter.unroll(batch, target), drafter.second.unroll(own, target), strict=True
        ):
            assert (step.depth, step.training_only) == (alone.depth, alone.training_only)
            assert step.anchor.equal(alone.anchor)
            places = [(a // texts.shape[1], a % texts.shape[1], step.depth) for a in step.anchor.tolist()]
            counts = torch.tensor([0.5 if hits[place] else 1.0 for place in places])
            torch.testing.assert_close(step.weight, alone.weight * counts / counts.mean())


def test_a_batch_without_a_miss_counts_nothing(tiny_target, make_drafter):
    _, drafter = boosted(tiny_target, make_drafter)
    hit = torch.ones(5, dtype=torch.bool)
    assert drafter._weigh(hit).eq(0).all()
    assert drafter._weigh(~hit).eq(1).all()
    assert drafter._weigh(hit[:0]).shape == (0,)


def test_the_first_stays_in_evaluation_mode_and_as_it_is(tiny_target, make_drafter):
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


# -- drafts ----------------------------------------------------------------------------------------


def mixed(first, second, weight, nodes):
    """`mix_trees` in plain Python: {path: log q} twice -> the best paths with their probabilities."""
    found = {}
    for tree, share in ((first, weight), (second, 1 - weight)):
        for path, score in tree.items():
            found[path] = found.get(path, 0.0) + share * math.exp(score)
    return dict(sorted(found.items(), key=lambda kv: -kv[1])[:nodes])


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize(
    "names",
    [("eagle", "eagle"), ("eagle", "eagle3"), ("eagle3", "medusa"), ("lyanna", "diffusion")],
    ids="-".join,
)
def test_a_draft_has_the_most_probable_paths_of_both(tiny_target, make_drafter, names, weight):
    target, drafter = boosted(tiny_target, make_drafter, *names, first_weight=weight)
    follower = Follower(drafter, target, random_texts())
    parts = {}
    for name in ("first", "second"):
        target.tap(getattr(drafter, name).taps)
        parts[name] = Follower(getattr(drafter, name), target, random_texts())
    target.tap(drafter.taps)
    shared = 0
    for counts in CHUNKS:
        for one in (follower, *parts.values()):
            one.advance(counts)
        draft = follower.propose(TREE)
        own = {name: one.propose(TREE) for name, one in parts.items()}
        for row in range(2):
            trees = {
                name: {path: float(tree.score[row, i]) for path, i in paths(tree, row).items() if path}
                for name, tree in own.items()
            }
            want = mixed(trees["first"], trees["second"], weight, TREE.nodes)
            want = {path: chance for path, chance in want.items() if chance}
            found = {path: i for path, i in paths(draft, row).items() if path}
            assert found.keys() == want.keys()
            scores = [math.exp(float(draft.score[row, i])) for i in found.values()]
            assert scores == pytest.approx([want[path] for path in found], rel=1e-4)
            shared += len(trees["first"].keys() & trees["second"].keys())
    assert shared


def test_each_grows_the_tree_that_its_training_taught(tiny_target, make_drafter):
    """With all weight on one of them the draft is EAGLE-2's tree of that one, by its training face."""
    for name, weight in (("first", 1.0), ("second", 0.0)):
        target, drafter = boosted(tiny_target, make_drafter, "eagle", "eagle3", first_weight=weight)
        part = getattr(drafter, name)
        follower = Follower(drafter, target, random_texts(), (9, 7))
        draft = follower.propose(TREE)
        for row, prefix in enumerate(follower.known):

            def laws(found, prefix=prefix, part=part, target=target, drafter=drafter):
                size = 1 + len(prefix) + max(map(len, found))
                texts = torch.tensor([([*prefix, *path] + [0] * size)[:size] for path in found])
                target.tap(part.taps)
                told = unrolled(part, target, texts)
                target.tap(drafter.taps)
                return [told[i, len(prefix) - 2, len(path) + 1].log() for i, path in enumerate(found)]

            assert set(paths(draft, row)) - {()} == set(best_paths(laws, TREE))


@pytest.mark.parametrize("name", list(OTHERS))
def test_another_plan_is_the_firsts_own_and_says_so(tiny_target, make_drafter, name):
    plan = OTHERS[name]
    target, drafter = boosted(tiny_target, make_drafter)
    run, alone = (
        generate(target, one, [[5, 1, 2, 3, 9]], plan=plan, sampler=Sampler(1.0), max_new_tokens=12)
        for one in (drafter, drafter.first)
    )
    assert run.outputs[0].tokens == alone.outputs[0].tokens
    assert run.outputs[0].emitted == alone.outputs[0].emitted
    drafter.check(plan)
    assert "drafter.second=eagle: adds nothing to" in optional.remark(drafter, plan)
    assert not optional.remark(drafter, TREE)


def test_a_second_with_fewer_levels_drafts_those(tiny_target, make_drafter):
    target, drafter = boosted(tiny_target, make_drafter, "eagle", "medusa", first_weight=0.0)
    plan = replace(TREE, depth=K + 1)
    drafter.check(plan)
    draft = Follower(drafter, target, random_texts(), (9, 7)).propose(plan)
    assert max(map(len, paths(draft, 0))) <= K
    target, drafter = boosted(tiny_target, make_drafter, "medusa", "eagle")
    with pytest.raises(UserError, match=rf"train with drafter\.first\.depth={K + 1}"):
        drafter.check(plan)


def test_the_target_as_its_own_drafter_is_accepted_whole(tmp_path, make_drafter):
    folder = str(make_target(tmp_path / "target"))
    target = load_target(folder, "float64")
    target.tap((LAST,))
    perfect = DraftLM.for_target(target, path=folder, train=False)
    poor = make_drafter("eagle", target)
    plan = Plan(depth=2, width=2, nodes=12)  # all of both: a poor one may be sure of its own
    for first, second, weight in ((perfect, poor, 0.9), (poor, perfect, 0.1)):
        drafter = Boosted(first, second, weight).to(target.dtype).eval()
        run = generate(target, drafter, [[7, 8, 9], [12]], max_new_tokens=13, sampler=Sampler(0.0), plan=plan)
        assert [output.emitted for output in run.outputs] == [[3] * 4] * 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replay_counts_what_the_decoder_does(tiny_target, make_drafter, temperature):
    target, drafter = boosted(tiny_target, make_drafter, "eagle", "eagle3")
    prompts = [[5, 1, 2, 3, 9], [7, 30], [12, 13, 14, 15]]
    run = generate(
        target, drafter, prompts, plan=TREE, sampler=Sampler(temperature), max_new_tokens=20, seed=3
    )
    rollouts = [Rollout(prompt, output.tokens) for prompt, output in zip(prompts, run.outputs, strict=True)]
    (result,) = replay(target, drafter, rollouts, [TREE], Sampler(temperature))
    decoded = [len(output.emitted) for output in run.outputs]
    assert [float(rounds) for rounds in result.counts.rounds] == pytest.approx(decoded, abs=1e-6)


# -- what cannot be combined -----------------------------------------------------------------------


def test_drafters_that_cannot_be_combined_are_refused(tiny_target, make_drafter):
    target, drafter = boosted(tiny_target, make_drafter)
    eagle = drafter.second
    for name, other, said in [
        ("ngram", {}, "it predicts nothing in training"),
        ("prompt", {}, "it drafts in the pass that verifies"),
        ("medusa2", {}, "it drafts for a tuned copy of the target"),
        ("lyanna", {"reuse": {"mode": "tree_merge"}}, r"set drafter\.{}\.reuse\.mode=none"),
        ("union", {}, "it is made of two drafters"),
    ]:
        part = make_drafter(name, target, **other)
        with pytest.raises(UserError, match=rf"drafter\.first={name}: .*" + said.format("first")):
            Boosted(part, eagle)
        with pytest.raises(UserError, match=rf"drafter\.second={name}: .*" + said.format("second")):
            Boosted(eagle, part)
    certain = make_drafter("eagle", target)
    certain.add_confidence()
    with pytest.raises(UserError, match=r"drafter\.first=eagle: its confidence head"):
        Boosted(certain, eagle)
    with pytest.raises(UserError, match=r"drafter\.confidence=true: chains are the first"):
        drafter.add_confidence()
    for name in ("first_weight", "hit_weight"):
        with pytest.raises(UserError, match=rf"drafter\.{name}=1\.5: must be from 0 to 1"):
            Boosted(drafter.first, eagle, **{name: 1.5})
    with pytest.raises(UserError, match=r"drafter\.first=eagle: not trained"):
        Boosted.for_target(target, first=lambda _: eagle, second=lambda _: eagle)


def test_no_engine_is_given_two(tiny_target, make_drafter):
    target, drafter = boosted(tiny_target, make_drafter)
    assert table.accepting("boosted", drafter.settings, target) == []
    with pytest.raises(UserError, match="no program drafts with two models; export either checkpoint"):
        table.check("boosted", drafter.settings, target, "vllm")


# -- a whole run -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("boosted"))


@pytest.fixture(scope="module")
def alone(bench):
    """Checkpoint of the first drafter."""
    return bench.train("score.enabled=false").succeeded().folder / "checkpoints" / "6"


def part(checkpoint, name) -> dict[str, torch.Tensor]:
    stem = f"{name}."
    return {key.removeprefix(stem): w for key, w in weights(checkpoint).items() if key.startswith(stem)}


def test_the_second_is_trained_and_the_first_stays(bench, alone):
    more = [f"drafter.first={alone}", "drafter.second.depth=2"]
    run = train(quick(bench, *more, drafter="boosted")).succeeded()
    checkpoint = run.folder / "checkpoints" / "6"
    assert same(part(checkpoint, "first"), weights(alone))
    assert not same(part(checkpoint, "second"), weights(alone))
    card = json.loads((checkpoint / "score.json").read_text())
    assert card["drafter"] == "boosted"


def test_with_all_anchors_alike_the_second_is_trained_bit_for_bit_as_alone(bench, alone):
    more = ["score.enabled=false", f"drafter.init_from={alone}"]
    own = bench.train(*more).succeeded()
    more += [f"drafter.first={alone}", "drafter.second.depth=2", "drafter.hit_weight=1"]
    run = train(quick(bench, *more, drafter="boosted")).succeeded()
    assert same(part(run.folder / "checkpoints" / "6", "second"), weights(own.folder / "checkpoints" / "6"))


def test_a_trained_second_is_used_as_it_is_or_gone_on_from(bench, alone):
    more = [f"drafter.first={alone}", f"drafter.second={alone}"]
    run = train(quick(bench, *more, drafter="boosted")).succeeded()
    assert "nothing is trained" in run.out
    assert same(part(run.folder / "checkpoints" / "0", "second"), weights(alone))
    more = [f"drafter.first={alone}", "drafter.second.depth=2", f"drafter.init_from={alone}"]
    run = train(quick(bench, *more, "score.enabled=false", drafter="boosted")).succeeded()
    assert f"drafter.init_from={alone}: every tensor taken over" in run.out
    assert same(part(run.folder / "checkpoints" / "6", "first"), weights(alone))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "drafter.first: give the name of one drafter of conf/drafter, or a checkpoint"),
        (("drafter.first=eagle",), "drafter.first=eagle: not trained"),
        (("drafter.first=/no/where",), "drafter.first=/no/where: no such drafter"),
        (("drafter.first=lm_given", "drafter.second.depth=0"), "drafter.second.depth=0: must be at least 1"),
        (("drafter.second=/no/where",), "drafter.second=/no/where: no such drafter"),
    ],
)
def test_a_wrong_part_is_one_line(bench, overrides, said):
    train(quick(bench, *overrides, drafter="boosted")).refused(said)
