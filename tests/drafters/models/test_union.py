"""Two drafters in one tree: whose nodes are kept; the first is trained, saved and served as alone."""

from __future__ import annotations

import json

import pytest
import torch
from draft_models import adapted, quick
from faces import CHAIN, SAMPLED, Follower, K, V, both, equal, paths, plans_of, random_rollouts, random_texts
from workbench import Bench, foredraft, make_target, same, train, weights

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.load import load_target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.base import Drafter
from drafters.checkpoint import io as hub
from drafters.export import formats as table
from drafters.models.lm import DraftLM
from drafters.models.ngram import Ngram
from drafters.models.suffix import Suffix
from drafters.models.union import Union

TREE = Plan(depth=K, width=3, nodes=8)
HYBRID = Plan(K, 3, 8, proposal="hybrid")
STATIC = Plan(tree=((0,), (1,), (0, 0), (1, 0)))
UNLIKE = torch.arange(V)[None]  # no token twice: nothing to look up
REPEATED = torch.tensor([[5, 1, 2, 3, 9, 1, 2, 4] * 5])


def united(tiny_target, make_drafter, first="eagle", nodes=3, second: Drafter | None = None):
    target, drafter = both(tiny_target, make_drafter, first)
    return target, Union(drafter, second or Ngram(1, 3), nodes)


def parts(follower, plan):
    """What the drafters propose by themselves."""
    union, state = follower.drafter, follower.state
    own = Follower(union, follower.target, follower.texts)
    drafts = []
    for part, part_state in ((union.first, state.first), (union.second, state.second)):
        own.drafter, own.state, own.settled = part, part_state, follower.settled
        drafts.append(own.propose(plan))
    return drafts


# -- the tree ------------------------------------------------------------------------------------


def test_a_row_without_a_match_is_the_firsts_own_with_all_its_nodes(tiny_target, make_drafter):
    target, union = united(tiny_target, make_drafter)
    follower = Follower(union, target, UNLIKE, (9,))
    first, second = parts(follower, TREE)
    assert not second.depth
    assert equal(follower.propose(TREE), first)


def test_a_row_beside_one_with_a_match_is_the_firsts_own_as_well(tiny_target, make_drafter):
    target, union = united(tiny_target, make_drafter)
    follower = Follower(union, target, torch.cat([UNLIKE, REPEATED]), (9, 9))
    (first, second), draft = parts(follower, TREE), follower.propose(TREE)
    assert second.depth
    assert draft.tokens[0].equal(first.tokens[0])
    assert draft.parents[0].equal(first.parents[0])
    assert paths(draft, 1).keys() != paths(first, 1).keys()


def test_the_seconds_nodes_take_the_place_of_the_firsts_weakest(tiny_target, make_drafter):
    target, union = united(tiny_target, make_drafter, nodes=3)
    follower = Follower(union, target, REPEATED)
    for count in (9, 3, 5):
        follower.advance((count,))
        (first, second), draft = parts(follower, TREE), follower.propose(TREE)
        known = [path for path in paths(first, 0) if path]
        rank = sorted(range(len(known)), key=lambda i: -float(first.score[0, i]))
        best = [known[i] for i in rank]
        want = best[: TREE.nodes - 3]
        for path in [*filter(None, paths(second, 0)), *best[TREE.nodes - 3 :]]:
            if path not in want and len(want) < TREE.nodes:
                want.append(path)
        assert set(paths(draft, 0)) - {()} == set(want)
        assert set(want) != set(best), "the second adds something"


def test_a_tree_of_fewer_nodes_than_the_seconds_is_the_seconds_first(tiny_target, make_drafter):
    target, union = united(tiny_target, make_drafter, nodes=9)
    plan = Plan(2, 2, 3)
    follower = Follower(union, target, REPEATED, (9,))
    (_, second), draft = parts(follower, plan), follower.propose(plan)
    assert draft.tokens.shape == (1, 3)
    assert paths(second, 0).keys() <= paths(draft, 0).keys()


