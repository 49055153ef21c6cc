"""Counts of what follows n-grams, of rollouts and of datastores; damaged datastores are refused."""

from __future__ import annotations

import json
import os
from collections import Counter

import numpy as np
import pytest
from datastores import store_of
from hypothesis import example, given
from hypothesis import strategies as st

from decode.draft import PAD
from decode.errors import UserError
from drafters.drafting import datastore
from drafters.drafting.datastore import DEPTH, META, ORDER, SAMPLE, TOKENS, Datastore, datastore_folder
from drafters.drafting.ngram_counts import KEPT, Following, NgramCounts, hashes

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=4)
NGRAMS = st.lists(st.integers(0, 3), min_size=1, max_size=DEPTH).map(tuple)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def refused(key, vocab_size=30, match="") -> None:
    with pytest.raises(UserError, match=match) as error:
        Datastore.open(key, vocab_size)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("vocab_size", [30, 70_000])
@given(texts=TEXTS, ngram=NGRAMS, data=st.data())
@pytest.mark.ci("30")
def test_counts_are_those_of_a_search(vocab_size, texts, ngram, data):
    store, n = Datastore.open(store_of(texts, vocab_size), vocab_size), len(ngram)
    if whole := [text for text in texts if len(text) > 1]:  # one that occurs
        text = data.draw(st.sampled_from(whole))
        begin = data.draw(st.integers(0, len(text) - 2))
        ngram = data.draw(st.sampled_from([ngram, tuple(text[begin : begin + n])]))
        n = len(ngram)
    found = Counter(
        text[i + n] for text in texts for i in range(len(text) - n) if tuple(text[i : i + n]) == ngram
    )
    counts = store.next_tokens(ngram)
    assert counts == found or found.total() > SAMPLE / 2  # one at the end of a text takes a place, too
    assert counts.keys() <= found.keys()


def test_of_more_places_a_fixed_number_is_counted_evenly():
    store = Datastore.open(store_of([[1, 2], [1, 3]] * 200), 30)
    assert store.next_tokens((1,)) == {2: SAMPLE // 2, 3: SAMPLE // 2}


def test_unknown_keys_and_other_vocabularies_are_refused():
    refused("0" * 16, match="not on this machine")
    refused("../../etc", match="no key")
    refused(store_of([[1, 2, 3]]), 31, match="vocabulary of 30, not of 31")


HARM = {
    "cut": lambda path, content: path.write_bytes(content[:-4]),
    "changed": lambda path, content: path.write_bytes(bytes([content[0] ^ 1]) + content[1:]),
    "gone": lambda path, content: path.unlink(),
    "a pipe": lambda path, content: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("name", [TOKENS, ORDER])
@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_file_is_refused(name, harm):
    key = store_of([[4, 5, 6, ord(name[0]) % 29, sum(harm.encode()) % 29]])
    path = datastore_folder(key) / name
    HARM[harm](path, path.read_bytes())
    refused(key, match="damaged datastore .*")


def test_a_damaged_description_is_refused():
    key = store_of([[6, 6, 6, 1]])
    path = datastore_folder(key) / META
    meta = json.loads(path.read_text())
    others = [json.dumps(meta | {"vocab_size": size}) for size in (70_000, "x", None, 2**70)]
    for text in ("", "[]", "{}", '{"format": 1, "key": "x"}', '{"format": 2}', "null", *others):
        path.write_text(text)
        refused(key, match="damaged datastore|vocabulary of")


def test_one_under_another_name_is_refused():
    key = store_of([[9, 9, 9]])
    other = "f" * 16
    datastore_folder(key).rename(datastore_folder(other))
    assert json.loads((datastore_folder(other) / META).read_text())["key"] == key
    refused(other, match="damaged datastore")


@pytest.mark.parametrize("name", [META, TOKENS, ORDER])
def test_a_link_to_elsewhere_is_refused(name, tmp_path):
    key = store_of([[3, 1, 4, ord(name[0]) % 29]])
    path = datastore_folder(key) / name
    path.rename(tmp_path / name)
    path.symlink_to(tmp_path / name)
    refused(key, match="a link to a file outside its folder")


@pytest.mark.parametrize("name", [TOKENS, ORDER])
def test_a_file_that_is_cut_off_while_it_is_open_is_one_line(name):
    """Not SIGBUS, of which nobody is told anything."""
    key = store_of([[1, 2, 3] * 5000, [ord(name[0]) % 29]])
    store = Datastore.open(key, 30)
    assert store.next_tokens((1,)) == {2: SAMPLE}
    os.truncate(datastore_folder(key) / name, 100)
    with pytest.raises(UserError, match=f"{name}: truncated while in use"):
        store.next_tokens((2,))


@pytest.mark.parametrize("name", [TOKENS, ORDER])
def test_damage_that_no_sample_sees_gives_tokens_all_the_same(name, monkeypatch):
    """Places behind the end, places in no order, numbers that are no tokens: other drafts, and no more."""
    text = [n % 7 for n in range(999)]
    key, dice = store_of([text, [ord(name[0]) % 29]]), np.random.default_rng(0)
    path = datastore_folder(key) / name
    monkeypatch.setattr(datastore, "sample_hash", lambda path: "")
    meta = json.loads((datastore_folder(key) / META).read_text())
    (datastore_folder(key) / META).write_text(json.dumps(meta | {"samples": {TOKENS: "", ORDER: ""}}))
    for _ in range(20):
        content = bytearray(path.read_bytes())
        for at in dice.integers(0, len(content), 200):
            content[at] = dice.integers(256)
        path.write_bytes(content)
        store = Datastore.open(key, 30)
        for n in range(1, 12):
            for start in range(7):
                counts = store.next_tokens(tuple((start + i) % 7 for i in range(n)))
                assert all(0 <= token < 30 for token in counts)
                assert sum(counts.values()) <= SAMPLE


# -- counts of rollouts ----------------------------------------------------------------------------


ORDERS = (1, 2, 3, 5)

alphabets = st.sampled_from([(0, 1), (0, 1, 2), (7, 255, 256, 70_000, 200_000)])
few = alphabets.flatmap(lambda letters: st.lists(st.lists(st.sampled_from(letters), max_size=12), max_size=6))
many = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3 * KEPT)).map(list), max_size=6 * KEPT)


