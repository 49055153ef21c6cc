"""Suffix: estimates against their formula written out, the trees they make, what is kept, datastores."""

from __future__ import annotations

import json
from collections import Counter
from math import prod

import pytest
import torch
from datastores import store_of
from faces import feed, paths, propose
from hypothesis import assume, given
from hypothesis import strategies as st

from decode.draft import PAD
from decode.errors import UserError
from decode.plan import Plan
from drafters.base import Text
from drafters.checkpoint import io as checkpoint_io
from drafters.drafting.ngram_counts import KEPT, NgramCounts
from drafters.families.lookup import IndexedText
from drafters.models.suffix import NEGLIGIBLE, OCCURRENCES, Suffix
from drafters.models.union import Union

OPTIONS = {
    "longest": 8,
    "own_weight": 1000.0,
    "escape": 4.0,
    "min_probability": 0.0,
    "max_tokens": 100_000,
    "vocab_size": 30,
}
EVERYTHING = 30  # tokens, so that none is cut off


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(vocab=30, dtype=torch.float32)


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    """Where datastores are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def fitted(rollouts, store=(), **changes) -> Suffix:
    """A drafter of these rollouts and, if there are texts for it, a datastore."""
    if store:
        size = changes.get("vocab_size", OPTIONS["vocab_size"])
        changes |= {"store": "texts", "store_key": store_of(store, size)}
    drafter = Suffix(**OPTIONS | changes)
    drafter.fit([Text(tokens, [1] * len(tokens)) for tokens in rollouts])
    return drafter


def history_of(drafter, text) -> IndexedText:
    (history,) = drafter.new_state(1)
    history.extend(text)
    return history


def drafts(drafter, target, text, plan) -> dict:
    found = paths(propose(drafter, target, feed(drafter, target, [text]), plan), 0)
    found.pop(())
    return found


# -- against the formula ---------------------------------------------------------------------------

small, wide = st.integers(0, 2), st.integers(0, 29)  # of the wide ones, more than KEPT may follow a token
several = st.one_of(
    st.lists(st.lists(small, max_size=9), max_size=6),
    st.lists(st.tuples(small, wide).map(list), min_size=KEPT, max_size=3 * KEPT),
)
texts = st.lists(small, min_size=1, max_size=3 * OCCURRENCES)
drafted = st.lists(small, max_size=4).map(tuple)
settings = st.fixed_dictionaries(
    {
        "longest": st.sampled_from([1, 3, 8]),
        "own_weight": st.sampled_from([0.0, 0.3, 1.0, 1000.0]),
        "escape": st.sampled_from([0.0, 1.0, 4.0]),
    }
)


def followers(text, ngram) -> list[int]:
    """Tokens after the occurrences of an n-gram, the end of the text as PAD."""
    n = len(ngram)
    return [[*text, PAD][i] for i in range(n, len(text) + 1) if tuple(text[i - n : i]) == ngram]


def formula(
    rollouts, text, path, longest, own_weight, escape, store=(), store_weight=0.0
) -> dict[int, float]:
    """p_n(t) = (w c + c' + E p_m(t)) / (w N + N' + E), E = w D + escape D', as its docstring has it."""

    def p(lengths, left) -> dict[int, float]:
        assume(abs(left - NEGLIGIBLE) > 1e-9)  # where rounding decides
        if not lengths or left < NEGLIGIBLE:
            return {}
        ngram = (*text, *path)[-lengths[0] :]
        own = Counter(t for t in followers(text, ngram)[-OCCURRENCES:] if t != PAD and own_weight)
        past = Counter(t for rollout in rollouts for t in followers(rollout, ngram) if t != PAD)
        stored = Counter(t for other in store for t in followers(other, ngram) if t != PAD and store_weight)
        total = own_weight * own.total() + past.total() + store_weight * stored.total()
        if not total:
            return p(lengths[1:], left)
        rest = own_weight * len(own) + escape * (len(past) + store_weight * len(stored))
        shorter = p(lengths[1:], left * rest / (total + rest))
        listed = dict(sorted(past.items(), key=lambda pair: (-pair[1], pair[0]))[:KEPT])
        return {
            t: (own_weight * own[t] + listed.get(t, 0) + store_weight * stored[t] + rest * shorter.get(t, 0))
            / (total + rest)
            for t in {*own, *listed, *stored, *shorter}
        }

    size = len(text) + len(path)
    return p([n for n in (8, 4, 2, 1) if n <= min(longest, size)], 1.0)


