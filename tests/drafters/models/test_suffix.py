"""The corpus against a matcher that tries everything; what votes, how deep a draft is, what is kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exact import check_lossless
from faces import feed, paths, propose
from hypothesis import given
from hypothesis import strategies as st

from decode.draft import PAD
from decode.errors import UserError
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.base import Text
from drafters.checkpoint import io as hub
from drafters.models import suffix as suffix_module
from drafters.models.suffix import Corpus, Suffix

OPTIONS = {
    "longest": 8,
    "matches": 100,
    "growth": 2.0,
    "factor": 4.0,
    "min_probability": 0.0,
    "max_tokens": 1000,
    "vocab_size": 30,
}


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(vocab=30, dtype=torch.float32)


def fitted(rollouts, **changes) -> Suffix:
    drafter = Suffix(**OPTIONS | changes)
    drafter.fit([Text(tokens, [1] * len(tokens)) for tokens in rollouts])
    return drafter


def drafts(drafter, target, text, plan) -> dict:
    found = paths(propose(drafter, target, feed(drafter, target, [text]), plan), 0)
    found.pop(())
    return found


def joined(rollouts) -> list[int]:
    return [token for rollout in rollouts for token in [*rollout, PAD]]


def corpus(rollouts, length=8) -> Corpus:
    return Corpus(np.array(joined(rollouts), np.int32), length)


def words(tokens) -> bytes:
    return np.array(tokens, ">i4").tobytes()


# -- the corpus against a matcher that tries everything --------------------------------------------

alphabets = st.sampled_from([(0, 1, 2), (3, 255, 256, 70_000)])  # bytes of words must not be mixed up
several = alphabets.flatmap(
    lambda letters: st.tuples(
        st.lists(st.lists(st.sampled_from(letters), max_size=9), max_size=5),
        st.lists(st.sampled_from(letters), min_size=1, max_size=8),
    )
)


def everywhere(flat, pattern) -> list[int]:
    n = len(pattern)
    return [i + n for i in range(len(flat) - n + 1) if flat[i : i + n] == pattern]


@given(several, st.integers(1, 8))
def test_matches_are_all_occurrences_or_as_many_as_were_asked_for(case, limit):
    rollouts, pattern = case
    flat, index = joined(rollouts), corpus(rollouts)
    want = everywhere(flat, pattern)
    assert sorted(index.matches(words(pattern), 1000)) == want
    some = index.matches(words(pattern), limit)
    assert len(some) == len(set(some)) == min(limit, len(want))
    assert set(some) <= set(want)


@given(several)
def test_suffixes_are_in_order(case):
    flat = joined(case[0])
    order = suffix_module._suffix_order(np.array(flat, np.int32), 4)
    keys = [[t % 2**32 for t in flat[i : i + 4]] for i in order]
    assert sorted(order.tolist()) == list(range(len(flat)))
    assert keys == sorted(keys)


@given(several, st.integers(1, 6))
def test_agreement_and_continuation_are_what_the_texts_say(case, length):
    rollouts, pattern = case
    flat, index = joined(rollouts), corpus(rollouts)
    for place in everywhere(flat, pattern[-1:]):
        want = 0
        while want < min(len(pattern), place) and flat[place - 1 - want] == pattern[-1 - want]:
            want += 1
        assert index.agreement(place, words(pattern)) == want
        line = flat[place : place + length]
        assert index.after(place, length) == (line[: line.index(PAD)] if PAD in line else line)


def test_a_sample_is_spread_over_what_follows():
    index = corpus([[1, 2]] * 30 + [[1, 3]] * 10)
    follow = [index.after(place, 1) for place in index.matches(words([1]), 4)]
    assert sorted(follow) == [[2], [2], [2], [3]]


@given(several, st.lists(st.sampled_from([0, 1, 2]), min_size=2, max_size=20), st.sampled_from([2, 8]))
def test_all_occurrences_vote_by_how_much_agrees(case, text, longest):
    """In the row's own text, where a match may overlap the end, and in the corpus."""
    rollouts = [r for r in case[0] if r and max(r) < 3]
    drafter, pools = fitted(rollouts, longest=longest, matches=1000, growth=3.0, factor=8.0), []
    flat, pool = joined(rollouts), []
    for place in range(1, len(text)):
        n = 0
        while n < min(longest, place) and text[place - 1 - n] == text[-1 - n]:
            n += 1
        if n:
            pool.append(([(text[place:] * 9)[i] for i in range(4)], 3.0**n))
    for place in everywhere(flat, text[-1:]):
        n = 0
        while n < min(longest, len(text), place) and flat[place - 1 - n] == text[-1 - n]:
            n += 1
        line = [*flat[place : place + 4], PAD]
        pool.append((line[: line.index(PAD)], 3.0**n))

    class Target:
        device = torch.device("cpu")

    with pytest.MonkeyPatch.context() as patch:
        record = lambda lines, weights, *_: pools.append((lines, weights)) or []  # noqa: E731
        patch.setattr(suffix_module, "heaviest_tree", record)
        propose(drafter, Target, feed(drafter, Target, [text]), Plan(4))
    assert sorted(zip(*pools[0], strict=True)) == sorted(pool)


# -- by hand ---------------------------------------------------------------------------------------


def test_past_rollouts_are_proposed_by_frequency(target):
    drafter = fitted([[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 7], [2, 8]])
    assert list(drafts(drafter, target, [9, 1, 2], Plan(2))) == [(5,), (5, 6)]
    # Shares of 4 + 4 + 4 + 2: below (1, 2) come 5 twice, 3 once; 8 agrees in one token only.
    tree = drafts(drafter, target, [9, 1, 2], Plan(1, 3, 3))
    assert list(tree) == [(5,), (3,), (8,)]


