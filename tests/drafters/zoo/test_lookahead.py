"""Lookahead decoding: Jacobi iterations of the paper, drafts from the pool, and the target's texts."""

import pytest
import torch

from decode.evaluation.replay import why_inexact
from decode.generation.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.zoo.lookahead import Lookahead

V = 24
PROMPT = [5, 9, 2, 7, 3, 5, 9, 2]
TREE = Plan(4, 4, 16)


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab=V, layers=3, hidden=16, positions=256)


def greedy(target, text, count) -> list[int]:
    return generate(target, None, [text], max_new_tokens=count, sampler=Sampler(0.0)).outputs[0].tokens


class Watched(Lookahead):
    """Keeps the window and the draft of every round of a single row."""

    def propose(self, state, *arguments):
        draft = super().propose(state, *arguments)
        self.windows.append([list(row) for row in state[0].window])
        self.drafts.append(draft)
        return draft


def watched(target, plan, temperature=0.0, **options):
    drafter = Watched(**({"columns": 3, "ngram": 3, "pool": 8, "text": False} | options))
    drafter.windows, drafter.drafts = [], []
    run = generate(target, drafter, [PROMPT], max_new_tokens=40, sampler=Sampler(temperature), plan=plan)
    return drafter, run.outputs[0]


@pytest.mark.parametrize("ngram", [2, 3])
def test_window_rows_are_jacobi_iterations(target, ngram):
    """A row takes the place of the one before it; the newest is what the target says after its column."""
    plan, pool = (Plan(3), 0) if ngram == 2 else (TREE, 8)
    drafter, output = watched(target, plan, ngram=ngram, pool=pool)
    assert output.tokens == greedy(target, PROMPT, 40)
    done, checked = 1, 0
    for before, after, emitted in zip(drafter.windows, drafter.windows[1:], output.emitted, strict=False):
        text = [*PROMPT, *output.tokens[:done]]
        for column in range(3 - (emitted - 1)):
            old = column + emitted - 1
            assert [row[column] for row in after[:-1]] == [row[old] for row in before[1:]]
            path = [*before[0][: old + 1], *(row[old] for row in before[1:])]
            assert after[-1][column] == greedy(target, [*text, *path], 1)[0]
            checked += 1
        done += emitted
    assert checked > 30


def test_newest_ngrams_after_the_root_are_drafted_first():
    drafter = Lookahead(2, 3, 2, text=True)
    (state,) = states = drafter.new_state(1)
    text = [1, 2, 3, 1, 4, 5, 1, 6, 7, 1]
    taps = torch.empty(1, len(text) - 1, 0, 0)
    drafter.advance(states, None, torch.tensor([text[:-1]]), taps, [len(text) - 1], torch.tensor([1]))
    assert list(state.pool[1]) == [(4, 5), (6, 7)]  # (2, 3) has left
    assert state.window == [[1, 7], [1, 7]]
    nodes = drafter.nodes(state, TREE)
    paths = {}
    for i, node in enumerate(nodes):
        paths[i] = (*paths.get(node.parent, ()), node.token)
    assert list(paths.values()) == [(6,), (6, 7), (4,), (4, 5), (1,), (1, 1), (1, 7), (1, 7, 7)]
    assert [node.token for node in drafter.nodes(state, Plan(3))] == [6, 7]


@pytest.mark.parametrize("plan", [TREE, Plan(2, 2, 3), Plan(3)], ids=lambda p: p.name)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_the_targets(target, plan, temperature):
    prompts, drafter = [PROMPT, [4, 6, 10], [17, 4, 21, 6]], Lookahead(3, 3, 8, text=True)
    options = {"max_new_tokens": 30, "sampler": Sampler(temperature), "seed": 3}
    plain = generate(target, None, prompts, **options).outputs
    drafted = generate(target, drafter, prompts, plan=plan, **options).outputs
    assert [o.tokens for o in drafted] == [o.tokens for o in plain]
    assert all(max(o.drafted) <= plan.nodes for o in drafted)
    assert sum(map(sum, (o.accepted for o in drafted))) > 0 or temperature
    assert "rejected tokens" in why_inexact(plan, Sampler(temperature), drafter)
