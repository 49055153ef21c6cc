"""Replay computes, without random draws, what the decoder does on the same text; sums over its rounds."""

import math
import random

import numpy as np
import pytest
import torch
from drafter_checks import able
from exact import EXACT, EnumeratingCoin, Grown, exact_probs, target_probs

from decode.evaluation.estimates import decoded_counts, kaplan_meier
from decode.evaluation.replay import Counts, Rollout, RoundStarts, agreement, by_context, replay, why_inexact
from decode.generation.generate import generate
from decode.generation.types import Observes, Output, Traits
from decode.plan import Plan
from decode.sampling import Sampler

CHAIN, SAMPLED = Plan(depth=2), Plan(depth=2, proposal="sampled")
DYNAMIC = Plan(depth=2, width=2, nodes=4)
STATIC = Plan(tree=((0,), (1,), (0, 0)))
HYBRID = Plan(tree=((0,), (1,), (1, 0)), proposal="hybrid")
MORE = [
    Plan(depth=2, proposal="sampled", draft_temperature=1.3),
    Plan(depth=2, min_confidence=0.3),
    Plan(depth=2, proposal="sampled", min_confidence=0.3),
    Plan(depth=2, proposal="sampled", rule="match"),
    Plan(tree=HYBRID.tree, proposal="hybrid", rule="match"),
]
PROMPT = [1, 2, 0, 1]


def written(target, sampler, vocab=5, count=9, length=14, stop=(4,), seed=2) -> list[Rollout]:
    """Plain answers to random prompts."""
    dice = random.Random(3)
    prompts = [[dice.randrange(vocab) for _ in range(dice.randint(1, 6))] for _ in range(count)]
    options = {"max_new_tokens": length, "sampler": sampler, "stop": stop, "seed": seed}
    outputs = generate(target, None, prompts, **options).outputs
    return [Rollout(p, o.tokens) for p, o in zip(prompts, outputs, strict=True)]


@pytest.mark.parametrize(
    "sampler", [Sampler(0.0), Sampler(0.7), Sampler(1.0, repetition_penalty=1.4)], ids=str
)
@pytest.mark.parametrize("plan", [CHAIN, SAMPLED, DYNAMIC, STATIC, HYBRID, *MORE], ids=lambda p: p.name)
@pytest.mark.covering
def test_replayed_rounds_and_survival_are_those_of_the_enumerated_decoder(tiny_target, plan, sampler):
    target, drafter, stop = tiny_target(), Grown(3, 1), [2]
    length = 4 if plan.proposal == "fixed" else 3
    options = {"max_new_tokens": length, "sampler": sampler, "plan": plan, "stop": stop}

    def play(tapes):
        coin = EnumeratingCoin(tapes)
        outputs = generate(target, drafter, [PROMPT] * len(tapes), coin=coin, **options).outputs
        return [(tuple(o.tokens), tuple(o.emitted), tuple(o.accepted)) for o in outputs]

    assert not why_inexact(plan, sampler)
    rounds, kept, tried = 0.0, np.zeros(plan.depth), np.zeros(plan.depth)
    for (_, emitted, accepted), chance in exact_probs(play, abreast=64).items():
        rounds += chance * len(emitted)
        for e, a in zip(emitted, accepted, strict=True):
            kept[: min(a, e)] += chance  # what is accepted behind the end of the text is not of it
            tried[:e] += chance
    texts = target_probs(target.model, PROMPT, length, sampler, stop)
    rollouts = [Rollout(PROMPT, list(text)) for text in texts]
    expected, counts = 0.0, np.zeros((2, plan.depth))
    for rollout, chance in zip(rollouts, texts.values(), strict=True):
        (one,) = replay(target, drafter, [rollout], [plan], sampler)
        expected += chance * one.counts.rounds[0]
        counts += chance * one.reached[:, 1:]
    assert abs(expected - rounds) < EXACT
    np.testing.assert_allclose(counts, [kept, tried], rtol=0, atol=EXACT)
    if sampler.temperature:  # something was kept
        assert rounds < sum(chance * (len(t) - 1) for t, chance in texts.items()) - 0.02


