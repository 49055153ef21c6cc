"""A draft model that a lookup speeds up: the same drafts in fewer passes, and its own tokens behind them."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch
from draft_models import KINDS, draft_model, quick
from exact import PROMPTS as READ
from exact import check_lossless
from faces import CHAIN, SAMPLED, TREE, Follower, K, V, both
from workbench import Bench, make_target, same, tau, train, weights

from decode.draft import PAD
from decode.errors import UserError
from decode.evaluation.replay import Rollout, replay
from decode.generation.generate import generate
from decode.model.load import load_target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters import optional
from drafters.checkpoint import io as hub
from drafters.export import formats as table
from drafters.families.lookup import Node
from drafters.models.lm import DraftLM
from drafters.models.ngram import Ngram
from drafters.zoo.cascade import Cascade
from drafters.zoo.read_ahead import ReadNodes

ROUNDING = 1e-12  # of fp64, where passes have other shapes
SINGLE = 1e-6  # relative, of fp32, in which transformers' eager attention takes a softmax in any case
DEPTH = 6
PLANS = {
    "chain": Plan(DEPTH),
    "one token": Plan(1),
    "two tokens": Plan(2),
    "drawn": Plan(DEPTH, proposal="sampled"),
    "drawn, block": Plan(DEPTH, proposal="sampled", rule="block"),
    "drawn, matched": Plan(DEPTH, proposal="sampled", rule="match"),
    "drawn, confident": Plan(DEPTH, proposal="sampled", min_confidence=0.01),
    "confident": Plan(DEPTH, min_confidence=0.01),
}
STATIC = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0))
TREES = {
    "fixed": Plan(4, 3, 9),
    "two wide": Plan(5, 2, 7),
    "one level": Plan(1, 3, 3),
    "hybrid": Plan(4, 3, 9, proposal="hybrid"),
    "static": Plan(tree=STATIC),
    "static, hybrid": Plan(tree=STATIC, proposal="hybrid"),
    "static, drawn": Plan(tree=STATIC, proposal="sampled"),
    "static, replaced": Plan(tree=STATIC, proposal="sampled", replacement=True, rule="kseq"),
    "side by side": Plan(3, proposal="sampled", drafts=3),
}
SAMPLERS = [Sampler(0.0), Sampler(1.0), Sampler(0.7, top_p=0.9)]
PROMPTS = [[1, 2, 0, 1, 2], [3], [4, 4, 0, 2, 4, 4, 0]]


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab=5, positions=128)


def cascade(make_drafter, target, second="ngram", trees=True, **options) -> Cascade:
    """A random draft model and a lookup."""
    return Cascade(make_drafter("lm", target), make_drafter(second, target), trees=trees, **options)


def drafts_of(target, drafter, prompts, plan, sampler, **options) -> list:
    """Of every round, with the texts."""
    found = []
    run = generate(
        target,
        drafter,
        prompts,
        plan=plan,
        sampler=sampler,
        on_round=lambda r: found.append(r.draft),
        **options,
    )
    return [[(output.tokens, output.emitted) for output in run.outputs], found]


def assert_same_drafts(ours, alone, rtol=0.0) -> None:
    assert ours[0] == alone[0]
    for one, other in zip(ours[1], alone[1], strict=True):
        assert_same_draft(one, other, rtol)


def assert_same_draft(one, other, rtol=0.0) -> None:
    """`rtol` is of scores."""
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.parents, other.parents)
    assert (one.q is None) == (other.q is None)
    if one.q is not None:
        torch.testing.assert_close(one.q, other.q, rtol=0, atol=ROUNDING)
    assert (one.score is None) == (other.score is None)
    if one.score is not None:
        torch.testing.assert_close(one.score, other.score, rtol=rtol, atol=ROUNDING)


@pytest.fixture
def kept(monkeypatch) -> list[bool]:
    """Of every expanded level below the root, whether all its nodes had been read ahead."""
    found, have = [], ReadNodes.have

    def noted(self, paths):
        found.append(have(self, paths))
        return found[-1]

    monkeypatch.setattr(ReadNodes, "have", noted)
    return found


@pytest.fixture
def passes(monkeypatch) -> list[str]:
    """What draft models call: `logits` in each pass, `unread` before one that has settled tokens."""
    found = []

    def noted(name):
        method = getattr(DraftLM, name)

        def calling(self, *args, **options):
            found.append(name)
            return method(self, *args, **options)

        monkeypatch.setattr(DraftLM, name, calling)

    noted("unread")
    noted("logits")
    return found


def below_the_root(passes: list[str]) -> int:
    """Number of passes over drafted tokens only."""
    return passes.count("logits") - passes.count("unread")


# -- vertical: the draft model's own draft ---------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    ("second", "length"), [("ngram", None), ("suffix", None), ("ngram", 1), ("suffix", 2)]
)
@pytest.mark.covering(pairs=True)
def test_drafts_are_those_of_the_draft_model_alone(target, make_drafter, kept, second, length, name, sampler):
    drafter = cascade(make_drafter, target, second, second_length=length)
    for prompts, stop in ((PROMPTS, [0]), (PROMPTS[:1], []), (PROMPTS[2:], [])):  # rows that leave, and one
        found = [
            drafts_of(target, one, prompts, PLANS[name], sampler, max_new_tokens=40, stop=stop, seed=3)
            for one in (drafter, drafter.first)
        ]
        assert_same_drafts(*found)
    if PLANS[name].depth > 2:
        assert set(kept) == {True, False}


class Every(Ngram):
    """Names all tokens below every node, of so many levels."""

    def __init__(self, vocab: int, levels: int) -> None:
        super().__init__(1, 1)
        self.vocab, self.levels = vocab, levels

    def nodes(self, history, plan):
        found, parents = [], [-1]
        for _ in range(min(plan.depth, self.levels)):
            level = [Node(token, parent) for parent in parents for token in range(self.vocab)]
            parents = range(len(found), len(found) + len(level))
            found += level
        return found


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("second", "length"), [("ngram", None), ("suffix", 99), ("ngram", 2), ("every", 99)])
@pytest.mark.covering(pairs=True)
def test_trees_are_those_of_the_draft_model_alone(target, make_drafter, kept, second, length, name, sampler):
    drafter = cascade(make_drafter, target, "ngram" if second == "every" else second, second_length=length)
    if second == "every":
        drafter.second = Every(target.vocab_size, 2)
    for prompts, stop in ((PROMPTS, [0]), (PROMPTS[:1], [])):
        found = [
            drafts_of(target, one, prompts, TREES[name], sampler, max_new_tokens=30, stop=stop, seed=3)
            for one in (drafter, drafter.first)
        ]
        assert_same_drafts(*found)
    if TREES[name].depth > 1:
        assert set(kept) >= ({True, False} if second == "every" else {False})


@pytest.mark.parametrize("kind", KINDS)
def test_and_so_with_every_kind_of_model(tiny_target, tmp_path, kept, kind):
    """Windows above all, whose positions follow the slots; and a text past the model's context."""
    target = tiny_target(vocab=V, layers=3, hidden=16)
    size = {"learned positions": "n_positions"}.get(kind, "max_position_embeddings")
    first = (
        DraftLM.for_target(target, path=draft_model(tmp_path / "draft", kind, **{size: 24})).double().eval()
    )
    drafter = Cascade(first, Ngram(1, 3), trees=True)
    prompts = [[5, 1, 2, 3, 9, 1, 2, 4] * 2, [7, 8] * 3]
    plans = [
        (Plan(5), Sampler(0.0)),
        (Plan(5, proposal="sampled"), Sampler(0.3)),
        (Plan(4, 2, 8), Sampler(0.0)),
    ]
    for plan, sampler in plans:
        found = [
            drafts_of(target, one, prompts, plan, sampler, max_new_tokens=20) for one in (drafter, first)
        ]
        assert_same_drafts(*found, rtol=SINGLE if "eager" in kind else 0.0)
        single = [
            drafts_of(target, one, prompts[:1], plan, sampler, max_new_tokens=20) for one in (drafter, first)
        ]
        assert_same_drafts(*single, rtol=SINGLE if "eager" in kind else 0.0)
    assert any(kept)