def counts_of(rollouts) -> NgramCounts:
    return NgramCounts(np.array([t for rollout in rollouts for t in [*rollout, PAD]], np.int32), ORDERS)


def looked_up(counts, ngram) -> Following | None:
    (value,) = hashes(ngram, [len(ngram)])
    return counts.after(len(ngram), value)


def counted(rollouts) -> dict[tuple[int, ...], Counter]:
    """N-gram -> how often tokens followed it."""
    found: dict[tuple[int, ...], Counter] = {}
    for rollout in rollouts:
        for n in ORDERS:
            for end in range(n, len(rollout)):
                found.setdefault(tuple(rollout[end - n : end]), Counter())[rollout[end]] += 1
    return found


@given(few | many)
@example([[0, token] for token in range(1, KEPT + 6)] + [[0, KEPT + 5]])  # more than are kept
@example([[], [1], [1, 2]])
def test_counts_are_those_of_the_texts(rollouts):
    counts = counts_of(rollouts)
    for ngram, followed in counted(rollouts).items():
        found = looked_up(counts, ngram)
        assert found is not None
        assert (found.total, found.distinct) == (followed.total(), len(followed))
        ranked = sorted(followed.items(), key=lambda item: (-item[1], item[0]))[:KEPT]
        assert list(zip(found.tokens, found.counts, strict=True)) == ranked
        assert all(isinstance(number, int) for part in found[:2] for number in part)


@given(few, st.lists(st.sampled_from([PAD, 0, 1, 7, 255]), min_size=1, max_size=5).map(tuple))
@example([[1, 2, 3], [2, 4]], (3,))
@example([[1, 2, 3], [2, 4]], (PAD, 2))
@example([[], [1], []], (1, 1))
def test_an_ngram_that_nothing_followed_is_unknown(rollouts, ngram):
    """At the end of a text, or across two of them, or nowhere."""
    if len(ngram) in ORDERS:
        found = looked_up(counts_of(rollouts), ngram)
        assert (found is None) == (ngram not in counted(rollouts))