@pytest.mark.parametrize("sampler", [Sampler(0.0), Sampler(0.8)], ids=str)
def test_starts_that_no_round_can_have_change_nothing(tiny_target, sampler):
    target, drafter = tiny_target(vocab=5), Grown(5)
    rollouts = [*written(target, sampler), Rollout([1, 2], [3])]
    plans = [CHAIN, Plan(), DYNAMIC, STATIC, MORE[1], SAMPLED]
    done: list[int] = []
    few = replay(target, drafter, rollouts, plans, sampler, batch_size=4, progress=done.append)
    every = replay(target, drafter, rollouts, plans, sampler, batch_size=4, every_start=True)
    for plan, one, other in zip(plans, few, every, strict=True):
        assert one.counts == other.counts
        assert one.survival == other.survival
        assert by_context(rollouts, one.keeps, plan.depth) == by_context(rollouts, other.keeps, plan.depth)
    assert sum(keep.sum() for keep in few[0].keeps) < sum(keep.sum() for keep in every[0].keeps)
    assert done == sorted(done)
    assert done[-1] == len(rollouts) * len(plans)


def test_rollouts_are_replayed_in_a_batch_as_one_by_one(tiny_target):
    target, drafter, sampler = tiny_target(vocab=5), Grown(5), Sampler(0.8)
    rollouts = written(target, sampler)
    assert len({len(r.answer) for r in rollouts}) > 3
    plans = [SAMPLED, Plan(depth=3, width=2, nodes=6), HYBRID]
    together = replay(target, drafter, rollouts, plans, sampler, batch_size=4)
    for n, plan in enumerate(plans):
        single = [replay(target, drafter, [r], [plan], sampler)[0] for r in rollouts]
        assert together[n].counts.tokens == [len(r.answer) - 1 for r in rollouts]
        for i, one in enumerate(single):
            assert together[n].counts.rounds[i] == pytest.approx(one.counts.rounds[0], abs=EXACT)
        assert 1 < together[n].counts.tau < plan.depth + 1
        assert together[n].survival == sorted(together[n].survival, reverse=True)


@pytest.mark.parametrize("temperature", [0.0, 0.7, pytest.param(1.0, marks=pytest.mark.proof)])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(3),
        Plan(3, proposal="sampled"),
        Plan(3, 3, 8),
        Plan(tree=((0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0)), proposal="hybrid"),
    ],
    ids=lambda p: p.name,
)
@pytest.mark.covering
@pytest.mark.states
def test_replay_and_decoder_agree_for_every_drafter(
    tiny_target, make_drafter, drafter_name, plan, temperature
):
    target = tiny_target(vocab=12)
    drafter = able(make_drafter(drafter_name, target), plan)
    target = drafter.verifier(target)
    if isinstance(drafter, Observes):
        pytest.skip(why_inexact(plan, Sampler(temperature), drafter))
    sampler = Sampler(temperature)
    rollouts = written(target, sampler, 12, 24, 12, stop=[11], seed=3)
    (replayed,) = replay(target, drafter, rollouts, [plan], sampler)
    options = {"max_new_tokens": 12, "sampler": sampler, "stop": [11], "seed": 3, "plan": plan}
    decoder = counts_of(generate(target, drafter, [r.prompt for r in rollouts], **options).outputs)
    # About a hundred cases draw, each with other coins: 99 % for all of them together.
    low, high = agreement(decoder, replayed.counts, confidence=1 - 1e-4)
    assert low <= 0 <= high
    if plan.rule == "match":  # the same text, so the same rounds
        assert decoder.rounds == pytest.approx(replayed.counts.rounds)


def test_drafter_whose_state_is_wrong_in_decoding_disagrees(tiny_target):
    target = tiny_target(vocab=12)

    class Knowing(Grown):
        def logits(self, text):
            return target.head(target.read(torch.tensor([text])).last)[0, -1]

    class Forgetful(Knowing):
        def advance(self, state, target, tokens, taps, counts, root):
            super().advance(state, target, tokens, taps, counts, root)
            self.joined = any(count > 1 for count in counts)  # which replay never sees past the prompt

        def logits(self, text):
            return super().logits(text[:1] if self.joined else text)

    rollouts = written(target, Sampler(0.7), 12, 16, 12, stop=())

    def difference(drafter):
        options = {"max_new_tokens": 12, "sampler": Sampler(0.7), "plan": SAMPLED}
        run = generate(target, drafter, [r.prompt for r in rollouts], **options).outputs
        (replayed,) = replay(target, drafter, rollouts, [SAMPLED], Sampler(0.7))
        return agreement(counts_of(run), replayed.counts)

    low, high = difference(Knowing(12))
    assert low <= 0 <= high
    assert difference(Forgetful(12))[1] < 0


