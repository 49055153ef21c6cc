"""Union: which drafter drafts in a round, drafts of the mixture, and what becomes of the first."""

from __future__ import annotations

import json
import math
import random
from functools import partial

import pytest
import torch
from draft_models import adapted, quick
from drafter_checks import (
    CHAIN,
    ROUNDING,
    SAMPLED,
    TREE,
    Follower,
    K,
    V,
    both,
    equal,
    may_be_first,
    paths,
    plans_of,
    random_rollouts,
    random_texts,
)
from workbench import foredraft, same, train, weights

from decode.errors import UserError
from decode.evaluation.replay import Rollout, replay
from decode.generation.generate import generate
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters import optional
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats
from drafters.models import union as union_module
from drafters.models.ngram import Ngram
from drafters.models.suffix import Suffix
from drafters.models.union import Union

HYBRID = Plan(K, 3, 8, proposal="hybrid")
EVERY_ROUND = {"second_alone": None, "first_depth": None}
STATIC = Plan(tree=((0,), (1,), (0, 0), (1, 0)))
UNLIKE = torch.arange(V)[None]  # no token twice: nothing to look up
REPEATED = torch.tensor([[5, 1, 2, 3, 9, 1, 2, 4] * 5])


def united(tiny_target, make_drafter, first="eagle", second: Drafter | None = None, **options):
    target, drafter = both(tiny_target, make_drafter, first)
    return target, Union(drafter, second or Ngram(1, 3), **EVERY_ROUND | options)


def parts(follower, plan):
    """What the first drafts by itself, and the second's text."""
    union, state = follower.drafter, follower.state
    own = Follower(union.first, follower.target, follower.texts)
    own.state, own.settled = state.first, follower.settled
    return own.propose(plan), state.second


def mixed(follower, plan, row) -> dict[tuple[int, ...], float]:
    """Every path within a plan's depth and width -> its probability under the mixture, in plain Python."""
    union, depth = follower.drafter, follower.drafter.first_depth or plan.depth
    width = 8 if depth == 1 else max(plan.width, 2)
    draft, texts = parts(follower, Plan(depth, width, width + (depth - 1) * width**2))
    log_q = {path: float(draft.score[row, i]) for path, i in paths(draft, row).items() if path} | {(): 0.0}
    q = {path: math.exp(score - log_q[path[:-1]]) for path, score in log_q.items() if path}
    found, level = {}, {(): 1.0}
    for _ in range(plan.depth):
        below = {}
        for path, chance in level.items():
            r = dict(union.second.next_tokens(texts[row], path, 8))
            own = {other[-1]: share for other, share in q.items() if other[:-1] == path}
            weight = 1 - (1 - union.first_weight) * sum(r.values())
            if own:
                r = {
                    token: (1 - union.first_weight) * r.get(token, 0.0) + weight * own.get(token, 0.0)
                    for token in {*r, *own}
                }
            for token in sorted(r, key=lambda token: -r[token])[: plan.width]:
                below[*path, token] = chance * r[token]
        found |= below
        level = below
    return found


@pytest.mark.parametrize("depth", [1, 2, None])
@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=lambda p: p.name)
@pytest.mark.parametrize("second", ["ngram", "suffix"])
def test_draft_has_the_most_probable_nodes_of_the_mixture(tiny_target, make_drafter, second, plan, depth):
    target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)
    part = make_drafter(second, target)
    target, union = united(tiny_target, make_drafter, "eagle", part, first_depth=depth, first_weight=0.4)
    follower = Follower(union, target, torch.cat([UNLIKE, REPEATED[:, :V]]))
    for count in (9, 2, 1):
        follower.advance((count, count))
        draft = follower.propose(plan)
        for row in range(2):
            want, drafted = mixed(follower, plan, row), [path for path in paths(draft, row) if path]
            best = sorted(want.values(), reverse=True)[: plan.nodes]
            assert [want[path] for path in drafted] == pytest.approx(best)