@given(several, texts, drafted, settings)
def test_estimates_are_those_of_the_formula(rollouts, text, path, options):
    drafter = fitted(rollouts, **options)
    want = formula(rollouts, text, path, **options)
    history = history_of(drafter, text)
    found = drafter.next_tokens(history, path, EVERYTHING)
    assert dict(found) == pytest.approx(want, abs=1e-9)
    assert len(dict(found)) == len(found)
    assert [p for _, p in found] == sorted((p for _, p in found), reverse=True)
    assert sum(p for _, p in found) <= 1 + 1e-9
    assert drafter.next_tokens(history, path, 2) == found[:2]
    assert history.tokens == text


stored_texts = st.lists(st.lists(small, min_size=1, max_size=9), min_size=1, max_size=4)


@given(several, texts, drafted, settings, stored_texts, st.sampled_from([0.0, 0.3, 1.0]))
def test_datastore_counts_with_the_rollouts(rollouts, text, path, options, store, weight):
    options = options | {"store": store, "store_weight": weight}
    drafter = fitted(rollouts, **options)
    found = drafter.next_tokens(history_of(drafter, text), path, EVERYTHING)
    assert dict(found) == pytest.approx(formula(rollouts, text, path, **options), abs=1e-9)


@given(
    several,
    texts,
    settings,
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 8)),
    st.sampled_from([0.0, 0.02, 0.3]),
)
def test_chance_of_a_node_is_the_product_along_its_path(rollouts, text, options, shape, floor):
    drafter, (depth, width, more) = fitted(rollouts, min_probability=floor, **options), shape
    plan, history = Plan(depth, width, depth + more), history_of(drafter, text)
    nodes = drafter.nodes(history, plan)
    lines: list[tuple[int, ...]] = []
    for i, (token, parent, chance) in enumerate(nodes):
        assert -1 <= parent < i  # parents precede children
        lines.append((*(lines[parent] if parent >= 0 else ()), token))
        steps = [
            dict(drafter.next_tokens(history, lines[-1][:n], width))[lines[-1][n]]
            for n in range(len(lines[-1]))
        ]
        assert chance == pytest.approx(prod(steps), abs=1e-12)
        assert floor <= chance <= (nodes[parent].chance if parent >= 0 else 1) + 1e-12
    assert len(set(lines)) == len(lines) <= plan.nodes
    assert all(len(line) <= depth for line in lines)
    assert max(Counter(node.parent for node in nodes).values(), default=0) <= width
    chances = [node.chance for node in nodes]
    assert chances == sorted(chances, reverse=True)
    if len(nodes) < plan.nodes:  # then nothing above the floor was left out
        for path in [line for line in [(), *lines] if len(line) < depth]:
            above = nodes[lines.index(path)].chance if path else 1.0
            for token, share in drafter.next_tokens(history, path, width):
                assert (*path, token) in lines or above * share < floor or not share


# -- by hand ---------------------------------------------------------------------------------------


def test_estimate_worked_out_by_hand():
    drafter = fitted([[2, 3], [2, 3], [2, 4]], longest=1, own_weight=10.0)
    # w N = 10 and w D = 10 in the text; N' = 3 and escape D' = 8 in the rollouts.
    found = dict(drafter.next_tokens(history_of(drafter, [2, 5, 2]), (), EVERYTHING))
    assert found == pytest.approx({5: 10 / 31, 3: 2 / 31, 4: 1 / 31})


# -- what is kept ----------------------------------------------------------------------------------