@pytest.mark.parametrize(
    "order", list(itertools.permutations([CHAIN, SAMPLED, TREE])), ids=lambda o: o[0].name
)
@pytest.mark.parametrize("trees", [True, False], ids=["trees", "chains"])
def test_plans_may_take_turns(tiny_target, make_drafter, order, trees, kept):
    """A guess that was read for one draft is no guess of the next where its slot was taken."""
    target = tiny_target(vocab=V, layers=4, hidden=16)
    drafter = Cascade(make_drafter("lm", target), Ngram(1, 3), trees=trees)
    texts = torch.tensor([[5, 1, 2, 3, 9, 1, 2, 4] * 4, [5, 1, 2, 3, 9, 1, 2, 3] * 4])
    ours, alone = Follower(drafter, target, texts), Follower(drafter.first, target, texts)
    for counts in [(9, 12), (3, 1), (1, 4), (2, 2), (1, 1)]:
        for follower in (ours, alone):
            follower.advance(counts)
        for plan in (*order, *order[::-1]):
            assert_same_draft(ours.propose(plan), alone.propose(plan))
    assert any(kept)


class Oracle(Ngram):
    """Knows what a draft model will choose, and says otherwise from the n-th token on."""

    def __init__(self, first: DraftLM, right: int) -> None:
        super().__init__(1, 1)
        self.model, self.right, self.size = [first.model], right, first.model.config.vocab_size

    @torch.no_grad()
    def nodes(self, history, plan):
        text, found = list(history.tokens), []
        for place in range(plan.depth):
            token = int(self.model[0](input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax())
            text.append(token if place < self.right else (token + 1) % self.size)
            found.append(Node(text[-1], place - 1))
        return found


@pytest.mark.parametrize(("right", "more"), [(99, 0), (0, DEPTH - 1), (1, 2), (2, 1)])
def test_a_pass_gives_one_token_more_than_it_had_right_guesses(target, make_drafter, passes, right, more):
    """Passes below the root, after the one over the settled tokens; alone they are one less than tokens."""
    drafter = cascade(make_drafter, target)
    drafter.second = Oracle(drafter.first, right)
    options = {"plan": Plan(DEPTH), "sampler": Sampler(0.0), "max_new_tokens": 30}
    rounds = len(generate(target, drafter, PROMPTS[:1], **options).outputs[0].emitted)
    first = {99: 1, 0: DEPTH - 1, 1: 3, 2: 2}[right]  # of the first round, whose root is read with the prompt
    assert passes.count("unread") == rounds
    assert below_the_root(passes) == first + more * (rounds - 1)
    passes.clear()
    assert len(generate(target, drafter.first, PROMPTS[:1], **options).outputs[0].emitted) == rounds
    assert below_the_root(passes) == (DEPTH - 1) * rounds


def test_in_a_batch_every_row_keeps_its_own_guesses(target, make_drafter, passes):
    """A pass is spared where the guesses of all rows were right."""
    drafter = cascade(make_drafter, target)
    drafter.second = Oracle(drafter.first, 99)
    options = {"plan": Plan(DEPTH), "sampler": Sampler(0.0), "max_new_tokens": 20}
    generate(target, drafter, PROMPTS, **options)
    assert below_the_root(passes) == 1


class TreeOracle(Ngram):
    """Knows the best `width` tokens below every node, and names wrong ones below the first `right` levels."""

    def __init__(self, first: DraftLM, width: int, right: int) -> None:
        super().__init__(1, 1)
        self.model, self.width, self.right = [first.model], width, right

    @torch.no_grad()
    def nodes(self, history, plan):
        found, level = [], [(-1, list(history.tokens))]
        for depth in range(plan.depth):
            grown = []
            for parent, text in level:
                logits = self.model[0](input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
                order = logits.sort(descending=depth < self.right, stable=True).indices
                for token in order[: self.width].tolist():
                    grown.append((len(found), [*text, token]))
                    found.append(Node(token, parent))
            level = grown
        return found


@pytest.mark.parametrize(("right", "more"), [(99, 0), (0, 2), (1, 1)])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_level_of_a_tree_is_read_ahead_where_all_its_nodes_were_guessed(
    target, make_drafter, passes, right, more, rows
):
    """Passes below the root: alone one less than levels. The root of the first round has no guesses."""
    plan = Plan(3, 2, 6)
    drafter = cascade(make_drafter, target, second_length=99)
    drafter.second = TreeOracle(drafter.first, 2, right)
    options = {"plan": plan, "sampler": Sampler(0.0), "max_new_tokens": 16}
    rounds = max(len(o.emitted) for o in generate(target, drafter, PROMPTS[:rows], **options).outputs)
    assert passes.count("unread") == rounds
    first = {99: 1, 0: 2, 1: 1}[right]
    assert below_the_root(passes) == first + more * (rounds - 1)
    passes.clear()
    generate(target, drafter.first, PROMPTS[:rows], **options)
    assert below_the_root(passes) == 2 * rounds


def test_fewer_passes_read_the_trees_of_a_text_that_repeats_itself(target, make_drafter, passes):
    """By what is looked up in the text."""
    drafter, plan = cascade(make_drafter, target, "suffix", second_length=99), Plan(4, 2, 8)
    counts = []
    for one in (drafter, drafter.first):
        passes.clear()
        generate(target, one, [[1, 2, 3] * 6], plan=plan, sampler=Sampler(0.0), max_new_tokens=40)
        counts.append((passes.count("unread"), below_the_root(passes)))
    (rounds, ours), (same, alone) = counts
    assert rounds == same
    assert alone == 3 * rounds
    assert ours < alone


def test_nodes_that_were_drafted_are_not_kept(tiny_target, make_drafter):
    """The draft model's cache has the settled tokens and the root, whatever was read below it."""
    target = tiny_target(vocab=V, layers=4, hidden=16)
    drafter = Cascade(make_drafter("lm", target), Ngram(1, 3), trees=True)
    follower = Follower(drafter, target, torch.tensor([[5, 1, 2, 3, 9, 1, 2, 4] * 4] * 2))
    for counts in [(9, 12), (3, 1), (1, 4)]:
        follower.advance(counts)
        follower.propose(TREE)
        assert list(follower.state.first.lm.lengths) == [settled + 1 for settled in follower.settled]


@pytest.mark.parametrize(
    ("plan", "sampler"),
    [(CHAIN, Sampler(0.0)), (SAMPLED, Sampler(1.0)), (SAMPLED, Sampler(0.7, top_p=0.9))],
    ids=str,
)
def test_the_target_as_its_own_drafter_is_accepted_whole(tmp_path, plan, sampler):
    folder = str(make_target(tmp_path / "target"))
    target = load_target(folder, "float64")
    drafter = Cascade(DraftLM.for_target(target, path=folder, train=False), Ngram(1, 3)).to(target.dtype)
    prompts = [[7, 8, 9, 10, 11], [12], [20, 30, 40]]
    run = generate(target, drafter, prompts, max_new_tokens=1 + 6 * (K + 1), sampler=sampler, plan=plan)
    assert [output.emitted for output in run.outputs] == [[K + 1] * 6] * 3


# -- horizontal: the lookup's tokens behind those of the draft model ---------------------------------


@pytest.mark.parametrize("plan", [CHAIN, SAMPLED], ids=lambda p: p.name)
@pytest.mark.parametrize("depth", [1, 2, 9])
def test_later_tokens_are_the_seconds_and_so_is_their_q(tiny_target, make_drafter, plan, depth):
    target = tiny_target(vocab=V, layers=4, hidden=16)
    drafter = Cascade(make_drafter("lm", target), Ngram(1, 3), first_depth=depth)
    texts, own = torch.tensor([[5, 1, 2, 3, 9, 1, 2, 4] * 3, list(range(24))]), min(depth, K)
    follower, alone = (
        Follower(drafter, target, texts, (9, 12)),
        Follower(drafter.first, target, texts, (9, 12)),
    )
    draft, firsts = follower.propose(plan), alone.propose(plan)
    assert torch.equal(draft.tokens[:, :own], firsts.tokens[:, :own])
    for history, tokens in zip(follower.state.second, draft.tokens.tolist(), strict=True):
        history.extend(tokens[:own])
        more = [node.token for node in drafter.second.nodes(history, Plan(K - own))]
        history.retract(own)
        assert tokens[own:] == [*more, *[PAD] * (len(tokens) - own - len(more))]
    if plan.proposal == "sampled":
        torch.testing.assert_close(draft.q[:, :own], firsts.q[:, :own], rtol=0, atol=ROUNDING)
        later, q = draft.tokens[:, own:], draft.q[:, own:]
        assert q.gather(-1, later.clamp_min(0)[..., None])[..., 0][later != PAD].eq(1).all()
        assert q.sum(-1).eq(1).all()
        assert (later != PAD).any() or own == K


@pytest.mark.parametrize("sampler", [Sampler(0.0), Sampler(0.8)], ids=str)
@pytest.mark.parametrize("plan", [Plan(DEPTH), Plan(4, 3, 9)], ids=lambda p: p.name)
def test_replay_is_what_the_decoder_does(target, make_drafter, sampler, plan):
    drafter = cascade(make_drafter, target, first_depth=2)
    dice = random.Random(3)
    prompts = [[dice.randrange(5) for _ in range(dice.randint(2, 7))] for _ in range(6)]
    options = {"max_new_tokens": 14, "sampler": sampler, "seed": 2}
    plain = generate(target, None, prompts, **options).outputs
    outputs = generate(target, drafter, prompts, plan=plan, **options).outputs
    assert [output.tokens for output in outputs] == [output.tokens for output in plain]
    rollouts = [Rollout(prompt, output.tokens) for prompt, output in zip(prompts, plain, strict=True)]
    (one,) = replay(target, drafter, rollouts, [plan], sampler)
    assert one.counts.rounds == [len(output.emitted) for output in outputs]


# -- the text is the target's -------------------------------------------------------------------------

DRAWN2 = Plan(2, proposal="sampled")
ENUMERATED = {  # one row at a time, so that its guesses alone decide which passes are made
    "fixed": (Plan(3), {}),
    "fixed, one guess": (Plan(3), {"second_length": 1}),
    "fixed, horizontal": (Plan(3), {"first_depth": 2}),
    "token": (DRAWN2, {}),
    "block": (Plan(2, proposal="sampled", rule="block"), {}),
    "match": (Plan(2, proposal="sampled", rule="match"), {}),
    "token, horizontal": (DRAWN2, {"first_depth": 1}),
    "block, horizontal": (Plan(2, proposal="sampled", rule="block"), {"first_depth": 1}),
    "token, confident": (Plan(2, proposal="sampled", min_confidence=0.45), {}),
    "token, confident, horizontal": (Plan(2, proposal="sampled", min_confidence=0.45), {"first_depth": 1}),
}


@pytest.mark.parametrize("sampler", [Sampler(0.0), Sampler(0.7), Sampler(1.0, top_k=2)], ids=str)
@pytest.mark.parametrize("case", ENUMERATED)
@pytest.mark.covering
def test_every_outcome_has_the_targets_probability(tiny_target, make_drafter, kept, case, sampler):
    plan, options = ENUMERATED[case]
    size = 2 if case == "match" else 3  # three tokens, drafted and answered: tens of thousands of outcomes
    target = tiny_target(vocab=size)
    drafter = cascade(make_drafter, target, **options)
    prompts = [[token % size for token in prompt] for prompt in READ]
    check_lossless(target, drafter, plan, sampler, length=4, prompts=prompts[:1], abreast=1)
    check_lossless(target, drafter, plan, sampler, length=3, prompts=prompts, rows=[0])
    if "horizontal" not in case and sampler.temperature:
        assert set(kept) == {True, False}


TREES_ENUMERATED = {
    "fixed": Plan(3, 2, 5),
    "hybrid": Plan(2, 2, 3, proposal="hybrid"),
    "drawn": Plan(tree=((0,), (1,), (0, 0)), proposal="sampled"),
    "drawn, traversal": Plan(tree=((0,), (1,), (0, 0)), proposal="sampled", rule="traversal"),
    "side by side": Plan(2, proposal="sampled", drafts=2),
}


@pytest.mark.parametrize(
    "sampler", [pytest.param(Sampler(0.7), marks=pytest.mark.proof), Sampler(1.0, top_k=2)], ids=str
)
@pytest.mark.parametrize("name", TREES_ENUMERATED)
def test_every_outcome_of_a_tree_has_the_targets_probability(tiny_target, make_drafter, kept, name, sampler):
    """All tokens are guessed for one level, so that passes are saved whatever is drawn, and not all."""
    size = 2 if name == "side by side" else 3
    target = tiny_target(vocab=size)
    drafter = cascade(make_drafter, target)
    drafter.second = Every(size, 1)
    prompts = [[token % size for token in prompt] for prompt in READ]
    plan = TREES_ENUMERATED[name]
    check_lossless(target, drafter, plan, sampler, length=3, prompts=prompts[:1], abreast=1)
    assert set(kept) == {True, False}
    if name == "fixed":
        check_lossless(target, drafter, plan, sampler, length=3, prompts=prompts, rows=[0])


# -- what it is made of --------------------------------------------------------------------------------


def test_drafters_that_make_no_cascade_are_refused(tiny_target, make_drafter, tmp_path):
    target, eagle = both(tiny_target, make_drafter, "eagle")
    first = make_drafter("lm", target)
    with pytest.raises(UserError, match=r"drafter\.first=eagle: .* choose lm or lm_given"):
        Cascade(eagle, Ngram(1, 3))
    with pytest.raises(UserError, match=r"drafter\.second=bigram: choose one that looks tokens up"):
        Cascade(first, make_drafter("bigram", target))
    with pytest.raises(UserError, match=r"made of two drafters; choose one that is not"):
        Cascade(Cascade(first, Ngram(1, 3)), Ngram(1, 3))
    with_lora = DraftLM.for_target(target, path=draft_model(tmp_path / "draft"), lora={"r": 2, "alpha": 4})
    with pytest.raises(UserError, match=r"set drafter\.first\.lora=null"):
        Cascade(with_lora, Ngram(1, 3))
    for name in ("second_length", "first_depth"):
        with pytest.raises(UserError, match=rf"drafter\.{name}=0: must be at least 1, or null"):
            Cascade(first, Ngram(1, 3), **{name: 0})
    own = DraftLM(first.settings["config"], tokenizer_bytes=9)
    with pytest.raises(UserError, match=r"set drafter\.first\.vocabulary=same"):
        Cascade(own, Ngram(1, 3))


def test_what_a_tree_leaves_out_is_said(target, make_drafter):
    for trees, options in itertools.product((True, False), ({}, {"first_depth": 2})):
        drafter = cascade(make_drafter, target, trees=trees, **options)
        for plan in (Plan(3, 2, 5), Plan(2, proposal="sampled", drafts=2)):
            drafter.check(plan)
            remark = optional.remark(drafter, plan)
            assert (f"drafter.second=ngram: adds nothing to {plan.name}" in remark) != trees
            assert (f"drafter.first_depth=2: changes nothing in {plan.name}" in remark) == bool(options)
        assert not optional.remark(drafter, Plan(3)) + optional.remark(drafter, Plan(3, proposal="sampled"))


def test_a_saved_one_comes_back_and_an_engine_is_given_the_first(target, make_drafter, tmp_path):
    drafter = cascade(make_drafter, target, second_length=2, first_depth=3)
    hub.save(drafter.requires_grad_(False), target, tmp_path)
    loaded = hub.load(tmp_path, target)
    assert loaded.settings == drafter.settings
    assert (loaded.second_length, loaded.first_depth, loaded.trees) == (2, 3, True)
    found = [
        drafts_of(target, one, PROMPTS, Plan(5), Sampler(0.0), max_new_tokens=9) for one in (drafter, loaded)
    ]
    assert_same_drafts(*found)
    saved = hub.as_saved(drafter)
    layout, alone = (table.write_layout(one, target, "hf") for one in (saved, hub.as_saved(drafter.first)))
    assert same(layout.tensors, alone.tensors)
    assert "left out: the second drafter of the cascade (ngram)" in layout.note


# -- whole runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(bench):
    """Checkpoint of a draft model, trained by itself."""
    run = train(quick(bench, "drafter.layers=1")).succeeded()
    return run.folder / "checkpoints" / "6"


def test_the_first_is_trained_bit_for_bit_as_alone(bench: Bench, alone):
    run = train(quick(bench, "drafter.first.layers=1", "score.enabled=false", drafter="cascade")).succeeded()
    found = weights(run.folder / "checkpoints" / "6")
    assert same({name.removeprefix("first."): weight for name, weight in found.items()}, weights(alone))


@pytest.mark.parametrize("second", ["ngram", "suffix"])
def test_a_draft_model_that_is_trained_is_sped_up_and_scored(bench: Bench, alone, second):
    more = [f"drafter.first={alone}", f"drafter.second={second}"]
    run = train(quick(bench, *more, drafter="cascade")).succeeded()
    checkpoint = run.folder / "checkpoints" / "0"
    card = json.loads((checkpoint / "score.json").read_text())
    assert card["drafter"] == "cascade"
    assert card["audit_passed"]
    assert card["tau"] == tau(alone)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("drafter.first=eagle", "drafter.first=eagle: the second guesses for a draft model"),
        ("drafter.first=/no/where", "drafter.first=/no/where: no such drafter"),
        ("drafter.first.layer=3", "no such option in drafter.first; did you mean"),
        ("drafter.second=eagle", "drafter.second=eagle: choose one that looks tokens up in text"),
        ("drafter.second_length=0", "drafter.second_length=0: must be at least 1, or null"),
    ],
)
def test_a_wrong_part_is_one_line(bench: Bench, override, said):
    train(quick(bench, "drafter=cascade", override, drafter="cascade")).refused(said)
