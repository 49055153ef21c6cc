"""Growing a draft: chains, and EAGLE-2's tree against plain Python over a table of laws."""

from __future__ import annotations

import random

import pytest
import torch
from exact import EnumeratingCoin, Script
from faces import ONE, best_paths, paths

from decode.draft import Draft
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.expand import expand


def table_logits(seed: int, row: int, path) -> torch.Tensor:
    dice = random.Random(f"{seed} {row} {list(path)}")
    return torch.tensor([dice.gauss(0, 2) for _ in range(6)], dtype=torch.float64)


def grow(seed: int, rows: int, plan: Plan) -> Draft:
    """`expand` over a table of laws; `step` follows every entry's path."""
    entries = [[()] for _ in range(rows)]

    def step(token, parent):
        nonlocal entries
        pairs = [list(zip(t, p, strict=True)) for t, p in zip(token.tolist(), parent.tolist(), strict=True)]
        entries = [[(*entries[row][p], t) for t, p in line] for row, line in enumerate(pairs)]
        return torch.stack(
            [torch.stack([table_logits(seed, r, e) for e in row]) for r, row in enumerate(entries)]
        )

    first = torch.stack([table_logits(seed, row, ()) for row in range(rows)])
    return expand(first, step, ONE, EnumeratingCoin([Script(r) for r in range(rows)]), plan)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(1, 3, 3),
        Plan(2, 2, 4),
        Plan(3, 3, 7),
        Plan(4, 2, 6),
        Plan(3, 6, 20),
        Plan(2, 9, 40),
        Plan(3, 3, 99),
    ],
    ids=lambda p: p.name,
)
def test_a_tree_is_the_best_of_eagle_2s_expansion(plan):
    for seed in range(3):
        draft = grow(seed, 3, plan)
        for row in range(3):

            def law(path, seed=seed, row=row):
                return table_logits(seed, row, path).log_softmax(-1)

            assert set(paths(draft, row)) - {()} == set(best_paths(law, plan))


@pytest.mark.parametrize("proposal", ["fixed", "sampled"])
def test_a_chain_conditions_each_token_on_those_before(proposal):
    draft = grow(0, 3, Plan(4, proposal=proposal))
    for row in range(3):
        chain = draft.tokens[row].tolist()
        for depth in range(4):
            logits = table_logits(0, row, chain[:depth])
            if proposal == "fixed":
                assert chain[depth] == logits.argmax()
            else:
                torch.testing.assert_close(draft.q[row, depth], logits.softmax(-1), rtol=0, atol=1e-12)


def test_a_chains_laws_ignore_the_repetition_penalty():
    """The drafter has no history; any law is right as long as it is the one drawn from."""
    logits = torch.randn(2, 6)
    coin = EnumeratingCoin([Script(0), Script(1)])
    sampler = Sampler(0.5, repetition_penalty=1.5)
    draft = expand(logits, lambda *_: logits[:, None], sampler, coin, Plan(2, proposal="sampled"))
    torch.testing.assert_close(draft.q[:, 0], (logits / 0.5).softmax(-1))
