"""Two trees in one: paths of both count once, and which nodes are kept."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from exact import EnumeratingCoin, Node, Table, assert_same_law, emitted, exact_law, grow, struck

from decode.draft import PAD, Draft, DraftProbs
from decode.plan import Plan
from decode.sampling import Sampler
from decode.verification.rule import verify
from drafters.drafting.merge import merge_trees, mix_trees


def union(fresh, old, first, nodes, drawn=frozenset()):
    """`merge_trees` in plain Python: {path: score} twice -> how often each path is kept, and as drawn ones.

    A drawn node that is not among the first is not what the other tree has on the same path.
    """
    ranked = sorted(fresh, key=lambda p: -fresh[p])
    kept = ranked[:first]

    def is_twin(path):
        above = accumulate((token,) for token in path)
        return path in fresh and all(p not in drawn or p in ranked[:first] for p in above)

    for path in sorted(old, key=lambda p: -old[p]):
        node = path if is_twin(path) else ("old", path)
        if len(kept) < nodes and node not in kept:
            kept.append(node)
    for path in ranked[first:]:
        if len(kept) < nodes and path not in kept:
            kept.append(path)
    names = Counter(node[1] if node[0] == "old" else node for node in kept)
    return names, {node for node in kept if node in drawn}


def random_tree(dice, depth, nodes, limit):
    """{path: score}, scores falling along a path, and no two alike."""
    tree = {(): 0.0}
    for _ in range(60):
        above = dice.choice(list(tree))
        path = (*above, dice.randrange(4))
        if len(path) <= min(depth, limit) and len(tree) <= nodes:
            tree.setdefault(path, tree[above] - dice.uniform(0.1, 2))
    del tree[()]
    return dict(sorted(tree.items(), key=lambda kv: (len(kv[0]), -kv[1])))


def draft_of(trees, nodes, depth):
    tokens = torch.full((len(trees), nodes), PAD)
    parents, score = tokens.clone(), torch.full((len(trees), nodes), -torch.inf, dtype=torch.float64)
    for row, tree in enumerate(trees):
        place = {(): -1} | {path: i for i, path in enumerate(tree)}
        for path, i in place.items():
            if path:
                tokens[row, i], parents[row, i], score[row, i] = path[-1], place[path[:-1]], tree[path]
    return Draft(tokens, parents, depth, score=score)


def with_drawn(draft, trees, drawn):
    """The draft with these of its nodes drawn; row r of q, of the r-th slot, is told by its numbers."""
    rows, nodes = draft.tokens.shape
    sampled = torch.zeros(rows, nodes, dtype=torch.bool)
    for row, tree in enumerate(trees):
        sampled[row, : len(tree)] = torch.tensor([path in drawn[row] for path in tree])
    owner = torch.arange(nodes + 1).expand(rows, -1)
    q = torch.arange(nodes + 1.0)[None, :, None].expand(rows, -1, 4)
    probs = DraftProbs(q, owner, (nodes + 1,), sampled, ranked=True)
    return Draft(draft.tokens, draft.parents, draft.depth, probs, score=draft.score)


def walked(draft, row):
    """Path of the root and of every node; None of a missing one."""
    names = [()]
    for token, parent in zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True):
        assert parent + 1 < len(names), "parents come first"
        names.append(None if token == PAD else (*names[parent + 1], token))
    return names


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("hybrid", [False, True])
def test_two_trees_become_the_best_of_one_then_what_the_other_adds(seed, hybrid):
    dice, depth, nodes = random.Random(seed), 3, 9
    one = [random_tree(dice, depth, nodes, depth) for _ in range(4)]
    other = [random_tree(dice, depth, nodes, limit) for limit in (0, 1, 2, 3)]
    first = dice.choice([0, 4, 7, 9])
    drawn = [set(dice.sample(list(tree), len(tree) // 3)) if hybrid else set() for tree in one]
    fresh = draft_of(one, nodes, depth)
    fresh = with_drawn(fresh, one, drawn) if hybrid else fresh
    draft = merge_trees(fresh, draft_of(other, nodes, depth), first, nodes)
    assert draft.tokens.shape == (4, nodes)
    for row in range(4):
        names = walked(draft, row)
        want, as_drawn = union(one[row], other[row], first, nodes, drawn[row])
        assert Counter(name for name in names[1:] if name is not None) == want
        if draft.probs is None:
            assert not hybrid
            continue
        assert {n for n, s in zip(names[1:], draft.probs.sampled[row], strict=True) if s} == as_drawn
        for number, slot in enumerate(draft.probs.owner[row].tolist()):  # q stays with its slot
            before = walked(fresh, row)[number]
            assert slot < 0 or names[slot] == before
            assert slot >= 0 or all(p[:-1] != before for p in as_drawn)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_two_trees_become_the_best_paths_of_their_mixture(seed, weight):
    dice, depth, nodes = random.Random(seed), 3, 9
    one = [random_tree(dice, depth, nodes, limit) for limit in (3, 3, 0, 2)]
    other = [random_tree(dice, depth, nodes, limit) for limit in (0, 1, 2, 3)]
    draft = mix_trees(draft_of(one, nodes, depth), draft_of(other, nodes, depth), weight, nodes)
    for row in range(4):
        chance = Counter()
        for tree, share in ((one[row], weight), (other[row], 1 - weight)):
            chance.update({path: share * math.exp(score) for path, score in tree.items() if share})
        scored = zip(walked(draft, row)[1:], draft.score[row].tolist(), strict=True)
        found = {name: math.exp(score) for name, score in scored if name is not None}
        assert found == pytest.approx(dict(chance.most_common(nodes)))


def outputs_of_a_round(table):
    """Of three tokens: token 0 and its child are the fresh tree's best, the drawn one its last; 1 is old."""

    def story():
        q = struck(table.q(()), 0)
        return [Node((yield q), -1, q), Node(0, -1), Node(table.q((0,)).index(max(table.q((0,)))), 1)]

    def play(tapes):
        coin = EnumeratingCoin(tapes, junk=3)
        fresh = grow([story() for _ in tapes], coin, 3)
        fresh = replace(fresh, score=torch.tensor([-1.0, -0.1, -0.2]).expand(len(tapes), -1))
        token = torch.ones(len(tapes), 1, dtype=torch.long)
        old = Draft(token, token - 2, 1, score=torch.zeros(len(tapes), 1))
        draft = merge_trees(fresh, old, 1, 3)
        return emitted(draft, verify(Plan(2, 2, 3, proposal="hybrid").rule, draft, table.rows(draft), coin))

    return exact_law(play, 64)


def test_a_drawn_node_is_not_kept_because_the_other_tree_has_its_token():
    tables = [Table(seed, Sampler(1.0)) for seed in range(5)]
    for table in tables:
        assert_same_law(table.complete(outputs_of_a_round(table), 3), table.law(3))