@pytest.mark.parametrize("plan", [CHAIN, SAMPLED, STATIC, HYBRID], ids=lambda p: p.name)
def test_another_plan_is_the_firsts_own_and_says_so(tiny_target, make_drafter, plan):
    target, union = united(tiny_target, make_drafter)
    draft, alone = (
        generate(target, one, [REPEATED[0, :12].tolist()], plan=plan, sampler=Sampler(1.0), max_new_tokens=12)
        for one in (union, union.first)
    )
    assert draft.outputs[0].emitted == alone.outputs[0].emitted
    assert draft.outputs[0].tokens == alone.outputs[0].tokens
    union.check(plan)
    assert "drafter.second=ngram: adds nothing to" in union.remark(plan)
    assert not union.remark(TREE)


def test_the_target_as_its_own_drafter_is_accepted_whole(tmp_path):
    folder = str(make_target(tmp_path / "target"))
    target = load_target(folder, "float64")
    union = Union(DraftLM.for_target(target, path=folder, train=False), Ngram(1, 3), 4).to(target.dtype)
    run = generate(target, union, [[7, 8, 9], [12]], max_new_tokens=13, sampler=Sampler(0.0), plan=CHAIN)
    assert [output.emitted for output in run.outputs] == [[K + 1] * 3] * 2


# -- what cannot be combined ----------------------------------------------------------------------


def test_drafters_that_cannot_be_combined_are_refused(tiny_target, make_drafter, tmp_path):
    target, union = united(tiny_target, make_drafter)
    with pytest.raises(UserError, match="choose one that is no union"):
        Union(union, Ngram(1, 3), 4)
    with pytest.raises(UserError, match=r"drafter\.second=eagle: choose one that reads the text alone"):
        Union(union.first, make_drafter("eagle", target), 4)
    with pytest.raises(UserError, match=r"train with drafter\.first\.depth=4"):
        Union(make_drafter("medusa", target, depth=3), Ngram(1, 3), 4).check(Plan(4, 2, 8))
    with pytest.raises(UserError, match=r"second_nodes=0: must be at least 1"):
        Union(union.first, Ngram(1, 3), 0)
    with pytest.raises(UserError, match=r"set drafter\.first\.lora=null"):
        Union(adapted(target, tmp_path), Ngram(1, 3), 4)


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


@pytest.mark.ci("dflash", "eagle3", "lm", "lyanna", "medusa2", "suffix")
def test_every_drafter_may_be_the_first(tiny_target, make_drafter, drafter_name, tmp_path):
    if drafter_name == "union":
        pytest.skip("a union of a union is refused")
    target, union = united(tiny_target, make_drafter, drafter_name)
    hub.save(union.requires_grad_(False), target, tmp_path)
    loaded = hub.load(tmp_path, target)
    assert loaded.settings == union.settings
    for plan in (*plans_of(union), TREE):
        drafts = [Follower(one, target, random_texts(), (9, 7)).propose(plan) for one in (union, loaded)]
        assert equal(*drafts)


def test_an_engine_is_given_the_first_and_told_what_is_left_out(tiny_target, make_drafter):
    target, union = united(tiny_target, make_drafter)
    saved = hub.as_saved(union)
    assert table.accepting("union", union.settings, target) == ["vllm", "sglang"]
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
    union = Union(make_drafter("eagle3", target, seed=2, **options), suffix, 4)
    union.first.d2t.fill_(3)
    assert hub.warm_start(union, tmp_path, target) == ["second.corpus (not there)"]
    assert union.fit(random_rollouts(V), target).startswith("suffix: ")
    assert all(value.equal(old.state_dict()[name]) for name, value in union.first.state_dict().items())
    (again := tmp_path / "union").mkdir()
    hub.save(union, target, again)
    fresh = Union(
        make_drafter("eagle3", target, seed=3, **options), Suffix(**suffix.settings | {"size": 0}), 4
    )
    (left,) = hub.warm_start(fresh, again, target)
    assert left.startswith("second.corpus (")
    assert fresh.needs_fit
    assert fresh.fit(random_rollouts(V), target).startswith("suffix: ")
    assert same(fresh.state_dict(), union.state_dict())
    unlike = Union(make_drafter("eagle", target), Ngram(1, 3), 4)
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
    more = [f"drafter.first={alone}", "drafter.second=ngram", "drafter.second_nodes=2"]
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
        ("drafter.second=eagle", "drafter.second=eagle: choose one that reads the text alone"),
        ("drafter.second=/no/where", "drafter.second: give the name of one drafter"),
    ],
)
def test_a_wrong_part_is_one_line(bench, override, said):
    train(quick(bench, "drafter=union", override, drafter="union")).refused(said)
