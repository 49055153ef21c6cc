"""What lossy rules do to a text: measured as what enumeration finds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from exact import EXACT, FixedTrees, Grown, exact_law
from exact import EnumeratingCoin as Coin

from decode.evaluation.quality import DeviationMeter, mean_log_likelihood, quality
from decode.evaluation.replay import Rollout
from decode.evaluation.score import HeldOut, ScoreOptions, Setting, score
from decode.generation.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler

V, LENGTH = 3, 3
PROMPT = [1, 0, 2]
CHAIN = {"depth": 2}
TREE = {"depth": 2, "width": 2, "nodes": 5}
RULES = {
    "topk": {"top": 2, "ratio": 0.3},
    "topk within": {"top": 2, "ratio": 0.3, "within": (2, 1)},
    "bild": {"rollback": 1.2},
    "sprint": {},
    "typical": {},
    "threshold": {"threshold": 0.3},
    "lenience": {"factor": 0.4},
}


def plan_of(rule: str, **shape) -> Plan:
    named = {"name": rule.split()[0], **RULES[rule]}
    return Plan(rule=named, lossy=True, min_confidence=0.01 * (rule == "sprint"), **shape)


def laws(target, drafter, plan, sampler):
    """The rule's law of texts, each with what the meter says of it, and the target's law."""

    def decode(drafter, tapes, **more):
        prompts = [PROMPT] * len(tapes)
        return generate(
            target, drafter, prompts, max_new_tokens=LENGTH, sampler=sampler, coin=Coin(tapes), **more
        )

    def play(tapes):
        meter = DeviationMeter(plan.rule, sampler, [PROMPT] * len(tapes))
        run = decode(drafter, tapes, plan=plan, on_round=meter)
        assert meter.kl is not None
        pairs = zip(run.outputs, meter.divergence, strict=True)
        return [(*output.tokens, round(divergence, 13)) for output, divergence in pairs]

    def plainly(tapes):
        return [tuple(output.tokens) for output in decode(None, tapes).outputs]

    return exact_law(play, abreast=256), exact_law(plainly, abreast=64)


CASES = [(rule, shape) for rule in RULES for shape in ("drawn", "fixed")]
CASES.remove(("lenience", "fixed"))  # it weighs drawn tokens


@pytest.mark.parametrize(("rule", "shape"), CASES)
def test_the_divergence_is_that_of_whole_texts(tiny_target, rule, shape):
    """By the chain rule the mean of the sums over tokens is KL(law of texts || target's law of texts)."""
    drawn = shape == "drawn" or rule == "sprint"
    kind = {**CHAIN, "proposal": "sampled"} if shape == "drawn" else CHAIN if drawn else TREE
    drafter = Grown(V) if shape == "drawn" else FixedTrees(V)
    sampler = Sampler(0.8)
    told, target_law = laws(tiny_target(), drafter, plan_of(rule, **kind), sampler)
    text_law: dict[tuple, float] = {}
    for (*text, _), mass in told.items():
        text_law[tuple(text)] = text_law.get(tuple(text), 0.0) + mass
    whole = sum(mass * math.log(mass / target_law[text]) for text, mass in text_law.items() if mass > 0)
    measured = sum(mass * line[-1] for line, mass in told.items())
    assert whole > 1e-5
    assert abs(measured - whole) < EXACT


def test_lossless_texts_are_the_targets_likeliest(tiny_target):
    """At temperature 0, by a rule without room; with room, some tokens are not."""
    target, found = tiny_target(), {}
    for rollback in (0.0, 20.0):
        plan = Plan(2, rule={"name": "bild", "rollback": rollback}, lossy=True)
        meter = DeviationMeter(plan.rule, Sampler(0.0), [PROMPT])
        generate(
            target,
            FixedTrees(V),
            [PROMPT],
            max_new_tokens=30,
            sampler=meter.sampler,
            plan=plan,
            on_round=meter,
        )
        assert meter.kl is None
        found[rollback] = meter.changed
    assert found[0.0] == 0.0
    assert 0.1 < found[20.0] < 1


def test_likelihood_is_the_mean_over_tokens_of_all_answers(tiny_target):
    target = tiny_target()
    prompts, answers = [[1, 0], [2]], [[1, 1, 0], [0]]
    logs = []
    for prompt, answer in zip(prompts, answers, strict=True):
        for i, token in enumerate(answer):
            text = torch.tensor([[*prompt, *answer[:i]]])
            logs.append(float(target.head(target.read(text).last[:, -1]).float().log_softmax(-1)[0, token]))
    assert mean_log_likelihood(target, prompts, answers) == pytest.approx(sum(logs) / 4, rel=1e-6)


def test_where_no_formula_is_known_no_number_is_given(tiny_target):
    """Several drawn siblings; a penalty, whose history a round does not have; a token of no mass."""
    target = tiny_target()

    def kl(plan, sampler):
        meter = DeviationMeter(plan.rule, sampler, [PROMPT])
        generate(target, Grown(V), [PROMPT], max_new_tokens=20, plan=plan, sampler=sampler, on_round=meter)
        return meter.kl

    two = Plan(tree=((0,), (1,)), proposal="sampled", rule="threshold", lossy=True)
    one = Plan(2, proposal="sampled", rule="sprint", lossy=True, min_confidence=0.01)
    assert kl(two, Sampler(1.0)) is None
    assert kl(one, Sampler(1.0, repetition_penalty=1.3)) is None
    assert kl(one, Sampler(1.0)) > 0


def test_a_scorecard_has_it_for_lossy_rows_alone(tiny_target):
    target = tiny_target(vocab=6)
    prompts = [[1, 4], [2, 0, 3], [5]]
    lossy = Plan(2, 2, 4, rule="topk", lossy=True)
    samplers = [Sampler(0.0), Sampler(1.0)]
    settings = [Setting(sampler, plan) for sampler in samplers for plan in (Plan(2), lossy)]
    plain = generate(target, None, prompts, max_new_tokens=12, sampler=Sampler(0.0)).outputs
    rollouts = {Sampler(0.0): [Rollout(p, o.tokens) for p, o in zip(prompts, plain, strict=True)]}
    asked = []

    def judge(index, answer):
        asked.append((index, tuple(answer)))
        return float(index)

    card = score(
        target, Grown(6), HeldOut(prompts, rollouts=rollouts), settings,
        ScoreOptions(max_new_tokens=12, audit_prompts=1, judge=judge),
    )  # fmt: skip
    assert [row.quality is not None for row in card.rows] == [False, True, False, True]
    cold, warm = card.rows[1].quality, card.rows[3].quality
    assert cold.kl is None
    assert cold.changed > 0
    assert warm.kl > 0
    assert warm.changed is None
    assert cold.judge == cold.plain_judge == 1.0  # of indices 0, 1, 2
    assert len(asked) == 2 * 2 * len(prompts)
    texts = [o.tokens for o in plain]
    assert cold.plain_log_likelihood == mean_log_likelihood(target, prompts, texts)
    again = replace(card, rows=card.rows)
    assert type(again).from_json(again.to_json(), "here").rows[1].quality == cold


def test_a_judge_is_asked_of_both_answers(tiny_target):
    target, prompts = tiny_target(), [[1], [2]]
    found = quality(
        target, Plan(1, rule="topk", lossy=True), Sampler(0.0), prompts, [[0], [1]], [[1], [1]],
        lambda on_round: None, lambda index, answer: answer[0],
    )  # fmt: skip
    assert (found.judge, found.plain_judge) == (0.5, 1.0)
    assert found.log_likelihood != found.plain_log_likelihood
