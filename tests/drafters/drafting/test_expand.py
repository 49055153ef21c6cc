"""Growing a draft: chains and trees against plain Python over a table of distributions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from exact import EnumeratingCoin, Script, paths_of, struck
from faces import ONE, best_paths, paths

from decode.draft import PAD, Draft
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.drafting.tree import expand, largest
from drafters.vocabulary import Vocabulary
from drafters.vocabulary import probs_of as distribution

V = 6
PROPOSALS = ("fixed", "sampled", "hybrid")
Path = tuple[int, ...]


def table_logits(seed: int, row: int, path) -> torch.Tensor:
    dice = random.Random(f"{seed} {row} {list(path)}")
    return torch.tensor([dice.gauss(0, 2) for _ in range(V)], dtype=torch.float64)


def grow(seed: int, rows: int, plan: Plan, sampler: Sampler = ONE, coin=None, table=table_logits) -> Draft:
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
        draft = grow(seed, 3, plan)
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
        draft = grow(seed, 3, plan, Sampler(temperature))
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


@pytest.mark.parametrize(
    "plan",
    [
        Plan(2, proposal="sampled"),
        Plan(tree=[(0,), (1,), (0, 0)], proposal="sampled"),
        Plan(tree=[(0,), (1,)], proposal="hybrid"),
    ],
    ids=lambda p: p.name,
)
def test_drawn_tokens_ignore_the_repetition_penalty(plan):
    """The drafter has no history; any q is right as long as it is the one drawn from."""
    one, other = (grow(1, 3, plan, Sampler(0.5, repetition_penalty=penalty)) for penalty in (1.0, 1.5))
    assert one.tokens.equal(other.tokens)
    assert one.q.equal(other.q)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(3, proposal="sampled"),
        Plan(3, proposal="sampled", drafts=2),
        Plan(tree=[(0,), (1,), (0, 0)], proposal="sampled"),
        Plan(3, 2, 5, proposal="hybrid"),
    ],
    ids=lambda p: p.name,
)
def test_drafts_are_drawn_at_their_own_temperature(plan):
    """Whatever the target's, 0 included; without one they are drawn at that."""
    cooled = replace(plan, draft_temperature=0.6)
    for temperature in (0.0, 1.0):
        one, other = grow(1, 3, cooled, Sampler(temperature)), grow(1, 3, plan, Sampler(0.6))
        assert one.tokens.equal(other.tokens)
        assert one.q.equal(other.q)
    assert not grow(1, 3, cooled, Sampler(0.0)).q.equal(grow(1, 3, plan, Sampler(1.0)).q)


# -- trees that are drawn, in whole or in part ---------------------------------------------------


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
        draft = grow(seed, 3, plan, sampler, coin)
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
    draft = grow(5, 3, plan, sampler, coin)
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
        draft = grow(seed, 3, plan, Sampler(0.5))
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
    one, other = grow(1, 3, plan, Sampler(0.0)), grow(1, 3, fixed, Sampler(0.0))
    assert one.probs is None
    assert one.tokens.equal(other.tokens)
    assert one.parents.equal(other.parents)


@pytest.mark.parametrize("proposal", ["fixed", "sampled", "hybrid"])
def test_children_that_no_vocabulary_has_are_absent(proposal):
    """Eight children of six tokens; or of three, where no more have mass."""
    plan = Plan(tree=[(rank,) for rank in range(8)], proposal=proposal)
    for sampler, most in ((ONE, V), (Sampler(1.0, top_k=3), 3)):
        draft = grow(0, 3, plan, sampler)
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


@pytest.mark.parametrize(
    ("plan", "table", "kept"),
    [
        (Plan(3, 2, 4), lambda *_: certain_of(5), {(5,), (5, 5), (5, 5, 5)}),
        (Plan(3, 2, 4, proposal="hybrid"), lambda *_: certain_of(5), {(5,), (5, 5), (5, 5, 5)}),
        (
            Plan(3, 2, 4),
            lambda *at: certain_of(5) if at[2] else certain_of(2, 4),
            {(2,), (4,), (2, 5), (4, 5)},
        ),
    ],
)
def test_of_equal_scores_the_older_node_is_kept(plan, table, kept):
    """A certain token scores as its parent, and two halves score alike."""
    draft = grow(0, 2, plan, ONE, Settled(), table)
    for row in range(2):
        assert set(paths(draft, row)) == {(), *kept}


def test_of_a_flat_distribution_the_first_nodes_are_kept():
    draft = grow(0, 2, Plan(2, V, 20), ONE, Settled(), lambda *_: certain_of(*range(V)))
    assert draft.parents.tolist() == [[-1] * 6 + [0] * 6 + [1] * 6 + [2] * 2] * 2


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
