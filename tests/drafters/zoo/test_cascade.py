"""Cascade: a draft model drafts the same with a lookup, in fewer passes; the lookup extends its chains."""

from __future__ import annotations

import itertools

import pytest
import torch
from draft_models import KINDS, draft_model, quick
from drafter_checks import CHAIN, SAMPLED, TREE, Follower, K, V, both
from exact import PROMPTS as READ
from exact import check_lossless
from workbench import same, train, weights

from decode.draft import PAD
from decode.errors import UserError
from decode.generation.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler
from drafters import optional
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats
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


def assert_drafts_of_the_first(target, drafter, prompts, rtol=0.0, **options) -> None:
    """Texts and drafts of every round are those of the draft model."""
    texts, drafts = [], ([], [])
    for one, found in zip((drafter, drafter.first), drafts, strict=True):
        run = generate(target, one, prompts, on_round=lambda r, to=found: to.append(r.draft), **options)
        texts.append([(output.tokens, output.emitted) for output in run.outputs])
    assert texts[0] == texts[1]
    for ours, firsts in zip(*drafts, strict=True):
        assert_same_draft(ours, firsts, rtol)


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
        monkeypatch.setattr(DraftLM, name, lambda *args: found.append(name) or method(*args))

    noted("unread")
    noted("logits")
    return found


def below_the_root(passes: list[str]) -> int:
    """Number of passes over drafted tokens only."""
    return passes.count("logits") - passes.count("unread")


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    ("second", "length"), [("ngram", None), ("suffix", None), ("ngram", 1), ("suffix", 2)]
)
@pytest.mark.covering(pairs=True, rest=False)
def test_chains_are_those_of_the_draft_model(target, make_drafter, kept, second, length, name, sampler):
    drafter = cascade(make_drafter, target, second, second_length=length)
    options = {"plan": PLANS[name], "sampler": sampler, "max_new_tokens": 40, "seed": 3}
    for prompts, stop in ((PROMPTS, [0]), (PROMPTS[:1], []), (PROMPTS[2:], [])):  # rows that leave, and one
        assert_drafts_of_the_first(target, drafter, prompts, stop=stop, **options)
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
@pytest.mark.covering(pairs=True, rest=False)
def test_trees_are_those_of_the_draft_model(target, make_drafter, kept, second, length, name, sampler):
    drafter = cascade(make_drafter, target, "ngram" if second == "every" else second, second_length=length)
    if second == "every":
        drafter.second = Every(target.vocab_size, 2)
    options = {"plan": TREES[name], "sampler": sampler, "max_new_tokens": 30, "seed": 3}
    for prompts, stop in ((PROMPTS, [0]), (PROMPTS[:1], [])):
        assert_drafts_of_the_first(target, drafter, prompts, stop=stop, **options)
    if TREES[name].depth > 1:
        assert set(kept) >= ({True, False} if second == "every" else {False})


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_every_kind_of_model_are_its_own(tiny_target, tmp_path, kept, kind):
    """Windows above all, whose positions follow the slots; and a text past the model's context."""
    target = tiny_target(vocab=V, layers=3, hidden=16)
    size = {"learned positions": "n_positions"}.get(kind, "max_position_embeddings")
    path, rtol = draft_model(tmp_path / "draft", kind, **{size: 24}), SINGLE if "eager" in kind else 0.0
    drafter = Cascade(DraftLM.for_target(target, path=path).double().eval(), Ngram(1, 3), trees=True)
    prompts = [[5, 1, 2, 3, 9, 1, 2, 4] * 2, [7, 8] * 3]
    for plan, temperature in ((Plan(5), 0.0), (Plan(5, proposal="sampled"), 0.3), (Plan(4, 2, 8), 0.0)):
        options = {"plan": plan, "sampler": Sampler(temperature), "max_new_tokens": 20}
        for texts in (prompts, prompts[:1]):
            assert_drafts_of_the_first(target, drafter, texts, rtol, **options)
    assert any(kept)


@pytest.mark.parametrize(
    "order", list(itertools.permutations([CHAIN, SAMPLED, TREE])), ids=lambda o: o[0].name
)
@pytest.mark.parametrize("trees", [True, False], ids=["trees", "chains"])
def test_plans_that_alternate_share_no_guesses(tiny_target, make_drafter, order, trees, kept):
    """A guess that was read for one draft is no guess of the next where its slot was taken."""
    target = tiny_target(vocab=V, layers=4, hidden=16)
    drafter = Cascade(make_drafter("lm", target), Ngram(1, 3), trees=trees)
    texts = torch.tensor([[5, 1, 2, 3, 9, 1, 2, 4] * 4, [5, 1, 2, 3, 9, 1, 2, 3] * 4])
    ours, plain = Follower(drafter, target, texts), Follower(drafter.first, target, texts)
    for counts in [(9, 12), (3, 1), (1, 4), (2, 2), (1, 1)]:
        for follower in (ours, plain):
            follower.advance(counts)
        for plan in (*order, *order[::-1]):
            assert_same_draft(ours.propose(plan), plain.propose(plan))
    assert any(kept)


class Oracle(Ngram):
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