def test_a_longer_agreement_outvotes_more_frequent_ones(target):
    rollouts = [[4, 1, 2, 3]] + [[1, 2, 5]] * 3
    assert next(iter(drafts(fitted(rollouts), target, [4, 1, 2], Plan(1)))) == (5,)  # 8 against 3 * 4
    assert next(iter(drafts(fitted(rollouts, growth=4.0), target, [4, 1, 2], Plan(1)))) == (3,)  # 64, 3 * 16


def test_the_rows_own_text_and_past_rollouts_vote_together(target):
    drafter = fitted([[1, 2, 7]])
    assert set(drafts(drafter, target, [1, 2, 5, 1, 2], Plan(1, 2, 2))) == {(5,), (7,)}
    assert list(drafts(fitted([]), target, [1, 2, 5, 1, 2], Plan(1, 2, 2))) == [(5,)]
    assert not drafts(fitted([]), target, [1, 2, 5], Plan(1, 2, 2))


def test_a_draft_is_as_deep_as_its_match_allows_and_its_probability(target):
    rollouts = [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    for factor, depth in [(1.0, 2), (1.5, 3), (3.0, 6), (0.4, 0)]:
        drafter = fitted(rollouts, factor=factor)
        assert len(drafts(drafter, target, [20, 1, 2], Plan(6))) == depth
    split = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7]]
    for least, depth in [(0.3, 2), (0.5, 1), (0.7, 0)]:
        drafter = fitted(split, min_probability=least)
        assert len(drafts(drafter, target, [20, 1, 2], Plan(2))) == depth


def test_no_draft_runs_from_one_rollout_into_the_next(target):
    drafter = fitted([[1, 2], [3, 4]])
    assert not drafts(drafter, target, [9, 2], Plan(3))
    assert list(drafts(drafter, target, [9, 3], Plan(3))) == [(4,)]
    assert not drafts(drafter, target, [2, 9], Plan(3))  # 2, 9 is nowhere, and 9 neither


# -- what is kept ----------------------------------------------------------------------------------


def test_answers_and_a_little_before_them_are_kept_the_newest_first():
    drafter = Suffix(**OPTIONS | {"longest": 2, "max_tokens": 11})
    texts = [
        Text([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 1]),
        Text([7, 7], [0, 0]),  # nothing in it is the target's
        Text([10, 11, 12, 13, 14, 15], [0, 0, 0, 1, 1, 0]),
        Text([20, 21, 22], [1, 1, 1]),
    ]
    said = drafter.fit(iter(texts))
    assert drafter.corpus.tolist() == [11, 12, 13, 14, 15, PAD, 20, 21, 22, PAD]
    assert said.startswith("the newest 2 of 3 rollouts kept, 10 of 15 tokens (at most 11)")
    assert drafter.settings["size"] == 10


def test_nothing_kept_is_a_drafter_too(target, tmp_path):
    drafter = fitted([[1, 2, 3]], max_tokens=0)
    assert drafter.corpus.numel() == 0
    hub.save(drafter, target, tmp_path)
    loaded = hub.load(tmp_path, target)
    assert list(drafts(loaded, target, [4, 5, 4], Plan(2))) == [(5,), (5, 4)]


def test_fitting_again_forgets_what_was_before(target):
    drafter = fitted([[1, 2]])
    assert drafts(drafter, target, [9, 1], Plan(1))
    drafter.fit([Text([3, 4, 5], [1, 1, 1])])
    assert not drafts(drafter, target, [9, 1], Plan(1))
    assert list(drafts(drafter, target, [9, 3], Plan(1))) == [(4,)]


@pytest.mark.parametrize("token", [30, 2**31 - 1, -2])
def test_a_corpus_of_what_is_no_token_is_refused(target, tmp_path, token):
    drafter = fitted([[1, 2, 3]])
    drafter.corpus[1] = token
    hub.save(drafter, target, tmp_path)
    with pytest.raises(UserError, match="invalid token ids"):
        hub.load(tmp_path, target).new_state(1)


@pytest.mark.parametrize("name", ["longest", "matches", "growth", "factor", "min_probability", "max_tokens"])
def test_an_option_out_of_range_is_refused(name):
    with pytest.raises(UserError, match=rf"drafter\.{name}=-1: must be at least"):
        Suffix(**OPTIONS | {name: -1})


# -- work and law ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2_000, 60_000])
def test_the_work_of_a_round_is_bounded_whatever_the_texts_length(target, monkeypatch, size):
    """Every place is compared with the newest tokens; their number is the option's, not the text's."""
    drafter = fitted([[1, 2] * (size // 8)], matches=16, max_tokens=size)
    compared = []
    for kind in (Corpus, suffix_module.IndexedText):
        agreement = kind.agreement
        monkeypatch.setattr(
            kind,
            "agreement",
            lambda self, *place, agreement=agreement: compared.append(place) or agreement(self, *place),
        )
    state = feed(drafter, target, [[1, 2] * (size // 8)])
    compared.clear()
    propose(drafter, target, state, Plan(4))
    assert len(compared) == 2 * 16


@pytest.mark.parametrize("plan", [Plan(3), Plan(2, 2, 5)], ids=lambda p: p.name)
def test_what_it_drafts_is_verified_losslessly(tiny_target, plan):
    drafter = fitted([[0, 1, 2, 0, 0, 1], [2, 1, 1, 0]], vocab_size=3)
    check_lossless(tiny_target(), drafter, plan, Sampler(0.7))