def counts_of(outputs) -> Counts:
    return Counts([sum(o.emitted) for o in outputs], [float(len(o.emitted)) for o in outputs])


def test_counts_that_differ_by_rounding_agree():
    tokens = [3, 3, 3]
    for rounds in ([0.1 + 0.2] * 3, [0.3] * 3):
        low, high = agreement(Counts(tokens, [0.3] * 3), Counts(tokens, rounds))
        assert low <= 0 <= high
    low, _ = agreement(Counts(tokens, [1.0] * 3), Counts(tokens, [1.0 + 1e-9] * 3))
    assert low > 0
    one_prompt = agreement(Counts([9], [3.0]), Counts([9], [4.0]))
    assert one_prompt == [-float("inf"), float("inf")]


def test_plans_whose_rounds_depend_on_more_than_the_text_are_named():
    warm, cold, dynamic = Sampler(1.0), Sampler(0.0), Plan(3, 2, 6, proposal="hybrid")
    rules = ("match", "recursive", "traversal", "select")
    several = [Plan(depth=2, proposal="sampled", drafts=4, rule=rule) for rule in rules]
    for plan, sampler, word in [
        (Plan(2, proposal="sampled", rule="block"), warm, "block"),
        (Plan(tree=HYBRID.tree, proposal="hybrid", rule="traversal"), warm, "traversal"),
        (dynamic, warm, "shape"),
        (Plan(tree=STATIC.tree, proposal="sampled"), warm, "siblings"),
        (Plan(2, rule="typical", lossy=True), warm, "distribution"),
        (Plan(2, 2, 4, proposal="hybrid", draft_temperature=1.0), cold, "drawn"),
        *((plan, sampler, "drafts") for plan in several for sampler in (warm, cold)),
    ]:
        assert word in why_inexact(plan, sampler)
    for plan, sampler in [(dynamic, cold), (Plan(2, proposal="sampled", draft_temperature=1.0), cold)]:
        assert not why_inexact(plan, sampler)
    assert "earlier rounds" in why_inexact(SAMPLED, warm, Forgetful(3))
    assert not why_inexact(SAMPLED, warm, Grown(3))
    assert not why_inexact(PLANS[1], warm, Forgetful(3))


def test_answers_of_one_token_and_plain_decoding(tiny_target):
    rollouts = [Rollout([1, 2], [0, 1, 2]), Rollout([1], [2])]
    (plain,) = replay(tiny_target(), Grown(3), rollouts, [Plan()], Sampler(0.0))
    assert plain.counts == Counts([2, 0], [2.0, 0.0])
    assert plain.survival == []
    (one,) = replay(tiny_target(), Grown(3), rollouts[1:], [CHAIN], Sampler(0.0))
    assert one.counts == Counts([0], [0.0])
    assert one.counts.tau == 0
    assert torch.isfinite(torch.tensor(one.survival)).all()


# -- drafts that depend on earlier rounds ------------------------------------------------------------


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


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)
@pytest.mark.covering
def test_without_memory_walking_is_replay_from_all_places(tiny_target, plan, sampler):
    target = tiny_target(vocab=5)
    rollouts = written(target, sampler)
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
    rollouts = written(target, sampler)
    options = {"max_new_tokens": 14, "sampler": sampler, "plan": plan, "stop": [4], "seed": 2}
    outputs = generate(target, drafter, [r.prompt for r in rollouts], **options).outputs
    assert [o.tokens for o in outputs] == [r.answer for r in rollouts]
    (one,) = replay(target, drafter, rollouts, [plan], sampler)
    assert one.counts.rounds == [len(o.emitted) for o in outputs]
    assert one.counts != replay(target, Grown(5), rollouts, [plan], sampler)[0].counts


# -- tau by context length ---------------------------------------------------------------------------


DICE = np.random.default_rng(0)


def rollout(prompt: int, answer: int) -> Rollout:
    return Rollout([1] * prompt, [2] * answer)


