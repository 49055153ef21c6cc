"""Growing a draft against plain Python over a table of distributions; two trees in one."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from drafter_checks import ONE, best_paths, paths
from exact import (
    EnumeratingCoin,
    Node,
    Script,
    Table,
    assert_same_probs,
    emitted,
    exact_probs,
    grow,
    paths_of,
    struck,
)

from decode.draft import PAD, Draft, DraftProbs
from decode.plan import Plan
from decode.sampling import Sampler
from decode.verification.rule import verify
from drafters.drafting.merge import merge_trees, mix_trees
from drafters.drafting.tree import expand, largest
from drafters.vocabulary import Vocabulary
from drafters.vocabulary import probs_of as distribution

V = 6
PROPOSALS = ("fixed", "sampled", "hybrid")
Path = tuple[int, ...]


def table_logits(seed: int, row: int, path) -> torch.Tensor:
    dice = random.Random(f"{seed} {row} {list(path)}")
    return torch.tensor([dice.gauss(0, 2) for _ in range(V)], dtype=torch.float64)


def expanded(
    seed: int, rows: int, plan: Plan, sampler: Sampler = ONE, coin=None, table=table_logits
) -> Draft:
    """`expand` over a table of logits; `step` follows every entry's path."""
    entries = [[()] for _ in range(rows)]

    def step(token, parent):
        nonlocal entries
        pairs = [list(zip(t, p, strict=True)) for t, p in zip(token.tolist(), parent.tolist(), strict=True)]
        entries = [[(*entries[row][p], t) for t, p in line] for row, line in enumerate(pairs)]
        return torch.stack([torch.stack([table(seed, r, e) for e in row]) for r, row in enumerate(entries)])

    first = torch.stack([table(seed, row, ()) for row in range(rows)])
    coin = coin or EnumeratingCoin([Script(r) for r in range(rows)])
    return expand(first, step, sampler, coin, plan)


@pytest.mark.parametrize("shape", [(1, 3, 3), (3, 3, 7), (4, 2, 6), (3, 6, 20), (2, 9, 40), (3, 3, 99)])
def test_a_tree_is_the_best_of_eagle_2s_expansion(shape):
    plan = Plan(*shape)
    for seed in range(3):
        draft = expanded(seed, 3, plan)
        for row in range(3):

            def log_probs(found, seed=seed, row=row):
                return [table_logits(seed, row, path).log_softmax(-1) for path in found]

            assert set(paths(draft, row)) - {()} == set(best_paths(log_probs, plan))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("proposal", ["fixed", "sampled"])
def test_a_chain_ends_before_the_product_of_its_largest_probs_is_too_small(proposal, temperature):
    """At temperature 0, and where tokens are chosen, those at temperature 1."""
    plan, lengths = Plan(5, proposal=proposal, min_confidence=0.35), []
    warper = Sampler(temperature if proposal == "sampled" and temperature else 1.0)
    for seed in range(6):
        draft = expanded(seed, 3, plan, Sampler(temperature))
        for row in range(3):
            chain = [t for t in draft.tokens[row].tolist() if t != PAD]
            sure = [
                warper.probs(table_logits(seed, row, chain[:n])[None]).max() for n in range(len(chain) + 1)
            ]
            assert math.prod(sure[:-1]) >= 0.35
            assert len(chain) == 5 or math.prod(sure) < 0.35
            assert draft.tokens[row, len(chain) :].eq(PAD).all()
            lengths.append(len(chain))
        assert draft.depth == max(lengths[-3:])  # nothing is grown that no row asks for
        assert draft.lengths().tolist() == lengths[-3:]
    assert {0, 1, 4} <= set(lengths)


def test_where_no_row_is_sure_of_anything_nothing_is_drafted():
    flat = torch.zeros(2, V)
    for proposal in ("fixed", "sampled"):
        plan = Plan(3, proposal=proposal, min_confidence=0.5)
        coin = EnumeratingCoin([Script(0), Script(1)])
        draft = expand(flat, lambda *_: pytest.fail("nothing is to be grown"), ONE, coin, plan)
        assert draft.tokens.shape == (2, 0)
        assert draft.depth == 0


