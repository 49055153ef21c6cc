"""Captured verification of drafts that are made without a graph: texts and drafts are the uncaptured ones."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from captured import CHAIN, DYNAMIC, PROMPTS, SAMPLED, VOCAB, Until, assert_same, decoded, small

from decode.depth_policy import DepthPolicy
from decode.draft import Draft
from decode.errors import UserError
from decode.generation.capture import padding, rows, verified_rows
from decode.generation.capture.makers import FORMS, Captured, Stage, captures_of
from decode.generation.capture.verification import FixedVerification
from decode.generation.generate import generate, stream
from decode.lossy.rules.typical import Typical
from decode.plan import Plan
from decode.sampling import Sampler
from decode.transfer import HostReadError, on_device_only

OUTSIDE = "verification is captured, drafting is not: "
PACE = DepthPolicy(0.6, ((1, (1.0, 1.3, 1.5, 1.65)), (4, (1.0, 1.3, 1.5, 1.65))))
TYPICAL = Plan(3, rule="typical", lossy=True)


@pytest.fixture
def target(tiny_target):
    return small(tiny_target)


@pytest.fixture
def ngram(make_drafter, target):
    """Drafts in most rounds, but not in all."""
    return make_drafter("ngram", target, min_n=1)


# -- the same texts and drafts ---------------------------------------------------------------------

ADAPTIVE = {
    "fixed": Plan(3, adapt=PACE),
    "sampled": Plan(3, proposal="sampled", adapt=PACE),
    "block": Plan(3, proposal="sampled", rule="block", adapt=PACE),
    "match": Plan(3, proposal="sampled", rule="match", adapt=PACE),
}


@pytest.mark.parametrize("plan", list(ADAPTIVE.values()), ids=list(ADAPTIVE))
@pytest.mark.ci("block")
def test_adaptive_lengths_are_the_same(target, make_drafter, plan, capsys):
    drafter = make_drafter("eagle", target)
    assert_same(target, drafter, plan, 1.0)
    assert capsys.readouterr().err == f"{OUTSIDE}Eagle drafts lengths that decode.adapt chooses on the host\n"
    lengths = {n for row in decoded(target, drafter, plan, 1.0, True, 3) for n in row[2]}
    assert lengths == {0, 1, 2, 3}


@pytest.mark.parametrize("options", [{}, {"warp": {"repetition_penalty": 1.3}}], ids=["plain", "penalty"])
@pytest.mark.parametrize("plan", [TYPICAL, Plan(3, adapt=PACE), DYNAMIC], ids=["lossy", "adaptive", "tree"])
@pytest.mark.ci("lossy-plain", "tree-penalty")
def test_rounds_without_a_draft_are_the_same(target, ngram, plan, options):
    """A lossy rule draws other random numbers where nothing is drafted."""
    assert_same(target, ngram, plan, 1.0, **options)
    lengths = [n for row in decoded(target, ngram, plan, 1.0, True, 1) for n in row[2]]
    assert 0 < lengths.count(0) < len(lengths)
    # One of two forms has no nodes.
    assert {len(made.rounds) for made in captures_of(target)._rounds.values()} in ({2}, {1, 2})


CONFIDENT = Plan(3, proposal="sampled", min_confidence=0.3)
VARIANTS = {
    "cascade, ends early": ("cascade", {}, CONFIDENT),
    "cascade, two drafters": ("cascade", {"first_depth": 2}, SAMPLED),
    "union, both in every round": ("union", {"second_alone": None, "first_depth": None}, DYNAMIC),
    "hf_dllm, cached prefix": ("hf_dllm", {"prefix": "causal"}, SAMPLED),
}


@pytest.mark.parametrize(("name", "options", "plan"), list(VARIANTS.values()), ids=list(VARIANTS))
@pytest.mark.ci("union, both in every round")
def test_other_drafts_on_the_host_are_the_same(target, make_drafter, name, options, plan, capsys):
    drafter = make_drafter(name, target, **options)
    assert_same(target, drafter, plan, 1.0)
    assert OUTSIDE in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["logit_sum", "tree_merge", "immediate"])
@pytest.mark.ci("tree_merge")
def test_drafts_with_a_memory_are_the_same(target, make_drafter, mode, capsys):
    reuse = {"mode": mode, "nodes": 2, "weight": 0.5, "least": 1, "tokens": 0.0, "drawn": True}
    drafter = make_drafter("lyanna", target, reuse=reuse)
    assert_same(target, drafter, Plan(3, 3, 7, "hybrid"), 1.0)
    assert f"{OUTSIDE}Lyanna has a state with parts that begin later" in capsys.readouterr().err


def test_texts_are_the_uncaptured_ones_to_their_ends(target, ngram):
    plain = decoded(target, ngram, DYNAMIC, 1.0, False, 3, until=Until)
    assert decoded(target, ngram, DYNAMIC, 1.0, True, 3, until=Until) == plain


def test_two_streams_of_one_target_do_not_mix(target, ngram):
    target.capture = True

    def pieces(prompt):
        return stream(target, ngram, prompt, max_new_tokens=20, sampler=Sampler(0.0), plan=CHAIN)

    first = pieces(PROMPTS[0])
    for _ in range(3):
        next(first)
    list(pieces(PROMPTS[1]))
    with pytest.raises(UserError, match="started another text"):
        list(first)


def test_plain_decoding_beside_it_is_captured_whole(target, ngram):
    for drafter in (ngram, None, ngram):
        assert_same(target, drafter, CHAIN, 1.0)
    assert {None in made.rounds for made in captures_of(target)._rounds.values()} == {True, False}


def test_timed_rounds_are_split(target, ngram):
    ticks, target.capture = itertools.count(), True
    options = {"sampler": Sampler(0.0), "plan": CHAIN, "max_new_tokens": 12, "clock": lambda: next(ticks)}
    times = generate(target, ngram, PROMPTS[:1], **options).times
    # Each lasts a tick: drafting, verification, reading its table, telling the drafter.
    assert times.draft == 3 * times.verify > 0


# -- what is said, and what is refused -------------------------------------------------------------


def test_a_drafter_that_asks_the_host_within_a_round_is_named(target, make_drafter, capsys, monkeypatch):
    drafter = make_drafter("eagle", target)
    propose = type(drafter).propose

    def reads(*given):
        if on_device_only():
            raise HostReadError("x")
        return propose(*given)

    monkeypatch.setattr(type(drafter), "propose", reads)
    assert_same(target, drafter, CHAIN, 0.0)
    assert f"{OUTSIDE}Eagle reads the device in" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["skip", "prompt"])
def test_drafts_from_the_cache_are_captured_whole_or_not_at_all(target, make_drafter, name, capsys):
    drafter = make_drafter(name, target)
    assert_same(drafter.verifier(target), drafter, Plan(3, adapt=PACE), 0.0)
    said = f"{type(drafter).__name__} drafts lengths that decode.adapt chooses on the host"
    expected = f"decoding is not captured: {said}, and drafts from the target's cache\n"
    assert capsys.readouterr().err == expected


def test_a_reason_is_found_once(target, make_drafter, monkeypatch):
    made, drafter = [], make_drafter("recycle", target)
    fixed = rows.FixedRound
    monkeypatch.setattr(rows, "FixedRound", lambda *given: made.append(fixed) or fixed(*given))
    for _ in range(2):
        decoded(target, drafter, CHAIN, 0.0, True, 1)
    assert len(made) == 1
    assert captures_of(target)._rounds


@pytest.mark.parametrize("reads_all", [True, False])
def test_a_rule_that_reads_the_host_is_not_captured(target, ngram, reads_all, capsys, monkeypatch):
    plain, prompts = Typical.verify, [[7] * 12, [1, 2]]  # after the second nothing is drafted at first

    def reads(self, draft, *given):
        if reads_all or draft.probs is not None:
            assert draft.tokens.sum().item() is not None
        return plain(self, draft, *given)

    monkeypatch.setattr(Typical, "verify", reads)
    assert_same(target, ngram, TYPICAL, 1.0, prompts=prompts)
    said = capsys.readouterr().err
    if reads_all:
        assert "decoding is not captured: verification reads the device" in said
        return
    assert OUTSIDE in said
    drawn = Draft.chain(torch.full((1, 3), 7), torch.full((1, 3, VOCAB), 1 / VOCAB))
    monkeypatch.setattr(type(ngram), "propose", lambda *_: drawn)
    with pytest.raises(UserError, match=r"verification reads the device .*: set target\.capture=false"):
        decoded(target, ngram, TYPICAL, 1.0, True, 1)


@pytest.mark.parametrize("nodes", [4, 5])
def test_drafts_larger_than_their_plan_are_refused(target, ngram, monkeypatch, nodes):
    drafted = Draft.chain(target.head.weight.new_zeros(1, nodes).long())
    monkeypatch.setattr(type(ngram), "propose", lambda *_: drafted)
    with pytest.raises(
        UserError, match=f"a draft has {nodes} nodes and {nodes} levels, but the plan 3 and 3"
    ):
        decoded(target, ngram, CHAIN, 0.0, True, 1)


def test_forms_of_drafts_are_bounded_in_number():
    fixed = SimpleNamespace(verify=None, buffers=[], given=[])
    captured = Captured(SimpleNamespace(), lambda function, arguments: Stage(lambda: None, []))
    made = [captured.round(number, lambda: fixed) for number in (*range(FORMS), 0)]
    assert made[0] is made[-1]
    with pytest.raises(UserError, match="more than 8 forms"):
        captured.round(FORMS, lambda: fixed)


# -- seeded bugs: each must show in texts or accepted tokens ----------------------------------------


def stale_draft(monkeypatch):
    """A draft stays in its buffers until another has other shapes."""
    tensors_of, kept = verified_rows.tensors_of, {}

    def stale(draft):
        return kept.setdefault(draft.tokens.shape, tensors_of(draft))

    monkeypatch.setattr(verified_rows, "tensors_of", stale)


def padding_is_a_token(monkeypatch):
    """A missing node has a token, which may be the target's."""
    monkeypatch.setattr(padding, "PAD", 7)


