"""Prompt lookup against a matcher that tries everything, and against texts written by hand."""

from __future__ import annotations

import pytest
import torch
from faces import feed, paths, propose
from hypothesis import given
from hypothesis import strategies as st

from decode.errors import UserError
from decode.evaluation.replay import Rollout, replay
from decode.generation.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.families.lookup import IndexedText, best_tree, pack_drafts
from drafters.models.ngram import Ngram


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(vocab=30, dtype=torch.float32)


def chains(drafter, target, texts, depth, cuts=()) -> list[list[int]]:
    draft = propose(drafter, target, feed(drafter, target, texts, cuts), Plan(depth))
    return [[t for t in row if t >= 0] for row in draft.tokens.tolist()]


# -- by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ns", "want"),
    [
        ([1, 2, 3, 4, 5, 1, 2], (1, 3), [3, 4, 5, 1]),
        ([1, 2, 3, 9, 2, 4, 8, 2], (1, 3), [4, 8, 2, 4]),  # the most recent of equals, then round again
        ([1, 2, 3, 9, 9, 2, 5, 1, 2], (1, 3), [3, 9, 9, 2]),  # the longer before the more recent
        ([1, 2, 3, 9, 9, 2, 5, 1, 2], (1, 1), [5, 1, 2, 5]),  # not longer than max_n
        ([1, 2, 3, 9, 2], (2, 3), []),  # shorter than min_n
        ([1, 2, 1, 2, 6, 1, 2, 1, 2], (2, 2), [1, 2, 1, 2]),  # the match overlaps what it is matched with
        ([6, 6], (1, 3), [6, 6, 6, 6]),
        ([1, 2, 3], (1, 3), []),
        ([5, 1], (1, 3), []),
    ],
    ids=str,
)
def test_chain_follows_the_longest_and_newest_match(target, text, ns, want):
    assert chains(Ngram(*ns), target, [text], 4) == [want]


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


# -- against a matcher that tries everything -------------------------------------------------------

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


weighted = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=4), st.integers(1, 9)), min_size=1, max_size=8
)


# No floor is a ratio of weights, which rounding would let through or not.
@given(
    weighted, st.integers(1, 4), st.integers(1, 3), st.integers(0, 9), st.sampled_from([0.0, 0.2003, 0.4999])
)
def test_tree_keeps_the_heaviest_nodes(pool, depth, width, more, floor):
    plan = Plan(depth, width, depth + more)
    mass = {(): sum(w for _, w in pool)}
    for line, weight in pool:
        for n in range(1, len(line) + 1):
            mass[tuple(line[:n])] = mass.get(tuple(line[:n]), 0) + weight

    def next_tokens(path):
        below = [(p[-1], m / mass[path]) for p, m in mass.items() if p and p[:-1] == path]
        return sorted(below, key=lambda pair: -pair[1])

    nodes = best_tree(next_tokens, plan, floor)
    mass = {path: m for path, m in mass.items() if 0 < len(path) <= depth}
    found = paths(pack_drafts([nodes], torch.device("cpu")), 0)
    found.pop(())
    assert found.keys() <= mass.keys()
    assert len(found) <= plan.nodes
    least = floor * sum(w for _, w in pool)
    open_ = [
        path
        for path in mass
        if path not in found
        and mass[path] >= least
        and (path[:-1] in found or len(path) == 1)
        and sum(p[:-1] == path[:-1] for p in found) < width
    ]
    assert all(mass[path] >= least for path in found)
    for path in found:  # nothing that could have been taken outweighs what was
        assert all(mass[path] >= mass[p] for p in open_ if len(found) == plan.nodes)
        younger = [p for p in mass if p[:-1] == path[:-1] and p not in found]
        assert all(mass[path] >= mass[p] for p in younger)
    assert not open_ or len(found) == plan.nodes
    total = sum(w for _, w in pool)
    by_index = list(found)  # in the order of the nodes
    assert [node.chance * total for node in nodes] == pytest.approx([mass[path] for path in by_index])


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


# -- decoding --------------------------------------------------------------------------------------


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


# -- a run -----------------------------------------------------------------------------------------


def test_min_confidence_is_refused():
    drafter = Ngram(1, 2)
    drafter.check(Plan(depth=2))
    with pytest.raises(UserError, match=r"decode\.min_confidence=0\.3"):
        drafter.check(Plan(depth=2, min_confidence=0.3))