def test_rounds_are_counted_by_the_context_that_they_begin_behind():
    """Known chains: all is accepted in one text, and nothing in the other."""
    rollouts = [rollout(100, 61), rollout(250, 21)]
    keeps = [np.ones((60, 4)), np.zeros((20, 4))]
    parts = by_context(rollouts, keeps, 4)
    # Rounds of the first text begin behind 101, 106, ..., 156 tokens; of the second behind 251, ..., 270.
    found = [(part.low, part.high, part.rounds, part.tokens) for part in parts]
    assert found == [(0, 128, 6, 30), (128, 256, 6 + 5, 30 + 5), (256, 512, 15, 15)]
    assert [part.tau for part in parts] == pytest.approx([5, 35 / 11, 1])


def test_the_parts_add_up_to_the_replay():
    lengths = [(int(DICE.integers(1, 700)), int(DICE.integers(1, 90))) for _ in range(20)]
    rollouts = [rollout(*pair) for pair in lengths]
    keeps = [DICE.uniform(size=(answer - 1, 3)) for _, answer in lengths]
    parts = by_context(rollouts, keeps, 3)
    assert sum(part.tokens for part in parts) == pytest.approx(sum(answer - 1 for _, answer in lengths))
    assert sum(part.rounds for part in parts) == pytest.approx(sum(RoundStarts(k, 3).count for k in keeps))
    assert all(part.low < part.high for part in parts)


def test_answers_of_one_token_have_no_rounds():
    assert by_context([rollout(5, 1)], [np.zeros((0, 3))], 3) == []
    assert by_context([], [], 3) == []


# -- survival ----------------------------------------------------------------------------------------


ALPHA, DEPTH = 0.8, 4
TRUE = [ALPHA**j for j in range(1, DEPTH + 1)]  # 0.8, ..., 0.4096
LENGTHS = (8, 16, 32, 64)
SIGMAS = 4.5  # a correct estimate is outside once in 150,000


def simulated(dice: random.Random, length: int, depth: int = DEPTH, end: float = 0.0) -> Output:
    """One answer of so many tokens, each of which a draft has with chance ALPHA, and ends it with `end`."""
    found, left = Output([0]), length - 1
    while left and not found.stopped:
        accepted = next((j for j in range(depth) if dice.random() >= ALPHA), depth)
        emitted = min(accepted + 1, left)
        stop = next((j for j in range(emitted) if dice.random() < end), None)
        found.stopped, emitted = stop is not None, emitted if stop is None else stop + 1
        found.accepted.append(accepted)
        found.emitted.append(emitted)
        found.draft_lengths.append(depth)
        left -= emitted
    return found


def bounds(counts: np.ndarray) -> list[float]:
    """Greenwood's standard errors of s_j, by the true alpha."""
    terms = np.cumsum((1 - ALPHA) / (ALPHA * counts[1, 1:]))
    return [s * math.sqrt(t) for s, t in zip(TRUE, terms, strict=True)]


@pytest.mark.parametrize("end", [0.0, 0.05], ids=["length", "end tokens"])
@pytest.mark.parametrize("length", LENGTHS)
def test_survival_of_decoding_is_the_truth_at_every_length(length, end):
    dice = random.Random(length)
    counts = decoded_counts([simulated(dice, length, end=end) for _ in range(80_000 // length)], DEPTH)
    for found, true, error in zip(kaplan_meier(counts), TRUE, bounds(counts), strict=True):
        assert abs(found - true) < SIGMAS * error < 0.03, (found, true, error)


@pytest.mark.parametrize("length", [2, 3, *LENGTHS])
def test_survival_of_replay_is_exactly_the_truth(length):
    starts = length - 1
    keep = np.full((starts, DEPTH), ALPHA)
    for t in range(starts):
        keep[t, starts - t :] = 0.0  # behind the end of the text
    known = min(DEPTH, starts)
    found = kaplan_meier(RoundStarts(keep, DEPTH).reached)
    np.testing.assert_allclose(found[:known], TRUE[:known], rtol=1e-12)
    assert found[known:] == [0.0] * (DEPTH - known), "no text has such a place"


def test_no_rounds_have_survival_zero():
    assert kaplan_meier(np.zeros((2, 3))) == [0.0, 0.0]
    assert kaplan_meier(np.ones((2, 1))) == []
