"""Synthetic acceptance: texts stay those of plain decoding, and rounds accept what was drawn for them."""

from __future__ import annotations

from functools import partial

import pytest
from scipy.stats import binomtest

from benchmarks.gpu import synthetic
from benchmarks.gpu.synthetic import SyntheticAcceptance, replayed
from decode.errors import UserError
from decode.generation.generate import generate
from decode.generation.types import Generation
from decode.plan import Plan
from decode.sampling import Sampler

RATES = [0.9, 0.6, 0.75]
VOCAB, LENGTH = 64, 48
PROMPTS = [[i, 2 * i + 1, *range(i % 3)] for i in range(1, 7)]
PLANS = {"chain": Plan(depth=3), "tree": Plan(depth=3, width=3, nodes=9)}
UNIMPORTANT = 1e-4  # p of an exact test; the draws are seeded


@pytest.fixture(scope="module")
def parts(tiny_target, make_drafter):
    target = tiny_target(vocab=VOCAB, layers=2, hidden=16)
    return target, make_drafter("eagle", target)


def decoding(parts, temperature=0.0, **more):
    options = {"max_new_tokens": LENGTH, "sampler": Sampler(temperature), "seed": 3, "batch_size": 1}
    return partial(generate, parts[0], **options | {"prompts": PROMPTS} | more)


def tokens(out: Generation):
    return [output.tokens for output in out.outputs]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_texts_are_plain_and_rounds_accept_what_was_drawn(parts, plan, temperature):
    decode = decoding(parts, temperature)
    proposer, differ = replayed(decode, *parts, plan, PROMPTS, RATES, seed=5)
    out = decode(proposer, plan=plan)
    assert differ == 0
    assert tokens(out) == tokens(decode(None, plan=Plan()))
    for drawn, output in zip(proposer._lengths.tolist(), out.outputs, strict=True):
        place = 1  # the first token is the prefill's
        for accepted in output.accepted[:-1]:  # the last is cut by the end of the text
            assert accepted == drawn[place]
            place += accepted + 1


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_each_depth_is_accepted_at_its_rate(parts, plan):
    prompts = [[a, b] for a in range(1, 9) for b in range(1, 8)]
    decode = decoding(parts, prompts=prompts, batch_size=None)
    proposer, _ = replayed(decode, *parts, plan, prompts, RATES, seed=5)
    outputs = decode(proposer, plan=plan).outputs
    accepted = [a for output in outputs for a in output.accepted[:-1]]
    assert len(accepted) > 800
    for depth, rate in enumerate(RATES, 1):
        tried, hit = sum(a >= depth - 1 for a in accepted), sum(a >= depth for a in accepted)
        assert binomtest(hit, tried, rate).pvalue > UNIMPORTANT, (depth, hit / tried)
        assert binomtest(hit, tried, rate - 0.15).pvalue < UNIMPORTANT, "the test sees another rate"


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_rows_of_a_batch_accept_what_they_accept_alone(parts, plan):
    """They end at different times, and others join."""
    decode = decoding(parts)
    proposer, _ = replayed(decode, *parts, plan, PROMPTS, RATES, seed=5)
    alone, together = (decode(proposer, plan=plan, batch_size=size) for size in (1, 4))
    assert [o.accepted for o in alone.outputs] == [o.accepted for o in together.outputs]
    assert tokens(alone) == tokens(together)


def test_a_text_that_leaves_the_plain_one_is_decoded_again(parts):
    """As in bf16, where a pass over a draft rounds in another way."""
    plan, decode = PLANS["chain"], decoding(parts)

    def rounding(proposer, **options):
        out = decode(proposer, **options)
        if proposer is None:
            out.outputs[2].tokens[9] += 1
        return out

    proposer, differ = replayed(rounding, *parts, plan, PROMPTS, RATES, seed=5)
    assert differ == 1
    assert tokens(decode(proposer, plan=plan)) == tokens(decode(None, plan=Plan()))


def test_texts_that_do_not_repeat_are_refused(parts, monkeypatch):
    monkeypatch.setattr(synthetic, "TRIES", 3)
    seeds = iter(range(200))

    def restless(proposer, **options):
        return decoding(parts, temperature=1.0)(proposer, **options | {"seed": next(seeds)})

    with pytest.raises(UserError, match=r"after 3 runs .* does not decode the same text twice"):
        replayed(restless, *parts, PLANS["chain"], PROMPTS, RATES, seed=5)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(depth=4), "3 rates for a draft of depth 4"),
        (Plan(depth=3, proposal="sampled"), "cannot be replaced by the target's tokens"),
        (Plan(depth=3, width=2, nodes=6, proposal="hybrid"), "cannot be replaced by the target's tokens"),
        (Plan(depth=3, min_confidence=0.5), "cannot be replaced by the target's tokens"),
        (Plan(depth=3, rule="typical", lossy=True), "cannot be replaced by the target's tokens"),
    ],
    ids=lambda value: value.name if isinstance(value, Plan) else "",
)
def test_plans_for_which_the_rates_cannot_hold_are_refused(parts, plan, said):
    with pytest.raises(UserError, match=said):
        replayed(decoding(parts), *parts, plan, PROMPTS, RATES, seed=5)


def test_what_cannot_have_rates_is_refused(parts, make_drafter):
    target, drafter = parts
    answers = [[1, 2]] * len(PROMPTS)
    for rates in ([], [1.5], [-0.1]):
        with pytest.raises(UserError, match="give a probability for each depth"):
            SyntheticAcceptance(drafter, PROMPTS, answers, rates, VOCAB, 0)
    with pytest.raises(UserError, match="two prompts are equal"):
        SyntheticAcceptance(drafter, [PROMPTS[0]] * 2, answers[:2], RATES, VOCAB, 0)
    before = target.taps
    with pytest.raises(UserError, match="Lookahead keeps more of a draft than its accepted tokens"):
        SyntheticAcceptance(make_drafter("lookahead", target), PROMPTS, answers, RATES, VOCAB, 0)
    target.tap(before)