@pytest.mark.parametrize("plan", [SAMPLED, STATIC, HYBRID], ids=lambda p: p.name)
def test_other_plans_are_left_to_the_first_with_a_remark(tiny_target, make_drafter, plan):
    target, union = united(tiny_target, make_drafter)
    options = {"plan": plan, "sampler": Sampler(1.0), "max_new_tokens": 12}
    runs = [generate(target, one, [REPEATED[0, :12].tolist()], **options) for one in (union, union.first)]
    ours, firsts = (run.outputs[0] for run in runs)
    assert (ours.tokens, ours.emitted) == (firsts.tokens, firsts.emitted)
    union.check(plan)
    assert "drafter.second=ngram" in optional.remark(union, plan)
    assert not optional.remark(union, TREE) + optional.remark(union, CHAIN)


def test_drafters_that_cannot_be_combined_are_refused(tiny_target, make_drafter, tmp_path):
    target, union = united(tiny_target, make_drafter)
    lookup = Ngram(1, 3)
    for first, second, said in [
        (union, lookup, "made of two drafters"),
        (union.first, make_drafter("eagle", target), r"drafter\.second=eagle"),
        (union.first, make_drafter("bigram", target), r"drafter\.second=bigram"),
        (make_drafter("lyanna", target, reuse={"mode": "tree_merge"}), lookup, r"set drafter\.first\.reuse"),
        (adapted(target, tmp_path), lookup, r"set drafter\.first\.lora=null"),
    ]:
        with pytest.raises(UserError, match=said):
            Union(first, second)
    with pytest.raises(UserError, match=r"train with drafter\.first\.depth=4"):
        Union(make_drafter("medusa", target, depth=3), lookup).check(Plan(4, 2, 8, proposal="hybrid"))


def test_first_with_fewer_levels_is_mixed_as_far_as_it_goes(tiny_target, make_drafter):
    target, first = both(tiny_target, make_drafter, "medusa")
    union, plan = Union(first, Ngram(1, 3), None, None, 0.0), Plan(first.max_depth + 2)
    union.check(plan)
    assert Follower(union, target, REPEATED, (9,)).propose(plan).depth == plan.depth


@pytest.mark.parametrize("part", ["first", "second"])
def test_damaged_part_of_a_checkpoint_is_refused(tiny_target, make_drafter, tmp_path, part):
    target, union = united(tiny_target, make_drafter)
    checkpoint_io.save(union, target, tmp_path)
    text = (tmp_path / "config.json").read_text()
    for settings in ({"drafter": "os"}, {"drafter": 3}, {"settings": []}, {"more": 1}):
        config = json.loads(text)
        config["settings"][part] |= settings
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=rf"settings\.{part}: must be|drafter 'os' is not known"):
            checkpoint_io.load(tmp_path, target)


def test_every_drafter_may_be_the_first(pair, drafter_name, tmp_path):
    target, drafter = pair
    if not may_be_first(drafter):
        with pytest.raises(UserError, match=rf"drafter\.first={drafter_name}: .*; choose"):
            Union(drafter, Ngram(1, 3))
        return
    union = Union(drafter, Ngram(1, 3), **EVERY_ROUND)
    checkpoint_io.save(union.requires_grad_(False), target, tmp_path)
    loaded = checkpoint_io.load(tmp_path, target)
    assert loaded.settings == union.settings
    for plan in (*plans_of(union), TREE):
        drafts = [Follower(one, target, random_texts(), (9, 7)).propose(plan) for one in (union, loaded)]
        assert equal(*drafts)


def test_export_is_the_firsts_with_a_note(tiny_target, make_drafter):
    target, union = united(tiny_target, make_drafter)
    assert formats.accepting("union", union.settings, target) == ["vllm", "sglang", "authors"]
    saved = map(checkpoint_io.as_saved, (union, union.first))
    whole, first = (formats.write_layout(one, target, "vllm") for one in saved)
    assert whole.config == first.config
    assert same(whole.tensors, first.tensors)
    assert "not exported: the second drafter" in whole.note
    with pytest.raises(UserError, match="hf has no format for drafter 'eagle'"):
        formats.write_layout(checkpoint_io.as_saved(union), target, "hf")


