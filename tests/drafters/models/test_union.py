"""Two drafters in one draft: the nodes of their mixture; the first is trained, saved and served as alone."""

from __future__ import annotations

import json
import math

import pytest
import torch
from draft_models import adapted, quick
from faces import (
    CHAIN,
    SAMPLED,
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
from workbench import Bench, foredraft, make_target, same, train, weights

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.load import load_target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters import optional
from drafters.base import Drafter
from drafters.checkpoint import io as hub
from drafters.export import formats as table
from drafters.models.lm import DraftLM
from drafters.models.ngram import Ngram
from drafters.models.suffix import Suffix
from drafters.models.union import Union

TREE = Plan(depth=K, width=3, nodes=8)
HYBRID = Plan(K, 3, 8, proposal="hybrid")
HYBRID4 = Plan(4, 2, 8, proposal="hybrid")
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


# -- the mixture ---------------------------------------------------------------------------------


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
def test_a_draft_is_the_most_probable_nodes_of_the_mixture(tiny_target, make_drafter, second, plan, depth):
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


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=lambda p: p.name)
def test_a_row_without_a_match_is_the_firsts_own(tiny_target, make_drafter, plan):
    target, union = united(tiny_target, make_drafter, second=Ngram(3, 3))
    follower = Follower(union, target, UNLIKE, (9,))
    assert paths(follower.propose(plan), 0).keys() == paths(parts(follower, plan)[0], 0).keys()


def test_below_what_the_first_has_looked_at_the_second_goes_on(tiny_target, make_drafter):
    target, union = united(tiny_target, make_drafter, first_depth=1, first_weight=1.0)
    follower, grown = Follower(union, target, REPEATED), 0
    for count in (9, 3, 5, 2):
        follower.advance((count,))
        draft, texts = parts(follower, Plan(1))
        (token,) = draft.tokens[0].tolist()
        chain = follower.propose(CHAIN).tokens[0].tolist()
        known = union.second.next_tokens(texts[0], (token,), 1)
        assert chain[0] == token
        assert chain[1:2] == [other for other, _ in known]
        grown += len(chain) > 1
    assert grown


@pytest.mark.parametrize("plan", [SAMPLED, STATIC, HYBRID], ids=lambda p: p.name)
def test_another_plan_is_the_firsts_own_and_says_so(tiny_target, make_drafter, plan):
    target, union = united(tiny_target, make_drafter)
    draft, alone = (
        generate(target, one, [REPEATED[0, :12].tolist()], plan=plan, sampler=Sampler(1.0), max_new_tokens=12)
        for one in (union, union.first)
    )
    assert draft.outputs[0].emitted == alone.outputs[0].emitted
    assert draft.outputs[0].tokens == alone.outputs[0].tokens
    union.check(plan)
    assert "drafter.second=ngram: adds nothing to" in optional.remark(union, plan)
    assert not optional.remark(union, TREE) + optional.remark(union, CHAIN)


def test_the_target_as_its_own_drafter_is_accepted_whole(tmp_path):
    folder = str(make_target(tmp_path / "target"))
    target = load_target(folder, "float64")
    first = DraftLM.for_target(target, path=folder, train=False)
    union = Union(first, Ngram(1, 3), None, 1, 1.0).to(target.dtype)
    run = generate(target, union, [[7, 8, 9], [12]], max_new_tokens=13, sampler=Sampler(0.0), plan=Plan(1))
    assert [output.emitted for output in run.outputs] == [[2] * 6] * 2


# -- what cannot be combined ----------------------------------------------------------------------


def test_drafters_that_cannot_be_combined_are_refused(tiny_target, make_drafter, tmp_path):
    target, union = united(tiny_target, make_drafter)
    with pytest.raises(UserError, match="made of two drafters; choose one that is not"):
        Union(union, Ngram(1, 3))
    for name in ("eagle", "bigram"):
        with pytest.raises(UserError, match=rf"drafter\.second={name}: choose one that looks tokens up"):
            Union(union.first, make_drafter(name, target))
    with pytest.raises(UserError, match=r"drafter\.first=ngram: a lookup has no distribution"):
        Union(Ngram(1, 3), Ngram(1, 3))
    with pytest.raises(UserError, match=r"train with drafter\.first\.depth=4"):
        Union(make_drafter("medusa", target, depth=3), Ngram(1, 3)).check(HYBRID4)
    with pytest.raises(UserError, match=r"set drafter\.first\.reuse\.mode=none"):
        Union(make_drafter("lyanna", target, reuse={"mode": "tree_merge"}), Ngram(1, 3))
    with pytest.raises(UserError, match=r"set drafter\.first\.lora=null"):
        Union(adapted(target, tmp_path), Ngram(1, 3))


def test_heads_that_end_before_the_plan_are_mixed_as_far_as_they_go(tiny_target, make_drafter):
    target, first = both(tiny_target, make_drafter, "medusa")
    union, plan = Union(first, Ngram(1, 3), None, None, 0.0), Plan(first.max_depth + 2)
    union.check(plan)
    assert Follower(union, target, REPEATED, (9,)).propose(plan).depth == plan.depth


@pytest.mark.parametrize("part", ["first", "second"])
@pytest.mark.parametrize(
    "settings", [{"drafter": "os"}, {"drafter": 3}, {"settings": []}, {"more": 1}], ids=str
)
def test_a_part_that_no_union_writes_is_refused(tiny_target, make_drafter, tmp_path, part, settings):
    target, union = united(tiny_target, make_drafter)
    hub.save(union, target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["settings"][part] |= settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=rf"settings\.{part}: must be|drafter 'os' is not known"):
        hub.load(tmp_path, target)


# -- saved, gone on from, exported -----------------------------------------------------------------


