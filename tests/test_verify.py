"""The rules themselves: their exact laws against closed forms, and what they refuse.

With m_j = min(p_j, q_j), the token rule emits (x_1 .. x_n, y) of a chain of K with measure
m_1(x_1) .. m_n(x_n) r(y), r = (p - q)+ at n + 1 <= K and p after all K (Leviathan et al.,
arXiv:2211.17192). The match rule emits a path and y below it with their probability, where y is
no child.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from exact import EnumeratingCoin, Script, assert_same_law, exact_law

from decode.coin import KeyedCoin
from decode.draft import PAD, Draft
from decode.errors import UserError
from decode.sampling import Sampler
from decode.verify import RULES, Rows, verify

V = 3
SAMPLERS = {
    "0.5": Sampler(0.5),
    "1": Sampler(1.0),
    "warped": Sampler(0.7, top_k=2),
    "greedy": Sampler(0.0),
    "penalty": Sampler(0.5, repetition_penalty=1.6),
}


class Model:
    """A table: a random row of logits, and a random law of a drafter, for every path."""

    def __init__(self, seed: int, sampler: Sampler) -> None:
        self.seed, self.sampler = seed, sampler

    def logits(self, path) -> torch.Tensor:
        dice = random.Random(f"p {self.seed} {list(path)}")
        return torch.tensor([dice.gauss(0, 1.5) for _ in range(V)], dtype=torch.float64)

    def p(self, path) -> list[float]:
        """The warped law below a path that hangs from root 0."""
        seen = torch.zeros(1, V, dtype=torch.bool)
        seen[0, [0, *path]] = True
        return self.sampler.law(self.logits(path)[None], seen)[0].tolist()

    def q(self, path) -> list[float]:
        dice = random.Random(f"q {self.seed} {list(path)}")
        mass = [dice.choice([0.0, dice.random(), dice.random()]) for _ in range(V)]
        mass[dice.randrange(V)] += 0.2
        return [m / sum(mass) for m in mass]


def path_of(tokens, parents, node) -> tuple[int, ...]:
    return () if node < 0 else (*path_of(tokens, parents, parents[node]), tokens[node])


def play(rule: str, model: Model, tokens, parents, depth: int, q=None):
    """`exact_law`'s program: verify one row beside another row of another draft."""
    n = len(tokens)
    paths = [path_of(tokens, parents, node) for node in range(-1, n)]
    logits = torch.stack([model.logits(path) for path in paths])
    other = torch.randn(n + 1, V, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    pair = torch.tensor([tokens, [1] * n])
    laws = None if q is None else torch.tensor([q, [[1 / V] * V] * n], dtype=torch.float64)
    if parents == list(range(-1, n - 1)):
        draft = Draft.chain(pair, laws)
    else:
        draft = Draft(pair, torch.tensor([parents, parents]), depth, laws)
    seen = torch.zeros(2, V, dtype=torch.bool)
    seen[:, 0] = True

    def run(tapes):
        rows = Rows(torch.stack([logits, other]), model.sampler, seen)
        verdict = verify(rule, draft, rows, EnumeratingCoin([tapes[0], Script(0)], junk=V))
        emitted = verdict.tokens[0].tolist()
        count = int(verdict.accepted[0]) + 1
        assert all(t == PAD for t in emitted[count:])
        for step, slot in enumerate(verdict.slots[0].tolist()):
            want = tuple(emitted[:step]) if step < count else ()
            assert paths[slot] == want, "a token was drawn from another slot's row"
        return [tuple(emitted[:count])]

    return run


def token_law(model: Model, depth: int) -> dict:
    """Closed form of the module's docstring."""
    law = {}
    for n in range(depth + 1):
        for path in itertools.product(range(V), repeat=n):
            mass = 1.0
            for j in range(n):
                mass *= min(model.p(path[:j])[path[j]], model.q(path[:j])[path[j]])
            p, q = model.p(path), model.q(path)
            for y in range(V):
                law[(*path, y)] = mass * (p[y] if n == depth else max(p[y] - q[y], 0.0))
    return law


def match_law(model: Model, tokens, parents) -> dict:
    """Closed form of the module's docstring."""
    law = {}
    inner = {path_of(tokens, parents, node) for node in range(len(tokens)) if tokens[node] != PAD}
    for path in {(), *inner}:
        mass = 1.0
        for j, token in enumerate(path):
            mass *= model.p(path[:j])[token]
        for y, p in enumerate(model.p(path)):
            if (*path, y) not in inner:
                law[(*path, y)] = mass * p
    return law


def check_token(sampler: Sampler, depth: int, seed: int):
    """The token rule's law over its draft's and its own coins."""
    model, got = Model(seed, sampler), {}
    for tokens in itertools.product(range(V), repeat=depth):
        q = [model.q(tokens[:j]) for j in range(depth)]
        chance = 1.0
        for law, token in zip(q, tokens, strict=True):
            chance *= law[token]
        if chance:
            chain = list(range(-1, depth - 1))
            for y, mass in exact_law(play("token", model, list(tokens), chain, depth, q)).items():
                got[y] = got.get(y, 0.0) + chance * mass
    assert_same_law(got, token_law(model, depth))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_token_has_the_law_of_its_closed_form(sampler, depth):
    for seed in range(3):
        check_token(SAMPLERS[sampler], depth, seed)


TREES = {
    "chain": ([1, 2], [-1, 0]),
    "siblings": ([2, 0], [-1, -1]),
    "all": ([0, 1, 2], [-1, -1, -1]),
    "deep": ([0, 2, 1, 1, 0, 2], [-1, -1, 0, 1, 2, 2]),
    "padded": ([2, 1, PAD, PAD], [-1, 0, -1, 1]),
    "empty": ([PAD], [-1]),
    "twice": ([1, 1, 0], [-1, -1, 0]),
}


def depth_of(tokens, parents) -> int:
    return max(len(path_of(tokens, parents, node)) for node in range(len(tokens)))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_match_has_the_law_of_its_closed_form(sampler, tree):
    tokens, parents = TREES[tree]
    for seed in range(3):
        model = Model(seed, SAMPLERS[sampler])
        got = exact_law(play("match", model, tokens, parents, depth_of(tokens, parents)))
        assert_same_law(got, match_law(model, tokens, parents))


def test_match_on_a_chain_of_point_masses_is_the_token_rule_of_point_masses():
    """Two rules, one law: q of a chosen token is all its own."""
    for seed in range(4):
        model = Model(seed, Sampler(0.5))
        tokens, parents = [seed % V, 1], [-1, 0]
        point = torch.nn.functional.one_hot(torch.tensor(tokens), V).double().tolist()
        got = exact_law(play("token", model, tokens, parents, 2, point))
        assert_same_law(got, match_law(model, tokens, parents))


def rows_of(*laws) -> Rows:
    """One batch row whose slots have these laws."""
    return Rows(torch.tensor([laws], dtype=torch.float64).log(), Sampler(1.0))


def certain(junk: int = 0) -> EnumeratingCoin:
    return EnumeratingCoin([Script(0)], junk)


@pytest.mark.parametrize("rule", RULES)
def test_padding_matches_no_token_not_even_the_first(rule):
    """The target surely says 0 twice; an absent node must not be taken for it."""
    law = [1.0, 0.0, 0.0]
    q = torch.full((1, 2, V), 1 / V, dtype=torch.float64) if rule == "token" else None
    draft = Draft.chain(torch.tensor([[PAD, PAD]]), q)
    for junk in (0, V):  # V: what is not active is told "0" and "accepted"
        verdict = verify(rule, draft, rows_of(law, law, law), certain(junk))
        assert verdict.tokens.tolist() == [[0, PAD, PAD]]
        assert verdict.accepted.tolist() == [0]


def test_padding_after_an_accepted_token_ends_the_draft():
    law = [1.0, 0.0, 0.0]
    q = torch.tensor([[law, law]], dtype=torch.float64)
    for rule in RULES:
        draft = Draft.chain(torch.tensor([[0, PAD]]), q if rule == "token" else None)
        verdict = verify(rule, draft, rows_of(law, law, law), certain())
        assert verdict.tokens.tolist() == [[0, 0, PAD]]
        assert verdict.slots.tolist() == [[0, 1, 0]]
        assert verdict.accepted.tolist() == [1]


@pytest.mark.parametrize("rule", RULES)
def test_a_token_without_mass_is_never_accepted(monkeypatch, rule):
    """Not even by the production coin at its smallest value."""
    monkeypatch.setattr(KeyedCoin, "uniform", lambda self, key: torch.zeros(1, dtype=torch.float64).numpy())
    q = torch.tensor([[[1.0, 0.0, 0.0]]], dtype=torch.float64) if rule == "token" else None
    draft = Draft.chain(torch.tensor([[0]]), q)
    verdict = verify(rule, draft, rows_of([0.0, 0.5, 0.5], [1 / 3] * 3), KeyedCoin(0, [0]))
    assert verdict.accepted.tolist() == [0]
    assert verdict.tokens[0, 0] == 1


class Contrary(EnumeratingCoin):
    """Rejects everything, as rounding might where p equals q."""

    def flip(self, accept, proposal, key, active):
        return torch.zeros_like(active)


def test_a_residual_of_zero_falls_back_to_the_targets_law():
    law = [0.0, 0.3, 0.7]
    draft = Draft.chain(torch.tensor([[2]]), torch.tensor([[law]], dtype=torch.float64))
    got = exact_law(
        lambda tapes: [(int(verify("token", draft, rows_of(law, [1, 0, 0]), Contrary(tapes)).tokens[0, 0]),)]
    )
    assert_same_law(got, {(1,): 0.3, (2,): 0.7})


def test_token_refuses_a_tree():
    draft = Draft(torch.tensor([[0, 1]]), torch.tensor([[-1, -1]]), 1, torch.full((1, 2, V), 1 / V))
    with pytest.raises(UserError, match=r"decode\.rule=token.*rule=match"):
        verify("token", draft, rows_of(*[[1 / 3] * 3] * 3), certain())


def test_token_refuses_tokens_that_were_chosen():
    draft = Draft.chain(torch.tensor([[0, 1]]))
    with pytest.raises(UserError, match=r"decode\.rule=token.*rule=match"):
        verify("token", draft, rows_of(*[[1 / 3] * 3] * 3), certain())


@pytest.mark.parametrize("name", ["greedy", "", "Match"])
def test_an_unknown_rule_is_answered_with_the_known_ones(name):
    with pytest.raises(UserError, match="match, token"):
        verify(name, Draft.chain(torch.tensor([[0]])), rows_of([1, 0, 0], [1, 0, 0]), certain())


@pytest.mark.parametrize("rule", RULES)
def test_a_round_that_drafts_nothing_draws_from_the_target(rule):
    draft = Draft.empty(1, torch.device("cpu"))
    law = [0.2, 0.3, 0.5]
    got = exact_law(
        lambda tapes: [(int(verify(rule, draft, rows_of(law), EnumeratingCoin(tapes)).tokens[0, 0]),)]
    )
    assert_same_law(got, {(i,): p for i, p in enumerate(law)})


def test_rows_are_verified_each_by_its_own_draft():
    """A permutation of the batch permutes the verdicts."""
    dice = torch.Generator().manual_seed(1)
    tokens = torch.randint(V, (5, 4), generator=dice)
    parents = torch.tensor([[-1, 0, 1, 2], [-1, -1, 0, 1], [-1, 0, 0, -1], [-1, -1, -1, 2], [-1, 0, 1, 0]])
    logits = torch.randn(5, 5, V, generator=dice, dtype=torch.float64)
    order = [3, 0, 4, 1, 2]

    def run(rows):
        draft = Draft(tokens[rows], parents[rows], 4)
        coin = EnumeratingCoin([Script(r) for r in rows])
        return verify("match", draft, Rows(logits[rows], Sampler(1.0)), coin)

    straight, mixed = run([0, 1, 2, 3, 4]), run(order)
    for a, b in zip(straight, mixed, strict=True):
        assert a[order].tolist() == b.tolist()