DRAWN = [Plan(3, proposal="sampled"), Plan(3, proposal="sampled", drafts=2), Plan(3, 2, 5, proposal="hybrid")]
DRAWN += [Plan(tree=[(0,), (1,), (0, 0)], proposal=proposal) for proposal in ("sampled", "hybrid")]


@pytest.mark.parametrize("plan", DRAWN, ids=lambda p: p.name)
def test_drafts_are_drawn_at_their_own_temperature_without_a_repetition_penalty(plan):
    """The drafter has no history; any q is right as long as it is the one drawn from."""
    cooled = replace(plan, draft_temperature=0.6)
    want = expanded(1, 3, plan, Sampler(0.6))
    for other in (
        expanded(1, 3, plan, Sampler(0.6, repetition_penalty=1.5)),
        expanded(1, 3, cooled, Sampler(0.0)),
        expanded(1, 3, cooled, Sampler(1.0)),
    ):
        assert other.tokens.equal(want.tokens)
        assert other.q.equal(want.q)
    assert not want.q.equal(expanded(1, 3, plan, Sampler(1.0)).q)


class Settled:
    """Draws a token that only the distribution decides, so that plain Python knows it."""

    def choose(self, mass: Sequence[float]) -> int:
        name = str(tuple(round(m / sum(mass), 9) for m in mass))
        return random.Random(name).choices(range(len(mass)), mass)[0]

    def draw(self, weights, key, active):
        out = torch.zeros_like(active, dtype=torch.long)
        for place in active.nonzero().tolist():
            out[tuple(place)] = self.choose(weights[tuple(place)].tolist())
        return out


def warped(seed: int, row: int, sampler: Sampler = ONE) -> Callable[[Path], list[float]]:
    return lambda path: sampler.probs(table_logits(seed, row, path)[None])[0].tolist()


def likeliest(probs: Sequence[float], count: int) -> list[int]:
    return sorted(range(V), key=lambda t: (-probs[t], t))[:count]


def reference(probs_of, plan: Plan, coin: Settled) -> dict[Path, bool]:
    """Paths that a dynamic hybrid keeps -> whether the last token was drawn."""
    looked: list[tuple[float, Path, bool]] = []
    beams: list[tuple[float, Path]] = [(0.0, ())]
    for _ in range(plan.depth):
        level = []
        for score, path in beams:
            q, top = probs_of(path), likeliest(probs_of(path), plan.width - 1)
            rest = struck(q, *top)
            if sum(rest):
                mass = 1 - sum(q[t] for t in top)
                level.append((score + math.log(mass), (*path, coin.choose(rest)), True))
            level += [(score + math.log(q[t]), (*path, t), False) for t in top if q[t]]
        looked += level
        beams = [(s, p) for s, p, _ in sorted(level, key=lambda node: -node[0])[: plan.width]]
    return {path: drawn for _, path, drawn in sorted(looked, key=lambda node: -node[0])[: plan.nodes]}


HYBRIDS = [(1, 3, 3), (2, 2, 4), (3, 3, 7), (4, 2, 6), (3, 5, 20), (3, 3, 39)]
WARPERS = [ONE, Sampler(0.7), Sampler(1.0, top_k=3), Sampler(0.6, top_p=0.8, min_p=0.02)]


@pytest.mark.parametrize("shape", HYBRIDS)
def test_a_dynamic_hybrid_keeps_the_best_of_drawn_and_likeliest_children(shape):
    plan, coin = Plan(*shape, proposal="hybrid"), Settled()
    drawn = 0
    for seed, sampler in enumerate(WARPERS):
        draft = expanded(seed, 3, plan, sampler, coin)
        for row in range(3):
            want = reference(warped(seed, row, sampler), plan, coin)
            found = {p: bool(draft.probs.sampled[row, node]) for p, node in paths(draft, row).items() if p}
            assert found == want
            drawn += sum(want.values())
    assert drawn > 5