def test_warm_start_takes_the_draft_vocabulary(tiny_target, make_drafter, tmp_path):
    options = {"draft_vocab_size": 7}
    target, old = both(tiny_target, make_drafter, "eagle3", **options)
    checkpoint_io.save(old, target, tmp_path)
    suffix: Suffix = make_drafter("suffix", target)
    union = Union(make_drafter("eagle3", target, seed=2, **options), suffix)
    union.first.d2t.fill_(3)
    assert checkpoint_io.warm_start(union, tmp_path, target) == ["second.corpus (not there)"]
    assert union.fit(random_rollouts(V), target).startswith("suffix: ")
    assert all(value.equal(old.state_dict()[name]) for name, value in union.first.state_dict().items())
    (again := tmp_path / "union").mkdir()
    checkpoint_io.save(union, target, again)
    fresh = Union(make_drafter("eagle3", target, seed=3, **options), Suffix(**suffix.settings | {"size": 0}))
    (left,) = checkpoint_io.warm_start(fresh, again, target)
    assert left.startswith("second.corpus (")
    assert fresh.needs_fit
    assert fresh.fit(random_rollouts(V), target).startswith("suffix: ")
    assert same(fresh.state_dict(), union.state_dict())
    with pytest.raises(UserError, match="its first drafter is 'eagle3', not 'eagle'"):
        checkpoint_io.warm_start(Union(make_drafter("eagle", target), Ngram(1, 3)), again, target)


def test_confidence_head_is_the_firsts(tiny_target, make_drafter, tmp_path):
    target, union = united(tiny_target, make_drafter)
    union.add_confidence()
    union.confidence.weight.data.fill_(0.25)
    (group,) = union.param_groups()
    assert sum(weight is union.confidence.weight for weight in group.weights) == 1
    checkpoint_io.save(union, target, tmp_path)
    loaded = checkpoint_io.load(tmp_path, target)
    assert loaded.confidence is loaded.first.confidence
    assert loaded.confidence.weight.eq(0.25).all()
    plan = Plan(depth=K, proposal="sampled", min_confidence=0.4)
    drafts = [Follower(one, target, random_texts(), (5, 3)).propose(plan) for one in (union, loaded)]
    assert equal(*drafts)


@pytest.fixture(scope="module")
def first_checkpoint(bench):
    """A trained first drafter."""
    run = bench.train("score.enabled=false").succeeded()
    return run.folder / "checkpoints" / "6"


def firsts(checkpoint) -> dict[str, torch.Tensor]:
    found = weights(checkpoint)
    return {name.removeprefix("first."): w for name, w in found.items() if name.startswith("first.")}


@pytest.mark.proof
def test_first_trains_like_a_plain_run(bench, first_checkpoint):
    more = ["drafter.first.depth=2", "score.enabled=false"]
    run = train(quick(bench, *more, drafter="union")).succeeded()
    assert "drafter=union: suffix: the newest" in run.out
    checkpoint = run.folder / "checkpoints" / "6"
    assert same(firsts(checkpoint), weights(first_checkpoint))
    assert "second.corpus" in weights(checkpoint)