def test_newest_answers_are_kept():
    drafter = Suffix(**OPTIONS | {"longest": 2, "max_tokens": 11})
    texts = [
        Text([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 1]),
        Text([7, 7], [0, 0]),  # nothing in it is the target's
        Text([10, 11, 12, 13, 14, 15], [0, 0, 0, 1, 1, 0]),
        Text([20, 21, 22], [1, 1, 1]),
    ]
    drafter.fit(texts[-1:])  # which the next fit forgets
    said = drafter.fit(iter(texts))
    assert drafter.corpus.tolist() == [11, 12, 13, 14, 15, PAD, 20, 21, 22, PAD]
    assert "2 of 3 rollouts kept" in said
    assert drafter.settings["size"] == 10


def test_without_rollouts_it_drafts_from_the_text(target, tmp_path):
    drafter = fitted([[1, 2, 3]], max_tokens=0)
    assert drafter.corpus.numel() == 0
    checkpoint_io.save(drafter, target, tmp_path)
    loaded = checkpoint_io.load(tmp_path, target)
    assert list(drafts(loaded, target, [4, 5, 4], Plan(2))) == [(5,), (5, 4)]


def test_checkpoint_names_its_datastore(target, tmp_path, monkeypatch):
    drafter = fitted([[1, 2]], [[5, 6, 7] * 2000])
    checkpoint_io.save(drafter, target, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3000
    loaded = checkpoint_io.load(tmp_path, target)
    assert list(drafts(loaded, target, [9, 5], Plan(2))) == [(6,), (6, 7)]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match=r"drafter.store=texts: its datastore is not on this machine"):
        checkpoint_io.load(tmp_path, target)


@pytest.mark.parametrize("key", ["../../../etc", "", "0" * 17, "/" * 16])
def test_key_of_no_datastore_is_refused(target, tmp_path, key):
    checkpoint_io.save(fitted([[1, 2]]), target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["settings"] |= {"store": "/etc/passwd", "store_key": key}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no key of a datastore"):
        checkpoint_io.load(tmp_path, target)


def test_store_without_a_key_is_refused(target):
    options = {name: value for name, value in OPTIONS.items() if name != "vocab_size"}
    with pytest.raises(UserError, match="no key of a datastore"):
        Suffix.for_target(target, **options, store="texts.jsonl")


def test_union_keeps_the_datastore_of_its_second(tiny_target, make_drafter, tmp_path):
    target = tiny_target(vocab=30, layers=4, hidden=16, dtype=torch.float32)
    union = Union(make_drafter("eagle", target), fitted([], [[11, 12, 13, 14]] * 9))
    checkpoint_io.save(union.requires_grad_(False), target, tmp_path)
    for drafter in (union, checkpoint_io.load(tmp_path, target)):
        assert isinstance(drafter, Union)
        (history,) = drafter.new_state(1).second
        history.extend([9, 11])
        assert [node.token for node in drafter.second.nodes(history, Plan(3))] == [12, 13, 14]


@pytest.mark.parametrize("token", [30, 2**31 - 1, -2])
def test_corpus_with_invalid_tokens_is_refused(target, tmp_path, token):
    drafter = fitted([[1, 2, 3]])
    drafter.corpus[1] = token
    checkpoint_io.save(drafter, target, tmp_path)
    with pytest.raises(UserError, match="invalid token ids"):
        checkpoint_io.load(tmp_path, target).new_state(1)


@pytest.mark.parametrize("size", [2_000, 60_000])
def test_work_of_a_round_is_bounded(target, monkeypatch, size):
    """An n-gram of every length is looked up once per node in either source; what it finds is limited."""
    text = [1, 2, 3, 1, 2, 4] * (size // 6)
    drafter = fitted([text], escape=1e9)  # shorter ones are never negligible
    state, found = feed(drafter, target, [text]), []

    def recorded(look_up):
        def record(*args):
            found.append(look_up(*args))
            return found[-1]

        return record

    for kind, name in ((NgramCounts, "after"), (IndexedText, "next_tokens")):
        monkeypatch.setattr(kind, name, recorded(getattr(kind, name)))
    draft = propose(drafter, target, state, Plan(4))
    assert draft.lengths().tolist() == [4]
    assert len(found) == 4 * 2 * len(drafter.orders)
    assert max(len(past.tokens) for past in found[::2]) <= KEPT
    assert max(sum(own.values()) for own in found[1::2]) <= OCCURRENCES
