"""Prompt lookup against a matcher that tries everything; suffix against its formula, and datastores."""

from __future__ import annotations

import json
from collections import Counter
from math import prod

import pytest
import torch
from datastores import store_of
from drafter_checks import feed, paths, propose
from hypothesis import assume, given
from hypothesis import strategies as st

from decode.draft import PAD
from decode.errors import UserError
from decode.evaluation.replay import Rollout, replay
from decode.generation.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.base import Text
from drafters.checkpoint import io as checkpoint_io
from drafters.drafting.ngram_counts import KEPT, NgramCounts
from drafters.families.lookup import IndexedText
from drafters.models.ngram import Ngram
from drafters.models.suffix import NEGLIGIBLE, OCCURRENCES, Suffix
from drafters.models.union import Union


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(vocab=30, dtype=torch.float32)


def chains(drafter, target, texts, depth, cuts=()) -> list[list[int]]:
    draft = propose(drafter, target, feed(drafter, target, texts, cuts), Plan(depth))
    return [[t for t in row if t >= 0] for row in draft.tokens.tolist()]


def test_tree_has_all_matches_longest_first(target):
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 2, 6, 7, 9, 1, 2]
    state = feed(Ngram(1, 3), target, [text])
    draft = propose(Ngram(1, 3), target, state, Plan(2, 2, 8))
    assert set(paths(draft, 0)) - {()} == {(3,), (3, 5), (3, 4), (6,), (6, 7)}
    assert [draft.tokens[0, i] for i in range(3)] == [3, 5, 4]
    # Nodes are spent on the longest, newest match first.
    assert set(paths(propose(Ngram(1, 3), target, state, Plan(2, 2, 3)), 0)) - {()} == {(3,), (3, 5), (3, 4)}
    narrow = propose(Ngram(1, 3), target, state, Plan(tree=((0,), (0, 0), (1,))))
    assert set(paths(narrow, 0)) - {()} == {(3,), (3, 5), (6,)}


def test_rows_without_a_match_draft_nothing(target):
    texts = [[1, 2, 3], [4, 5, 4], [6, 7]]
    draft = propose(Ngram(1, 3), target, feed(Ngram(1, 3), target, texts), Plan(2))
    assert draft.tokens.tolist() == [[-1, -1], [5, 4], [-1, -1]]
    assert draft.lengths().tolist() == [0, 2, 0]
    none = propose(Ngram(1, 3), target, feed(Ngram(1, 3), target, texts[::2]), Plan(2))
    assert none.tokens.shape == (2, 0)
    assert none.lengths().tolist() == [0, 0]


def test_agreement_counts_equal_tokens_up_to_a_limit():
    text = IndexedText([1])
    text.extend([1, 2, 3] * 5)
    assert [text.agreement(12, most) for most in (0, 1, 4, 12, 20)] == [0, 1, 4, 12, 12]
    assert [text.agreement(place, 9) for place in (3, 6, 13)] == [3, 6, 0]


texts = st.lists(st.integers(0, 3), min_size=2, max_size=24)
bounds = st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda p: (p[0], p[0] + p[1]))


def places(text, low, high) -> list[int]:
    """Every place that follows a match, the longest first, then the most recent."""
    end, found = len(text), []
    for n in range(high, low - 1, -1):
        for place in range(end - 1, n - 1, -1):
            if text[place - n : place] == text[end - n :] and place not in found:
                found.append(place)
    return found


def copied(text, place, depth) -> list[int]:
    longer = list(text)
    for i in range(depth):
        longer.append(longer[place + i])
    return longer[len(text) :]


@given(texts, bounds, st.integers(1, 6))
def test_chains_are_those_of_a_brute_matcher(target, text, ns, depth):
    want = [copied(text, place, depth) for place in places(text, *ns)[:1]] or [[]]
    assert chains(Ngram(*ns), target, [text], depth) == want


@given(texts, bounds, st.integers(1, 4), st.integers(2, 4), st.integers(0, 8))
def test_trees_are_those_of_a_brute_matcher(target, text, ns, depth, width, more):
    plan = Plan(depth, width, depth + more)
    children: dict[tuple[int, ...], list[int]] = {(): []}
    for place in places(text, *ns):
        path = ()
        for token in copied(text, place, depth):
            if token not in children[path]:
                if len(children[path]) == width or len(children) > plan.nodes:
                    break
                children[path].append(token)
                children[(*path, token)] = []
            path = (*path, token)
    draft = propose(Ngram(*ns), target, feed(Ngram(*ns), target, [text]), plan)
    assert set(paths(draft, 0)) == set(children)