def test_checkpoint_as_first_is_scored_and_advised(bench, first_checkpoint, tmp_path):
    more = [f"drafter.first={first_checkpoint}", "drafter.second=ngram", "drafter.second_alone=0.9"]
    tree = ["decode=dynamic", "decode.depth=2", "decode.width=2", "decode.nodes=4"]
    run = train(quick(bench, *more, *tree, drafter="union")).succeeded()
    checkpoint = run.folder / "checkpoints" / "0"
    assert same(firsts(checkpoint), weights(first_checkpoint))
    card = json.loads((checkpoint / "score.json").read_text())
    assert card["drafter"] == "union"
    more = ["chains=1", "trees=[4]", "widths=[2]", "repeats=1", "score.max_new_tokens=6", "score.prompts=2"]
    more += [f"prompts.heldout={bench.heldout}", f"prompts={bench.prompts}", f"answers={tmp_path}"]
    advice = foredraft("advise", f"checkpoint={checkpoint}", f"target={bench.target}", *more).succeeded()
    assert "union" in advice.out


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("drafter.first=/no/where", "drafter.first=/no/where: no such drafter"),
        ("drafter.first=auto", "drafter.first: give the name of one drafter"),
        ("drafter.first.dept=3", "no such option in drafter.first; did you mean"),
        ("drafter.second=eagle", "drafter.second=eagle: choose one"),
    ],
)
def test_wrong_part_is_refused(bench, override, said):
    train(quick(bench, "drafter=union", override, drafter="union")).refused(said)


# -- who drafts in a round -------------------------------------------------------------------------


RAGGED = [(9, 12), (3, 1), (1, 4), (2, 2)]
OFTEN = 0.2  # tokens, which any match of Ngram(2, 3) is expected to bring


def alternating(tiny_target, make_drafter, alone: float | None = OFTEN) -> tuple[Target, Union]:
    target, drafter = both(tiny_target, make_drafter, "eagle")
    return target, Union(drafter, Ngram(2, 3), alone, None, 1.0)


def calls_of(monkeypatch, drafter) -> list[str]:
    """Names of the calls that a drafter gets from now on."""
    calls = []

    def noted(name, method, *args):
        calls.append(name)
        return method(*args)

    for name in ("propose", "advance"):
        monkeypatch.setattr(drafter, name, partial(noted, name, getattr(drafter, name)))
    return calls


def own(part, target, texts, counts) -> Follower:
    """One of the two by itself, at the same place of the texts."""
    follower = Follower(part, target, texts)
    for count in counts:
        follower.advance(count)
    return follower


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=lambda p: p.name)
def test_second_that_expects_enough_drafts_without_the_first(tiny_target, make_drafter, monkeypatch, plan):
    target, union = alternating(tiny_target, make_drafter)
    texts, calls = REPEATED.repeat(2, 1), calls_of(monkeypatch, union.first)
    follower = Follower(union, target, texts)
    for place, counts in enumerate(RAGGED):
        follower.advance(counts)
        draft = follower.propose(plan)
        assert draft.depth
        assert equal(draft, own(union.second, target, texts, RAGGED[: place + 1]).propose(plan))
    assert calls == ["advance"]  # of the prompt


@pytest.mark.parametrize("alone", [None, 99.0], ids=["never", "more than it expects"])
def test_second_that_expects_too_little_leaves_the_round(tiny_target, make_drafter, monkeypatch, alone):
    target, union = alternating(tiny_target, make_drafter, alone)
    calls = calls_of(monkeypatch, union.first)
    found = paths(Follower(union, target, REPEATED, (9,)).propose(CHAIN), 0)
    assert calls == ["advance", "propose"]
    begin = own(union.first, target, REPEATED, [(9,)]).propose(Plan(1, 3, 3)).tokens[0].tolist()
    assert next(iter(found.keys() - {()}))[:1] in {(token,) for token in begin}


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=lambda p: p.name)
def test_every_row_decides_for_itself(tiny_target, make_drafter, plan):
    target, union = alternating(tiny_target, make_drafter)
    texts = torch.cat([UNLIKE, REPEATED[:, :V]])
    draft = Follower(union, target, texts, (9, 9)).propose(plan)
    for row, part in enumerate((union.first, union.second)):
        single = own(part, target, texts[row : row + 1], [(9,)]).propose(plan)
        assert paths(draft, row).keys() == paths(single, 0).keys()


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0]], ids=str)
def test_deferred_rounds_give_the_same_drafts(tiny_target, make_drafter, rows):
    target, union = alternating(tiny_target, make_drafter)
    texts = torch.cat([REPEATED, REPEATED.roll(3, 1), REPEATED.roll(-2, 1)])
    late, at_once = Follower(union, target, texts), Follower(union.first, target, texts)
    for follower in (late, at_once):
        for counts in [(9, 10, 12), (3, 1, 2), (1, 4, 1)]:
            follower.advance(counts)
        follower.select(rows)
        follower.advance([(2, 5, 1)[row] for row in rows])
    assert len(late.state.waiting.rounds) == 3
    assert equal(late.propose(SAMPLED), at_once.propose(SAMPLED), atol=ROUNDING)
    assert not late.state.waiting.rounds
    for follower in (late, at_once):
        follower.advance([1] * len(rows))
    assert equal(late.propose(SAMPLED), at_once.propose(SAMPLED), atol=ROUNDING)


