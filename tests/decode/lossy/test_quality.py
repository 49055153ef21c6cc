"""Measured divergence of lossy texts is what enumeration finds."""

import math
from collections import defaultdict

import pytest
import torch
from exact import EXACT, FixedTrees, Grown, exact_probs, target_probs
from exact import EnumeratingCoin as Coin

from decode.evaluation.quality import DeviationMeter, mean_log_likelihood
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


CASES = [(rule, shape) for rule in RULES for shape in ("drawn", "fixed")]
CASES.remove(("lenience", "fixed"))  # it weighs drawn tokens


@pytest.mark.parametrize(("rule", "shape"), CASES)
def test_divergence_is_that_of_whole_texts(tiny_target, rule, shape):
    """By the chain rule the mean of the sums over tokens is KL(texts of the rule || texts of the target)."""
    drawn = shape == "drawn" or rule == "sprint"
    kind = {**CHAIN, "proposal": "sampled"} if shape == "drawn" else CHAIN if drawn else TREE
    drafter = Grown(V) if shape == "drawn" else FixedTrees(V)
    target, plan, sampler = tiny_target(), plan_of(rule, **kind), Sampler(0.8)

    def play(tapes):
        prompts = [PROMPT] * len(tapes)
        meter = DeviationMeter(plan.rule, sampler, prompts)
        options = {"max_new_tokens": LENGTH, "sampler": sampler, "plan": plan, "on_round": meter}
        outputs = generate(target, drafter, prompts, coin=Coin(tapes), **options).outputs
        assert meter.kl is not None
        pairs = zip(outputs, meter.divergence, strict=True)
        return [(*output.tokens, round(divergence, 13)) for output, divergence in pairs]

    measured, texts = 0.0, defaultdict(float)
    for (*text, divergence), mass in exact_probs(play, abreast=256).items():
        texts[tuple(text)] += mass
        measured += mass * divergence
    plain = target_probs(target.model, PROMPT, LENGTH, sampler)
    whole = sum(mass * math.log(mass / plain[text]) for text, mass in texts.items() if mass > 0)
    assert whole > 1e-5
    assert abs(measured - whole) < EXACT


def test_changed_tokens_are_counted_at_temperature_0(tiny_target):
    """By a rule without room no token changes; with room some do."""
    target, found = tiny_target(), {}
    for rollback in (0.0, 20.0):
        plan = Plan(2, rule={"name": "bild", "rollback": rollback}, lossy=True)
        meter = DeviationMeter(plan.rule, Sampler(0.0), [PROMPT])
        options = {"max_new_tokens": 30, "sampler": meter.sampler, "plan": plan, "on_round": meter}
        generate(target, FixedTrees(V), [PROMPT], **options)
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


def test_no_divergence_where_no_formula_is_known(tiny_target):
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


def test_scorecard_has_the_quality_of_lossy_rows(tiny_target):
    target, prompts = tiny_target(vocab=6), [[1, 4], [2, 0, 3], [5]]
    lossy = Plan(2, 2, 4, rule="topk", lossy=True)
    settings = [Setting(Sampler(t), plan) for t in (0.0, 1.0) for plan in (Plan(2), lossy)]
    plain = generate(target, None, prompts, max_new_tokens=12, sampler=Sampler(0.0)).outputs
    rollouts = {Sampler(0.0): [Rollout(p, o.tokens) for p, o in zip(prompts, plain, strict=True)]}
    asked = []

    def judge(index, answer):
        asked.append((index, tuple(answer)))
        return float(list(answer) == plain[index].tokens)

    options = ScoreOptions(max_new_tokens=12, audit_prompts=1, judge=judge)
    card = score(target, Grown(6), HeldOut(prompts, rollouts=rollouts), settings, options)
    assert [row.quality is not None for row in card.rows] == [False, True, False, True]
    cold, warm = card.rows[1].quality, card.rows[3].quality
    assert (cold.kl, warm.changed) == (None, None)
    assert min(cold.changed, warm.kl) > 0
    assert cold.judge < cold.plain_judge == 1.0
    assert len(asked) == 2 * 2 * len(prompts)
    texts = [o.tokens for o in plain]
    assert cold.plain_log_likelihood == mean_log_likelihood(target, prompts, texts) != cold.log_likelihood
    assert type(card).from_json(card.to_json(), "here").rows[1].quality == cold
