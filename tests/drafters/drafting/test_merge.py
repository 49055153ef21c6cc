"""Two trees in one: paths of both count once, and which nodes are kept."""

from __future__ import annotations

import random

import pytest
import torch
from faces import paths

from decode.draft import PAD, Draft
from drafters.drafting.merge import merge_trees


def union(fresh, old, first, nodes):
    """`merge` in plain Python: {path: score} twice -> the paths that are kept."""
    ranked = sorted(fresh, key=lambda p: -fresh[p])
    kept = ranked[:first]
    for path in [*sorted(old, key=lambda p: -old[p]), *ranked[first:]]:
        if len(kept) < nodes and path not in kept:
            kept.append(path)
    return set(kept)


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


@pytest.mark.parametrize("seed", range(20))
def test_two_trees_become_the_best_of_one_then_what_the_other_adds(seed):
    dice, depth, nodes = random.Random(seed), 3, 9
    one = [random_tree(dice, depth, nodes, depth) for _ in range(4)]
    other = [random_tree(dice, depth, nodes, limit) for limit in (0, 1, 2, 3)]
    first = dice.choice([0, 4, 7, 9])
    draft = merge_trees(draft_of(one, nodes, depth), draft_of(other, nodes, depth), first, nodes)
    assert draft.tokens.shape == (4, nodes)
    for row in range(4):
        assert set(paths(draft, row)) - {()} == union(one[row], other[row], first, nodes)