def test_deferred_tokens_are_bounded(tiny_target, make_drafter, monkeypatch):
    monkeypatch.setattr(union_module, "DEFERRED", 7)
    target, union = alternating(tiny_target, make_drafter)
    follower = Follower(union, target, REPEATED, (9,))
    calls, widths = calls_of(monkeypatch, union.first), []
    for _ in range(6):
        follower.advance((3,))
        widths.append(follower.state.waiting.width)
    assert widths == [3, 6, 0, 3, 6, 0]
    assert calls == ["advance"] * 2
    assert equal(
        follower.propose(SAMPLED), own(union.first, target, REPEATED, [(27,)]).propose(SAMPLED), ROUNDING
    )


@pytest.mark.parametrize("sampler", [Sampler(0.0), Sampler(0.8)], ids=str)
@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=lambda p: p.name)
@pytest.mark.parametrize("rule", [(None, None), (0.9, 1)], ids=str)
@pytest.mark.parametrize("second", ["ngram", "suffix"])
@pytest.mark.covering(pairs=True)
def test_replay_counts_the_decoders_rounds(tiny_target, make_drafter, second, plan, rule, sampler):
    target = tiny_target(vocab=5)
    union = Union(make_drafter("eagle", target), make_drafter(second, target), *rule)
    target.tap(union.taps)
    dice = random.Random(3)
    prompts = [[dice.randrange(5) for _ in range(dice.randint(2, 7))] for _ in range(6)]
    options = {"max_new_tokens": 14, "sampler": sampler, "seed": 2}
    plain = generate(target, None, prompts, **options).outputs
    rollouts = [Rollout(prompt, output.tokens) for prompt, output in zip(prompts, plain, strict=True)]
    outputs = generate(target, union, prompts, plan=plan, **options).outputs
    assert [output.tokens for output in outputs] == [rollout.answer for rollout in rollouts]
    (one,) = replay(target, union, rollouts, [plan], sampler)
    assert one.counts.rounds == [len(output.emitted) for output in outputs]
    (firsts,) = replay(target, union.first, rollouts, [plan], sampler)
    assert one.counts != firsts.counts
    single = generate(target, union, prompts[1:2], plan=plan, requests=[1], **options).outputs[0]
    assert (single.tokens, single.emitted) == (outputs[1].tokens, outputs[1].emitted)


@pytest.mark.states
def test_every_drafter_may_be_left_out_of_rounds(pair):
    target, drafter = pair
    if not may_be_first(drafter):
        pytest.skip("refused as the first, see test_union")
    union = Union(drafter, Ngram(2, 3), 1.2, 1, 1.0)
    model, options = union.verifier(target), {"max_new_tokens": 40, "sampler": Sampler(0.0)}
    prompts = [REPEATED[0, :9].tolist(), [7], list(range(12))]
    plain = generate(model, None, prompts, **options)
    for plan in (CHAIN, TREE, Plan(1)):
        run = generate(model, union, prompts, plan=plan, **options)
        assert [output.tokens for output in run.outputs] == [output.tokens for output in plain.outputs]