@pytest.mark.parametrize(
    ("plan", "right", "first", "later"),
    [
        *[(Plan(DEPTH), *case) for case in [(99, 1, 0), (0, DEPTH - 1, DEPTH - 1), (1, 3, 2), (2, 2, 1)]],
        *[(Plan(3, 2, 6), *case) for case in [(99, 1, 0), (0, 2, 2), (1, 1, 1)]],
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.covering(pairs=True)
def test_right_guesses_save_passes(target, make_drafter, passes, plan, right, first, later, rows):
    """Passes below the root, in the first round, whose root has no guesses, and in each later one."""
    drafter = cascade(make_drafter, target, second_length=99)
    drafter.second = Oracle(drafter.first, plan.width, right)
    options = {"plan": plan, "sampler": Sampler(0.0), "max_new_tokens": 16}
    rounds = max(len(o.emitted) for o in generate(target, drafter, PROMPTS[:rows], **options).outputs)
    assert passes.count("unread") == rounds
    assert below_the_root(passes) == first + later * (rounds - 1)
    passes.clear()
    generate(target, drafter.first, PROMPTS[:rows], **options)
    assert below_the_root(passes) == (plan.depth - 1) * rounds


@pytest.mark.parametrize("plan", [CHAIN, SAMPLED], ids=lambda p: p.name)
@pytest.mark.parametrize("depth", [1, 2, 9])
def test_later_tokens_and_their_q_are_the_seconds(tiny_target, make_drafter, plan, depth):
    target = tiny_target(vocab=V, layers=4, hidden=16)
    drafter = Cascade(make_drafter("lm", target), Ngram(1, 3), first_depth=depth)
    texts, own = torch.tensor([[5, 1, 2, 3, 9, 1, 2, 4] * 3, list(range(24))]), min(depth, K)
    follower = Follower(drafter, target, texts, (9, 12))
    draft, firsts = follower.propose(plan), Follower(drafter.first, target, texts, (9, 12)).propose(plan)
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


ENUMERATED = {  # drafts without `first_depth` are the draft model's, as shown above
    "fixed": Plan(3),
    "token": Plan(2, proposal="sampled"),
    "block": Plan(2, proposal="sampled", rule="block"),
    "token, confident": Plan(2, proposal="sampled", min_confidence=0.45),
}


@pytest.mark.parametrize("sampler", [Sampler(0.0), Sampler(0.7), Sampler(1.0, top_k=2)], ids=str)
@pytest.mark.parametrize("case", ENUMERATED)
@pytest.mark.covering
def test_chains_are_lossless(tiny_target, make_drafter, case, sampler):
    """One row by itself, whose guesses decide which passes are made, and one of a batch."""
    target, plan = tiny_target(), ENUMERATED[case]
    drafter = cascade(make_drafter, target, first_depth=plan.depth - 1)
    check_lossless(target, drafter, plan, sampler, length=4, prompts=READ[:1], abreast=1)
    check_lossless(target, drafter, plan, sampler, length=3, rows=[0])


def test_parts_that_make_no_cascade_are_refused(tiny_target, make_drafter, tmp_path):
    target, eagle = both(tiny_target, make_drafter, "eagle")
    first = make_drafter("lm", target)
    lookup = Ngram(1, 3)
    with_lora = DraftLM.for_target(target, path=draft_model(tmp_path / "draft"), lora={"r": 2, "alpha": 4})
    own_tokenizer = DraftLM(first.settings["config"], tokenizer_bytes=9)
    for one, other, said in [
        (eagle, lookup, r"drafter\.first=eagle: .* choose lm or lm_given"),
        (first, make_drafter("bigram", target), r"drafter\.second=bigram: choose one"),
        (Cascade(first, lookup), lookup, "made of two drafters"),
        (with_lora, lookup, r"set drafter\.first\.lora=null"),
        (own_tokenizer, lookup, r"set drafter\.first\.vocabulary=same"),
    ]:
        with pytest.raises(UserError, match=said):
            Cascade(one, other)


def test_remark_names_what_a_tree_leaves_out(target, make_drafter):
    for trees, options in itertools.product((True, False), ({}, {"first_depth": 2})):
        drafter = cascade(make_drafter, target, trees=trees, **options)
        for plan in (Plan(3, 2, 5), Plan(2, proposal="sampled", drafts=2)):
            drafter.check(plan)
            remark = optional.remark(drafter, plan)
            assert ("drafter.second=ngram" in remark) != trees
            assert ("drafter.first_depth=2" in remark) == bool(options)
        assert not optional.remark(drafter, Plan(3)) + optional.remark(drafter, Plan(3, proposal="sampled"))


def test_export_is_the_firsts(target, make_drafter, tmp_path):
    drafter = cascade(make_drafter, target, second_length=2, first_depth=3)
    checkpoint_io.save(drafter, target, tmp_path)
    loaded = checkpoint_io.load(tmp_path, target)
    assert (loaded.second_length, loaded.first_depth, loaded.trees) == (2, 3, True)
    saved = map(checkpoint_io.as_saved, (loaded, drafter.first))
    whole, first = (formats.write_layout(one, target, "hf") for one in saved)
    assert same(whole.tensors, first.tensors)
    assert "not exported: the second drafter" in whole.note


def test_first_trains_like_a_plain_run(bench):
    plain = train(quick(bench, "drafter.layers=1", "score.enabled=false")).succeeded()
    run = train(quick(bench, "drafter.first.layers=1", "score.enabled=false", drafter="cascade")).succeeded()
    found = weights(run.folder / "checkpoints" / "6")
    firsts = {name.removeprefix("first."): weight for name, weight in found.items()}
    assert same(firsts, weights(plain.folder / "checkpoints" / "6"))