def test_every_drafter_may_be_the_first(pair, drafter_name, tmp_path):
    target, drafter = pair
    if not may_be_first(drafter):
        with pytest.raises(UserError, match=rf"drafter\.first={drafter_name}: .*; choose"):
            Union(drafter, Ngram(1, 3))
        return
    union = Union(drafter, Ngram(1, 3), **EVERY_ROUND)
    hub.save(union.requires_grad_(False), target, tmp_path)
    loaded = hub.load(tmp_path, target)
    assert loaded.settings == union.settings
    for plan in (*plans_of(union), TREE):
        drafts = [Follower(one, target, random_texts(), (9, 7)).propose(plan) for one in (union, loaded)]
        assert equal(*drafts)


def test_an_engine_is_given_the_first_and_told_what_is_left_out(tiny_target, make_drafter):
    target, union = united(tiny_target, make_drafter)
    saved = hub.as_saved(union)
    assert table.accepting("union", union.settings, target) == ["vllm", "sglang", "authors"]
    layout, alone = (table.write_layout(one, target, "vllm") for one in (saved, hub.as_saved(union.first)))
    assert layout.config == alone.config
    assert same(layout.tensors, alone.tensors)
    assert layout.note.startswith("left out: the second drafter of the union (ngram), which the scores")
    table.check_format("union", "hf")  # which drafter it is, its settings say
    with pytest.raises(UserError, match="hf has no format for drafter 'eagle'"):
        table.write_layout(saved, target, "hf")


def test_a_draft_vocabulary_belongs_to_the_weights_that_are_taken_over(tiny_target, make_drafter, tmp_path):
    options = {"draft_vocab_size": 7}
    target, old = both(tiny_target, make_drafter, "eagle3", **options)
    hub.save(old, target, tmp_path)
    suffix: Suffix = make_drafter("suffix", target)
    union = Union(make_drafter("eagle3", target, seed=2, **options), suffix)
    union.first.d2t.fill_(3)
    assert hub.warm_start(union, tmp_path, target) == ["second.corpus (not there)"]
    assert union.fit(random_rollouts(V), target).startswith("suffix: ")
    assert all(value.equal(old.state_dict()[name]) for name, value in union.first.state_dict().items())
    (again := tmp_path / "union").mkdir()
    hub.save(union, target, again)
    fresh = Union(make_drafter("eagle3", target, seed=3, **options), Suffix(**suffix.settings | {"size": 0}))
    (left,) = hub.warm_start(fresh, again, target)
    assert left.startswith("second.corpus (")
    assert fresh.needs_fit
    assert fresh.fit(random_rollouts(V), target).startswith("suffix: ")
    assert same(fresh.state_dict(), union.state_dict())
    unlike = Union(make_drafter("eagle", target), Ngram(1, 3))
    with pytest.raises(UserError, match="its first drafter is 'eagle3', not 'eagle'"):
        hub.warm_start(unlike, again, target)


def test_a_confidence_head_is_the_firsts(tiny_target, make_drafter, tmp_path):
    target, union = united(tiny_target, make_drafter)
    union.add_confidence()
    union.confidence.weight.data.fill_(0.25)
    (group,) = union.param_groups()
    assert sum(weight is union.confidence.weight for weight in group.weights) == 1
    hub.save(union, target, tmp_path)
    loaded = hub.load(tmp_path, target)
    assert loaded.confidence is loaded.first.confidence
    assert loaded.confidence.weight.eq(0.25).all()
    plan = Plan(depth=K, proposal="sampled", min_confidence=0.4)
    drafts = [Follower(one, target, random_texts(), (5, 3)).propose(plan) for one in (union, loaded)]
    assert equal(*drafts)


# -- a whole run ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("union"))


@pytest.fixture(scope="module")
def alone(bench):
    """Checkpoint of the first drafter, trained by itself."""
    run = bench.train("score.enabled=false").succeeded()
    return run.folder / "checkpoints" / "6"


def firsts(checkpoint) -> dict[str, torch.Tensor]:
    found = weights(checkpoint)
    return {name.removeprefix("first."): w for name, w in found.items() if name.startswith("first.")}


def test_the_first_is_trained_bit_for_bit_as_alone(bench, alone):
    more = ["drafter.first.depth=2", "score.enabled=false"]
    run = train(quick(bench, *more, drafter="union")).succeeded()
    assert "drafter=union: suffix: the newest" in run.out
    checkpoint = run.folder / "checkpoints" / "6"
    assert same(firsts(checkpoint), weights(alone))
    assert "second.corpus" in weights(checkpoint)


def test_a_checkpoint_is_used_as_it_is_scored_and_advised(bench, alone, tmp_path):
    more = [f"drafter.first={alone}", "drafter.second=ngram", "drafter.second_alone=0.9"]
    tree = ["decode=dynamic", "decode.depth=2", "decode.width=2", "decode.nodes=4"]
    run = train(quick(bench, *more, *tree, drafter="union")).succeeded()
    checkpoint = run.folder / "checkpoints" / "0"
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["settings"]["second"] == {"drafter": "ngram", "settings": {"max_n": 3, "min_n": 1}}
    assert same(firsts(checkpoint), weights(alone))
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
        ("drafter.first=eagl", "drafter.first=eagl: no such drafter"),
        ("drafter.first=auto", "drafter.first: give the name of one drafter"),
        ("drafter.first.dept=3", "no such option in drafter.first; did you mean"),
        ("drafter.first.depth=0", "depth=0"),
        ("drafter.second=eagle", "drafter.second=eagle: choose one that looks tokens up in text"),
        ("drafter.second=/no/where", "drafter.second=/no/where: no such drafter"),
    ],
)
def test_a_wrong_part_is_one_line(bench, override, said):
    train(quick(bench, "drafter=union", override, drafter="union")).refused(said)
