"""decode=calibrated: ranks against plain counts, the tree against brute force, and a run that scores it."""

import json
import random
from collections import Counter
from itertools import combinations, pairwise, product

import pytest
from exact import Grown
from workbench import train

from decode.errors import UserError
from decode.evaluation.replay import Rollout, replay
from decode.generation.generate import generate
from decode.plan import Plan
from decode.planning import calibrated_tree as calibrate
from decode.planning.calibrated_tree import Calibrated, best_tree, round_start_lines
from decode.sampling import Sampler
from distill.utils.run_folder import checkpoints

VOCAB, DEPTH, WIDTH = 6, 3, 3
WARM = Sampler(0.8)


def is_tree(paths) -> bool:
    known = {(), *paths}
    return all(path[:-1] in known and (not path[-1] or (*path[:-1], path[-1] - 1) in known) for path in paths)


def values(seed: int) -> dict[tuple[int, ...], float]:
    """A likelier sibling is reached more often, and a child no more often than its parent."""
    dice = random.Random(seed)
    found = {(): 1.0}
    for depth in range(1, DEPTH + 1):
        for parent in product(range(WIDTH), repeat=depth - 1):
            share = sorted([dice.random() for _ in range(WIDTH)], reverse=True)
            found |= {(*parent, r): found[parent] * share[r] / sum(share) for r in range(WIDTH)}
    del found[()]
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_greedy_tree_is_the_best_of_all_trees(seed, nodes):
    reached = values(seed)
    tree = best_tree(reached, nodes)
    assert len(tree) == nodes
    assert is_tree(tree)
    best = max(sum(map(reached.get, some)) for some in combinations(reached, nodes) if is_tree(some))
    assert sum(map(reached.get, tree)) == pytest.approx(best, rel=1e-12)


def test_of_equals_the_shortest_comes_first_and_nodes_that_nothing_reaches_are_left_out():
    assert best_tree({(0,): 3, (1,): 2, (0, 0): 2, (0, 1): 1}, 3) == ((0,), (1,), (0, 0))
    assert best_tree({(0,): 3, (1,): 1}, 9) == ((0,), (1,))
    assert best_tree({}, 9) == ()


def written(tiny_target):
    target, dice = tiny_target(vocab=VOCAB), random.Random(2)
    prompts = [[dice.randrange(VOCAB) for _ in range(dice.randint(1, 5))] for _ in range(20)]
    run = generate(target, None, prompts, max_new_tokens=10, sampler=WARM, stop=[5])
    return target, [Rollout(p, o.tokens) for p, o in zip(prompts, run.outputs, strict=True)]


def by_hand(drafter, rollouts, depth):
    """Ranks along every answer, from the logits of every prefix."""
    lines = []
    for prompt, answer in rollouts:
        for start in range(1, len(answer)):
            line = []
            for j, token in enumerate(answer[start : start + depth]):
                logits = drafter.logits([*prompt, *answer[: start + j]])
                line.append(int((logits > logits[token]).sum()))
            lines.append(line)
    return lines


def test_ranks_are_counted_along_the_answers(tiny_target):
    target, rollouts = written(tiny_target)
    drafter = Grown(VOCAB)
    lines = by_hand(drafter, rollouts, DEPTH)
    plan, table = Calibrated(7, DEPTH, WIDTH).choose(target, drafter, rollouts, WARM, 1)
    for j, row in enumerate(table):
        column = [line[j] for line in lines if len(line) > j]
        shares = [column.count(r) / len(column) for r in range(WIDTH)]
        assert row == {"depth": j + 1, "accuracy": pytest.approx(shares)}
    assert len({path[0] for path in plan.tree}) > 1
    assert plan.depth > 1


def test_rounds_by_ranks_are_those_of_replay(tiny_target):
    target, rollouts = written(tiny_target)
    for tree in [((0,),), ((0,), (1,), (0, 0), (1, 0)), ((0,), (0, 0), (0, 0, 0), (0, 1))]:
        (replayed,) = replay(target, Grown(VOCAB), rollouts, [Plan(tree=tree)], WARM)
        for rollout, count in zip(rollouts, replayed.counts.rounds, strict=True):
            lines = by_hand(Grown(VOCAB), [rollout], DEPTH)
            assert len(round_start_lines(lines, set(tree))) == pytest.approx(count, abs=1e-9)


def test_tree_is_chosen_by_the_places_where_rounds_begin(monkeypatch):
    """Six easy tokens, four of rank 1: most starts lie before easy ones, most rounds do not."""
    ranks = [*([0] * 6 + [1] * 4) * 3, 9]
    lines = [list(pair) for pair in pairwise(ranks)]
    assert best_tree(Counter(tuple(x[: j + 1]) for x in lines for j in (0, 1)), 2) == ((0,), (0, 0))
    assert [len(round_start_lines(lines, tree)) for tree in (((0,), (0, 0)), ((0,), (1,)))] == [18, 15]
    monkeypatch.setattr(calibrate, "_ranks", lambda *_: [lines])
    plan, _ = Calibrated(2, 2, 2).choose(*[None] * 5)
    assert plan.tree == ((0,), (1,))


@pytest.mark.parametrize("name", ["nodes", "depth", "width"])
def test_tree_of_nothing_is_refused(name):
    with pytest.raises(UserError, match=f"decode.{name}=0"):
        Calibrated(**{"nodes": 4, "depth": 2, "width": 2} | {name: 0})


@pytest.mark.proof
def test_run_is_scored_with_its_own_tree(bench):
    argv = [a for a in bench.command if not a.startswith("decode")]
    argv += ["drafter=medusa", "drafter.depth=2", "decode=calibrated", "decode.depth=2", "decode.nodes=5"]
    done = train([*argv, "score.replay_prompts=4"]).succeeded()
    card = json.loads((checkpoints(done.folder)[-1] / "score.json").read_text())
    (chosen,) = card["plan_choices"]
    assert chosen["chosen"] == card["headline"]["decode"]
    plan = Plan(tree=tuple(map(tuple, chosen["tree"])))
    assert plan.name == card["headline"]["decode"]
    assert plan.nodes <= 5
    assert [row["depth"] for row in chosen["curve"]] == [1, 2]
    assert card["audit_passed"]
    assert card["replay_agrees"]


def test_tree_deeper_than_the_heads_is_refused(bench):
    argv = [a for a in bench.command if not a.startswith("decode")]
    done = train([*argv, "drafter=medusa", "drafter.depth=2", "decode=calibrated"])
    done.refused("set decode.depth=2 or less")
