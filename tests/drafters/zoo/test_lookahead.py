"""Lookahead decoding: Jacobi's iterations as the paper has them, and a text that is the target's."""

import pytest
import torch

from decode.errors import UserError
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


def test_without_a_pool_it_is_jacobi_decoding(target):
    """Every guess is what the target says after the guesses before it, a round earlier."""
    drafter, output = watched(target, Plan(3), ngram=2, pool=0)
    assert output.tokens == greedy(target, PROMPT, 40)
    done, checked = 1, 0
    for (before,), (after,), emitted in zip(
        drafter.windows, drafter.windows[1:], output.emitted, strict=False
    ):
        text = [*PROMPT, *output.tokens[:done]]
        accepted = emitted - 1
        for column in range(3 - accepted):
            assert after[column] == greedy(target, [*text, *before[: column + accepted + 1]], 1)[0]
            checked += 1
        done += emitted
    assert checked > 30


def test_a_window_s_rows_are_later_iterations_and_its_columns_enter_the_pool(target):
    drafter, output = watched(target, TREE)
    assert output.tokens == greedy(target, PROMPT, 40)
    done, checked = 1, 0
    for before, after, emitted in zip(drafter.windows, drafter.windows[1:], output.emitted, strict=False):
        text = [*PROMPT, *output.tokens[:done]]
        accepted = emitted - 1
        for column in range(3 - accepted):
            assert after[0][column] == before[1][column + accepted]
            path = [*before[0][: column + accepted + 1], before[1][column + accepted]]
            assert after[1][column] == greedy(target, [*text, *path], 1)[0]
            checked += 1
        done += emitted
    assert checked > 30


def test_n_grams_that_begin_with_the_root_are_drafted_the_newest_first():
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
def test_texts_are_the_target_s_and_a_row_s_does_not_depend_on_others(target, plan, temperature):
    prompts, drafter = [PROMPT, [4, 6, 10], [17, 4, 21, 6]], Lookahead(3, 3, 8, text=True)
    options = {"max_new_tokens": 30, "sampler": Sampler(temperature), "seed": 3}
    plain = generate(target, None, prompts, **options).outputs
    drafted = generate(target, drafter, prompts, plan=plan, **options).outputs
    assert [o.tokens for o in drafted] == [o.tokens for o in plain]
    assert all(max(o.drafted) <= plan.nodes for o in drafted)
    assert sum(map(sum, (o.accepted for o in drafted))) > 0 or temperature
    assert why_inexact(plan, Sampler(temperature), drafter) == (
        "drafts depend on what the target answers to rejected tokens"
    )


def test_a_least_confidence_is_refused_since_there_is_none():
    with pytest.raises(UserError, match="no probabilities to compare"):
        Lookahead(3, 3, 8, text=True).check(Plan(3, min_confidence=0.5))


@pytest.mark.parametrize(("option", "value"), [("columns", 0), ("ngram", 1), ("pool", -1)])
def test_options_out_of_range_are_refused(option, value):
    with pytest.raises(UserError, match=option):
        Lookahead(**({"columns": 3, "ngram": 3, "pool": 8, "text": True} | {option: value}))