def other_places(monkeypatch):
    """Drafts and settled tokens are those of another row."""
    index = rows.CapturedRows.index.fget
    monkeypatch.setattr(rows.CapturedRows, "index", property(lambda self: index(self).flip(0)))


def stale_draws(monkeypatch):
    """The draws of the first round stay in their buffer."""
    feed, fed = FixedVerification.feed, set()

    def once(self, coin):
        if id(self) not in fed:
            fed.add(id(self))
            feed(self, coin)

    monkeypatch.setattr(FixedVerification, "feed", once)


def end_without_select(monkeypatch):
    """The drafter keeps the state of the first rows, whichever have ended."""
    select = verified_rows.RowInts
    monkeypatch.setattr(verified_rows, "RowInts", lambda rows: select(range(len(rows))))


def nothing_is_padded(monkeypatch):
    """A round without a draft is verified as one whose nodes are all missing."""
    padded, missing = verified_rows.padded, verified_rows.missing_nodes

    def always(draft, plan):
        return padded(draft, plan) if draft.depth else missing(plan, *draft.tokens.shape[:1], "cpu")

    monkeypatch.setattr(verified_rows, "padded", always)


BUGS = [stale_draft, padding_is_a_token, other_places, stale_draws, end_without_select, nothing_is_padded]


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.ci("stale_draft")
def test_seeded_bug_shows(bug, target, ngram, monkeypatch):
    def all_of(capture):
        return [decoded(target, ngram, plan, t, capture, 2) for plan, t in ((TYPICAL, 1.0), (DYNAMIC, 0.0))]

    plain = all_of(False)
    bug(monkeypatch)
    assert all_of(True) != plain
    assert captures_of(target)._rounds
