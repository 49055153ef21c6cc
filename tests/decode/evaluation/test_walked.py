"""Replay of drafters whose drafts depend on earlier rounds walks through the rounds of stored answers."""

from __future__ import annotations

import random

import pytest
import torch
from exact import Grown

from decode.evaluation.replay import Rollout, replay, why_inexact
from decode.generation.generate import generate
from decode.generation.types import Traits
from decode.plan import Plan
from decode.sampling import Sampler

PLANS = [Plan(depth=3), Plan(depth=3, width=2, nodes=5), Plan(tree=((0,), (1,), (0, 0), (1, 0)))]
SAMPLERS = [Sampler(0.0), Sampler(0.8)]


class Forgetful(Grown):
    """A drafter that says it remembers, and does not."""

    def depends_on_rounds(self, plan):
        return True


class Counting:
    """Drafts differently in every round of a request: replay from all places could not know."""

    traits = Traits()

    def depends_on_rounds(self, plan):
        return True

    def __init__(self, drafter) -> None:
        self.drafter = drafter

    def new_state(self, rows):
        return [self.drafter.new_state(rows), [0] * rows]

    def advance(self, state, target, tokens, taps, counts, root):
        self.drafter.advance(state[0], target, tokens, taps, counts, root)
        state[1] = [n + c for n, c in zip(state[1], counts, strict=True)]
        state[1] = [n * 7 % 5 for n in state[1]]

    def select(self, state, rows):
        self.drafter.select(state[0], rows)
        state[1] = [state[1][r] for r in rows]

    def propose(self, state, target, sampler, coin, plan):
        draft = self.drafter.propose(state[0], target, sampler, coin, plan)
        odd = torch.tensor(state[1])[:, None] % 2 == 1
        return type(draft)(
            draft.tokens.masked_fill(odd, -1), draft.parents, draft.depth, is_chain=draft.is_chain
        )


def texts(target, sampler, count=9, length=14):
    dice = random.Random(3)
    prompts = [[dice.randrange(5) for _ in range(dice.randint(1, 6))] for _ in range(count)]
    outputs = generate(target, None, prompts, max_new_tokens=length, sampler=sampler, stop=[4], seed=2)
    return [Rollout(p, o.tokens) for p, o in zip(prompts, outputs.outputs, strict=True)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)
@pytest.mark.covering
def test_without_memory_walking_is_replay_from_all_places(tiny_target, plan, sampler):
    target = tiny_target(vocab=5)
    rollouts = texts(target, sampler)
    (want,) = replay(target, Grown(5), rollouts, [plan], sampler)
    (got,) = replay(target, Forgetful(5), rollouts, [plan], sampler, batch_size=4)
    assert got.counts == want.counts
    assert (got.reached == want.reached).all()
    assert sum(want.counts.rounds) < sum(want.counts.tokens)  # something was kept


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("plan", PLANS[:2], ids=lambda p: p.name)
@pytest.mark.covering
def test_with_memory_walking_is_what_the_decoder_does(tiny_target, plan, sampler):
    target, drafter = tiny_target(vocab=5), Counting(Grown(5))
    rollouts = texts(target, sampler)
    options = {"max_new_tokens": 14, "sampler": sampler, "plan": plan, "stop": [4], "seed": 2}
    outputs = generate(target, drafter, [r.prompt for r in rollouts], **options).outputs
    assert [o.tokens for o in outputs] == [r.answer for r in rollouts]
    (one,) = replay(target, drafter, rollouts, [plan], sampler)
    assert one.counts.rounds == [len(o.emitted) for o in outputs]
    assert one.counts != replay(target, Grown(5), rollouts, [plan], sampler)[0].counts


def test_drawn_drafts_with_a_memory_are_counted_by_the_decoder():
    sampled = Plan(depth=2, proposal="sampled")
    assert "earlier rounds" in why_inexact(sampled, Sampler(1.0), Forgetful(3))
    assert not why_inexact(sampled, Sampler(1.0), Grown(3))
    assert not why_inexact(PLANS[1], Sampler(1.0), Forgetful(3))