STATIC = [(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (0, 1, 1), (0, 1, 2), (2, 0, 0)]


def ranks_of(draft: Draft) -> list[Path]:
    """Of every node, the child ranks on the way to it."""
    found: list[Path] = [()]
    parents = draft.parents[0].tolist()
    for node, parent in enumerate(parents):
        found.append((*found[parent + 1], parents[:node].count(parent)))
    return found[1:]


@pytest.mark.parametrize("sampler", WARPERS)
@pytest.mark.parametrize("proposal", ["fixed", "sampled", "repeated", "hybrid"])
def test_a_static_tree_has_the_form_it_was_given(proposal, sampler):
    """Rank r is the likeliest but r, or the drawn child and then the likeliest of the others."""
    repeated = proposal == "repeated"
    plan = Plan(tree=STATIC, proposal="sampled" if repeated else proposal, replacement=repeated)
    coin = Settled()
    draft = expanded(5, 3, plan, sampler, coin)
    assert ranks_of(draft) == list(plan.tree)
    for row in range(3):
        probs = warped(5, row, sampler)
        known = paths_of(draft.tokens[row].tolist(), draft.parents[row].tolist())
        fans = [sum(path[:-1] == slot for path in plan.tree) for slot in [(), *plan.tree]]
        for slot, fan in enumerate(fans):
            if not fan or PAD in known[slot]:
                continue
            q, want = probs(known[slot]), []
            if proposal == "hybrid":
                top = likeliest(q, fan - 1)
                rest = struck(q, *top)
                want = [coin.choose(rest) if sum(rest) else PAD, *top]
                if sampler.top_k or sampler.top_p < 1:  # of tokens without mass, any will do
                    want = [t for t in want if t == PAD or q[t]]
            elif proposal == "fixed":
                want = likeliest(table_logits(5, row, known[slot]).tolist(), fan)
            else:
                for _ in range(fan):
                    rest = q if repeated else struck(q, *want)
                    want.append(coin.choose(rest) if sum(rest) else PAD)
            got = [p[-1] for p, up in zip(known[1:], draft.parents[row], strict=True) if up == slot - 1]
            assert len(got) == fan
            assert got[: len(want)] == want


@pytest.mark.parametrize("count", [2, 5])
def test_drafts_side_by_side_hang_from_the_first_that_begins_as_they_do(count):
    """Node level * K + k is of chain k; every slot with children has one q, its own (contract)."""
    plan, shared = Plan(3, proposal="sampled", drafts=count), 0
    for seed in range(4):
        draft = expanded(seed, 3, plan, Sampler(0.5))
        probs = draft.probs
        assert probs.sampled.all()
        assert (probs.replacement, probs.siblings, probs.levels) == (True, count, (1, count, count))
        for row in range(3):
            tokens, parents, want = draft.tokens[row].tolist(), draft.parents[row].tolist(), []
            for level in range(3):
                begun = [tuple(tokens[k : level * count : count]) for k in range(count)]
                above = [(level - 1) * count + begun.index(path) for path in begun]
                want += above if level else [-1] * count
            assert parents == want
            owners = [slot for slot in probs.owner[row].tolist() if slot >= 0]
            assert sorted(owners) == sorted({parent + 1 for parent in parents})
            shared += len(parents) - len(set(parents))
    assert shared


@pytest.mark.parametrize("plan", [Plan(2, 3, 6, proposal="hybrid"), Plan(tree=STATIC, proposal="hybrid")])
def test_a_hybrid_at_temperature_zero_is_the_fixed_tree(plan):
    fixed = Plan(plan.depth, plan.width, plan.nodes) if not plan.tree else Plan(tree=plan.tree)
    one, other = expanded(1, 3, plan, Sampler(0.0)), expanded(1, 3, fixed, Sampler(0.0))
    assert one.probs is None
    assert one.tokens.equal(other.tokens)
    assert one.parents.equal(other.parents)


@pytest.mark.parametrize("proposal", ["fixed", "sampled", "hybrid"])
def test_children_that_no_vocabulary_has_are_absent(proposal):
    """Eight children of six tokens; or of three, where no more have mass."""
    plan = Plan(tree=[(rank,) for rank in range(8)], proposal=proposal)
    for sampler, most in ((ONE, V), (Sampler(1.0, top_k=3), 3)):
        draft = expanded(0, 3, plan, sampler)
        for row in range(3):
            real = [t for t in draft.tokens[row].tolist() if t != PAD]
            assert len(set(real)) == len(real)
            if proposal != "fixed" and sampler.top_k:  # a chosen token may have no mass, a drawn one must
                drawn = draft.tokens[row][draft.probs.sampled[row] & (draft.tokens[row] != PAD)].tolist()
                assert len(drawn) == (most if proposal == "sampled" else 0)
            else:
                assert len(real) == V


def certain_of(*tokens) -> torch.Tensor:
    """Logits of a distribution that is uniform over these."""
    return torch.full((V,), -torch.inf, dtype=torch.float64).index_fill(0, torch.tensor(tokens), 0.0)


def test_of_equal_scores_the_older_node_is_kept():
    """A certain token scores as its parent, two halves score alike, and so do all nodes of a flat tree."""

    tree, certain, chain = Plan(3, 2, 4), lambda *_: certain_of(5), {(5,), (5, 5), (5, 5, 5)}
    halves = {(2,), (4,), (2, 5), (4, 5)}
    for plan, table, kept in [
        (tree, certain, chain),
        (replace(tree, proposal="hybrid"), certain, chain),
        (tree, lambda *at: certain_of(5) if at[2] else certain_of(2, 4), halves),
    ]:
        draft = expanded(0, 2, plan, ONE, Settled(), table)
        assert [set(paths(draft, row)) for row in range(2)] == [{(), *kept}] * 2
    flat = expanded(0, 2, Plan(2, V, 20), ONE, Settled(), lambda *_: certain_of(*range(V)))
    assert flat.parents.tolist() == [[-1] * 6 + [0] * 6 + [1] * 6 + [2] * 2] * 2


def test_logits_that_are_not_finite_have_no_probs():
    bad = [[1, math.nan, 0], [math.inf, 0, 0], [-math.inf] * 3]
    logits = torch.tensor([[0.0, -math.inf, 1], *bad])
    for sampler in (ONE, Sampler(0.7, top_k=2, top_p=0.9, min_p=0.1)):
        for vocabulary in (None, Vocabulary(torch.tensor([1, 2, 4]), 6)):
            probs = distribution(logits, sampler, vocabulary)
            assert probs.sum(-1).tolist() == pytest.approx([1, 0, 0, 0])


@pytest.mark.parametrize("size", [64, 2**13, 2**15, 2**15 + 1])
@pytest.mark.parametrize("count", [1, 4])
def test_the_largest_of_many_are_those_of_topk(size, count):
    x = torch.randperm(3 * size).view(1, 3, size).float()
    x[0, 1] = -torch.inf
    x[0, 1, 5] = 0.0  # fewer finite values than are asked for
    value, index = largest(x, count)
    assert value.equal(x.topk(count).values)
    assert x.gather(-1, index).equal(value)
    assert all(len(set(row)) == count for row in index[0].tolist())


# -- two trees in one ------------------------------------------------------------------------------


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

    return exact_probs(play, 64)


def test_a_drawn_node_is_not_kept_because_the_other_tree_has_its_token():
    tables = [Table(seed, Sampler(1.0)) for seed in range(5)]
    for table in tables:
        assert_same_probs(table.complete(outputs_of_a_round(table), 3), table.probs(3))
