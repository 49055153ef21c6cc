"""Lookahead decoding: Jacobi iterations, the pool and the target's texts; token recycling."""

from __future__ import annotations

import pytest
import torch
from drafter_checks import Follower, assert_decodes_as_trained, both, equal, random_rollouts

from decode.evaluation.replay import why_inexact
from decode.generation.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.zoo import recycle
from drafters.zoo.lookahead import Lookahead
from drafters.zoo.recycle import RECENT

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


# -- token recycling -------------------------------------------------------------------------------


@pytest.fixture
def made(tiny_target, make_drafter):
    return both(tiny_target, make_drafter, "recycle", pairs=False)


def test_newest_places_of_a_token_count_most(made):
    """Texts of three tokens, each of them more often in a text than places count."""
    target, drafter = made
    texts = torch.randint(3, (2, 60), generator=torch.Generator().manual_seed(0))
    assert all(texts[0].eq(token).sum() > RECENT for token in range(3))
    assert_decodes_as_trained(drafter, target, texts, [(40, 12), (3, 20), (1, 4), (4, 1)])


def test_long_prompt_is_scored_in_pieces(made, monkeypatch):
    target, drafter = made
    texts = torch.randint(20, (2, 30), generator=torch.Generator().manual_seed(1))
    whole = Follower(drafter, target, texts, (25, 21)).propose(Plan(3, 3, 8))
    monkeypatch.setattr(recycle, "LOGITS", 2 * target.vocab_size * 4)  # four places at once
    widths, call = [], type(target.head).__call__
    monkeypatch.setattr(
        type(target.head), "__call__", lambda self, h: widths.append(h.shape[1]) or call(self, h)
    )
    assert equal(whole, Follower(drafter, target, texts, (25, 21)).propose(Plan(3, 3, 8)))
    assert widths[:7] == [4] * 6 + [2]  # the prompt's longest row and one column of padding


def test_pairs_are_counted_only_if_asked(tiny_target, make_drafter, made):
    _, drafter = made
    assert not drafter.needs_fit
    assert drafter.fit(random_rollouts(40)) == "nothing is counted or trained"
    assert not drafter.seen.any()
    _, counting = both(tiny_target, make_drafter, "recycle")
    assert counting.needs_fit
    assert "pairs counted" in counting.fit(random_rollouts(40))