@given(texts, texts, st.lists(st.integers(2, 23), max_size=6))
def test_text_may_come_in_any_pieces(target, one, other, cuts):
    drafter, length = Ngram(1, 3), min(len(one), len(other))
    both = [one[:length], other[:length]]
    assert chains(drafter, target, both, 3, sorted(cuts)) == chains(drafter, target, both, 3)
    assert chains(drafter, target, both, 3) == [chains(drafter, target, [t], 3)[0] for t in both]


def indexed(ns, text) -> IndexedText:
    history = IndexedText(Ngram(*ns).orders)
    history.extend(text)
    return history


@given(texts, bounds, st.lists(st.integers(0, 3), max_size=4).map(tuple), st.integers(2, 4))
def test_next_tokens_are_the_first_level_of_a_tree(text, ns, path, width):
    drafter, history, longer = Ngram(*ns), indexed(ns, text), indexed(ns, [*text, *path])
    found = drafter.next_tokens(history, path, width)
    tree = drafter.nodes(longer, Plan(1, width, width))
    assert found == drafter.next_tokens(longer, (), width)
    assert found == [(node.token, pytest.approx(node.chance)) for node in tree]
    assert vars(history) == vars(indexed(ns, text))  # the path is taken off again


def test_short_prompts_and_empty_drafts_decode_and_replay(target):
    prompts = [[3], [4, 5], [6, 7, 6, 7, 6]]
    plain = generate(target, None, prompts, max_new_tokens=20, sampler=Sampler(0.0)).outputs
    for plan in (Plan(3), Plan(3, 2, 6)):
        run = generate(target, Ngram(1, 3), prompts, max_new_tokens=20, sampler=Sampler(0.0), plan=plan)
        assert [o.tokens for o in run.outputs] == [o.tokens for o in plain]
        assert 0 in run.outputs[0].draft_lengths  # the first token is new, so nothing was offered
        rollouts = [Rollout(p, o.tokens) for p, o in zip(prompts, plain, strict=True)]
        (replayed,) = replay(target, Ngram(1, 3), rollouts, [plan], Sampler(0.0))
        assert replayed.counts.rounds == [len(o.emitted) for o in run.outputs]
        # Alone, so that no row of the batch is offered anything.
        (short,) = replay(target, Ngram(6, 6), rollouts[:1], [plan], Sampler(0.0))
        assert short.counts.tokens == [19]


def test_min_confidence_is_refused():
    drafter = Ngram(1, 2)
    drafter.check(Plan(depth=2))
    with pytest.raises(UserError, match=r"decode\.min_confidence=0\.3"):
        drafter.check(Plan(depth=2, min_confidence=0.3))


# -- suffix ----------------------------------------------------------------------------------------


OPTIONS = {
    "longest": 8,
    "own_weight": 1000.0,
    "escape": 4.0,
    "min_probability": 0.0,
    "max_tokens": 100_000,
    "vocab_size": 30,
}
EVERYTHING = 30  # tokens, so that none is cut off


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


small, wide = st.integers(0, 2), st.integers(0, 29)  # of the wide ones, more than KEPT may follow a token
several = st.one_of(
    st.lists(st.lists(small, max_size=9), max_size=6),
    st.lists(st.tuples(small, wide).map(list), min_size=KEPT, max_size=3 * KEPT),
)
suffix_texts = st.lists(small, min_size=1, max_size=3 * OCCURRENCES)
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


@given(several, suffix_texts, drafted, settings)
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


@given(several, suffix_texts, drafted, settings, stored_texts, st.sampled_from([0.0, 0.3, 1.0]))
def test_datastore_counts_with_the_rollouts(rollouts, text, path, options, store, weight):
    options = options | {"store": store, "store_weight": weight}
    drafter = fitted(rollouts, **options)
    found = drafter.next_tokens(history_of(drafter, text), path, EVERYTHING)
    assert dict(found) == pytest.approx(formula(rollouts, text, path, **options), abs=1e-9)


@given(
    several,
    suffix_texts,
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
    least = chances[-1] + 1e-12 if len(nodes) == plan.nodes else floor  # nothing above it was left out
    for path in [line for line in [(), *lines] if len(line) < depth]:
        above = nodes[lines.index(path)].chance if path else 1.0
        for token, share in drafter.next_tokens(history, path, width):
            assert (*path, token) in lines or above * share < least or not share


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


def test_key_of_no_datastore_is_refused(target, tmp_path):
    checkpoint_io.save(fitted([[1, 2]]), target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("../../../etc", "", "0" * 17, "/" * 16):
        config["settings"] |= {"store": "/etc/passwd", "store_key": key}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match="no key of a datastore"):
            checkpoint_io.load(tmp_path, target)
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
