"""Union: which of the two drafters drafts in a round, and what the first reads later."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from faces import CHAIN, ROUNDING, SAMPLED, TREE, Follower, V, both, equal, may_be_first, paths

from decode.evaluation.replay import Rollout, replay
from decode.generation.generate import generate
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.models import union as union_module
from drafters.models.ngram import Ngram
from drafters.models.union import Union

UNLIKE = torch.arange(V)[None]  # no token twice: nothing to look up
REPEATED = torch.tensor([[5, 1, 2, 3, 9, 1, 2, 4] * 5])
RAGGED = [(9, 12), (3, 1), (1, 4), (2, 2)]
OFTEN = 0.2  # tokens, which any match of Ngram(2, 3) is expected to bring


def united(
    tiny_target,
    make_drafter,
    alone: float | None = OFTEN,
    depth: int | None = None,
    first: str = "eagle",
) -> tuple[Target, Union]:
    target, drafter = both(tiny_target, make_drafter, first)
    return target, Union(drafter, Ngram(2, 3), alone, depth, 1.0)


def calls_of(monkeypatch, drafter) -> list[str]:
    """Names of the calls that a drafter gets from now on."""
    calls = []

    def noted(name, method, *args):
        calls.append(name)
        return method(*args)

    for name in ("propose", "advance"):
        monkeypatch.setattr(drafter, name, partial(noted, name, getattr(drafter, name)))
    return calls


def own(part, target, texts, counts) -> Follower:
    """One of the two by itself, at the same place of the texts."""
    follower = Follower(part, target, texts)
    for count in counts:
        follower.advance(count)
    return follower


# -- who drafts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=lambda p: p.name)
def test_second_that_expects_enough_drafts_without_the_first(tiny_target, make_drafter, monkeypatch, plan):
    target, union = united(tiny_target, make_drafter)
    texts, calls = REPEATED.repeat(2, 1), calls_of(monkeypatch, union.first)
    follower = Follower(union, target, texts)
    for place, counts in enumerate(RAGGED):
        follower.advance(counts)
        draft = follower.propose(plan)
        assert draft.depth
        assert equal(draft, own(union.second, target, texts, RAGGED[: place + 1]).propose(plan))
    assert calls == ["advance"]  # of the prompt


@pytest.mark.parametrize("alone", [None, 99.0], ids=["never", "more than it expects"])
def test_second_that_expects_too_little_leaves_the_round(tiny_target, make_drafter, monkeypatch, alone):
    target, union = united(tiny_target, make_drafter, alone)
    calls = calls_of(monkeypatch, union.first)
    found = paths(Follower(union, target, REPEATED, (9,)).propose(CHAIN), 0)
    assert calls == ["advance", "propose"]
    begin = own(union.first, target, REPEATED, [(9,)]).propose(Plan(1, 3, 3)).tokens[0].tolist()
    assert next(iter(found.keys() - {()}))[:1] in {(token,) for token in begin}


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=lambda p: p.name)
def test_every_row_decides_for_itself(tiny_target, make_drafter, plan):
    target, union = united(tiny_target, make_drafter)
    texts = torch.cat([UNLIKE, REPEATED[:, :V]])
    draft = Follower(union, target, texts, (9, 9)).propose(plan)
    for row, part in enumerate((union.first, union.second)):
        single = own(part, target, texts[row : row + 1], [(9,)]).propose(plan)
        assert paths(draft, row).keys() == paths(single, 0).keys()


# -- what the first reads later ----------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0]], ids=str)
def test_deferred_rounds_give_the_same_drafts(tiny_target, make_drafter, rows):
    target, union = united(tiny_target, make_drafter)
    texts = torch.cat([REPEATED, REPEATED.roll(3, 1), REPEATED.roll(-2, 1)])
    late, at_once = Follower(union, target, texts), Follower(union.first, target, texts)
    for follower in (late, at_once):
        for counts in [(9, 10, 12), (3, 1, 2), (1, 4, 1)]:
            follower.advance(counts)
        follower.select(rows)
        follower.advance([(2, 5, 1)[row] for row in rows])
    assert len(late.state.waiting.rounds) == 3
    assert equal(late.propose(SAMPLED), at_once.propose(SAMPLED), atol=ROUNDING)
    assert not late.state.waiting.rounds
    for follower in (late, at_once):
        follower.advance([1] * len(rows))
    assert equal(late.propose(SAMPLED), at_once.propose(SAMPLED), atol=ROUNDING)


def test_deferred_tokens_are_bounded(tiny_target, make_drafter, monkeypatch):
    monkeypatch.setattr(union_module, "DEFERRED", 7)
    target, union = united(tiny_target, make_drafter)
    follower = Follower(union, target, REPEATED, (9,))
    calls, widths = calls_of(monkeypatch, union.first), []
    for _ in range(6):
        follower.advance((3,))
        widths.append(follower.state.waiting.width)
    assert widths == [3, 6, 0, 3, 6, 0]
    assert calls == ["advance"] * 2
    assert equal(
        follower.propose(SAMPLED), own(union.first, target, REPEATED, [(27,)]).propose(SAMPLED), ROUNDING
    )


# -- decoding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [Sampler(0.0), Sampler(0.8)], ids=str)
@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=lambda p: p.name)
@pytest.mark.parametrize("rule", [(None, None), (0.9, 1)], ids=str)
@pytest.mark.parametrize("second", ["ngram", "suffix"])
@pytest.mark.covering(pairs=True)
def test_replay_counts_the_decoders_rounds(tiny_target, make_drafter, second, plan, rule, sampler):
    target = tiny_target(vocab=5)
    union = Union(make_drafter("eagle", target), make_drafter(second, target), *rule)
    target.tap(union.taps)
    dice = random.Random(3)
    prompts = [[dice.randrange(5) for _ in range(dice.randint(2, 7))] for _ in range(6)]
    options = {"max_new_tokens": 14, "sampler": sampler, "seed": 2}
    plain = generate(target, None, prompts, **options).outputs
    rollouts = [Rollout(prompt, output.tokens) for prompt, output in zip(prompts, plain, strict=True)]
    outputs = generate(target, union, prompts, plan=plan, **options).outputs
    assert [output.tokens for output in outputs] == [rollout.answer for rollout in rollouts]
    (one,) = replay(target, union, rollouts, [plan], sampler)
    assert one.counts.rounds == [len(output.emitted) for output in outputs]
    (firsts,) = replay(target, union.first, rollouts, [plan], sampler)
    assert one.counts != firsts.counts
    single = generate(target, union, prompts[1:2], plan=plan, requests=[1], **options).outputs[0]
    assert (single.tokens, single.emitted) == (outputs[1].tokens, outputs[1].emitted)


def test_every_drafter_may_be_left_out_of_rounds(pair):
    target, drafter = pair
    if not may_be_first(drafter):
        pytest.skip("refused as the first, see test_union")
    union = Union(drafter, Ngram(2, 3), 1.2, 1, 1.0)
    model, options = union.verifier(target), {"max_new_tokens": 40, "sampler": Sampler(0.0)}
    prompts = [REPEATED[0, :9].tolist(), [7], list(range(12))]
    plain = generate(model, None, prompts, **options)
    for plan in (CHAIN, TREE, Plan(1)):
        run = generate(model, union, prompts, plan=plan, **options)
        assert [output.tokens for output in run.outputs] == [output.tokens for output in plain.outputs]


# -- options, and the parts it is made of -------------------------------------------------------------
