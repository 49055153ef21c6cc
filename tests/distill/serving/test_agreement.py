"""A page of counters against a scorecard: what is read, how far chance may part them, what else may."""

import random
import re

import pytest
from cards import row_of
from fake_engine import ALPHA, PROMPTS, TOKENS, a_row, draw
from metric_pages import SGLANG, VLLM

from decode.errors import UserError
from decode.evaluation.replay import Counts
from distill.serving import metrics as counters
from distill.serving.agreement import compare
from distill.serving.diagnosis import ServerFacts, causes
from distill.serving.endpoint import Model
from distill.serving.metrics import ServedAcceptance

# -- reading the pages ---------------------------------------------------------------------------


def test_vllm_counts_are_summed_over_its_engines():
    older = VLLM.replace("_total{", "{").replace("_total ", " ")
    assert counters.read(older, "there") == counters.read(VLLM, "there")
    reading = counters.read(VLLM, "there")
    assert (reading.engine, reading.model, reading.speculates, reading.depth) == ("vllm", "m", True, 3)
    assert (reading.requests, reading.tokens, reading.started) == (10, 400, 1.79534369213e9)
    found = counters.served_acceptance(reading)
    assert (found.rounds, found.drafted, found.tau) == (150, 450, 1 + 210 / 150)
    assert found.survival == (120 / 150, 70 / 150, 20 / 150)


def test_sglang_counts_rounds_and_no_positions():
    reading = counters.read(SGLANG, "there")
    assert (reading.engine, reading.depth, reading.nodes, reading.requests) == ("sglang", 3, 3, 10)
    found = counters.served_acceptance(reading)
    # 410 tokens, 10 of them the prefills', 200 the target's own.
    assert (found.rounds, found.tau, found.survival) == (200, 2.0, ())


def test_older_sglang_has_only_a_gauge():
    text = "\n".join(line for line in SGLANG.splitlines() if "verify_calls" not in line)
    found = counters.served_acceptance(counters.read(text, "there"))
    assert (found.rounds, found.tau) == (counters.WINDOW, pytest.approx(2.9))
    text = SGLANG.replace('"0"} 4.0', '"0"} 2.0').replace('"0"} 3.0', '"0"} 2.0')
    assert counters.read(text, "there").depth == 1, "of 2 draft tokens, one is the target's own"


def test_histograms_of_answers_are_added_up():
    found = counters.served_acceptance(counters.read(SGLANG, "there"), [[2, 1], [1, 0, 0, 4]])
    assert (found.rounds, found.survival) == (8, (5 / 8, 4 / 8, 4 / 8))
    assert found.tau == 1 + 13 / 8


def test_several_models_have_to_be_told_apart():
    two = VLLM + VLLM.replace('model_name="m"', 'model_name="n"').replace(" 100.0", " 40.0")
    with pytest.raises(UserError, match="counts m, n; choose one with model="):
        counters.read(two, "there")
    assert counters.read(two, "there", "n").rounds == 90
    with pytest.raises(UserError, match="model=o: there counts m, n"):
        counters.read(two, "there", "o")


def test_page_without_the_counters_is_refused():
    for text, said in (
        ('vllm:spec_decode_num_draft_tokens_total{model_name="m"} 5\n', "V0 engine counts no rounds"),
        ("<html><body>Welcome</body></html>", "metrics of neither"),
        ("process_start_time_seconds 1.0\nhttp_requests_total 3\n", "metrics of neither"),
        (VLLM + SGLANG, "metrics of both"),
        ('vllm:spec_decode_num_drafts_total{engine="0" 100.0\n', "invalid metrics"),
        ("vllm:spec_decode_num_drafts_total many\n", "invalid metrics"),
        ("vllm:spec_decode_num_drafts_total NaN\n", "not finite"),
    ):
        with pytest.raises(UserError, match=said):
            counters.read(text, "there")


# -- likely causes -------------------------------------------------------------------------------


def served(survival, rounds=4000.0, drafted=12000.0):
    return ServedAcceptance("vllm", rounds, drafted, 100.0, 1 + sum(survival), tuple(survival), "counters")


def told(survival, drafted=12000.0, **known):
    found = compare(served(survival, drafted=drafted), row_of(a_row()), 0.02)
    facts = {"target": "org/m", "models": [], "model": "m", "trained": 3, "written": 100, "sampled": False}
    return causes(found, ServerFacts(**facts | known))


SAME, LOWER, HIGHER = (0.8, 0.56, 0.336), (0.68, 0.4, 0.2), (0.95, 0.9, 0.8)


@pytest.mark.parametrize(
    ("survival", "known", "said"),
    [
        (SAME, {"models": [Model("m", "")]}, []),
        (SAME, {"models": [Model("alias", "/models/M/")], "model": "alias"}, []),
        (SAME, {"models": [Model("other", "org/other")], "model": "other"}, [r"other \(org/other\)"]),
        (SAME, {"drafted": 6000.0}, ["1.50 tokens where 3 were"]),
        (SAME, {"trained": 5}, ["trained for 5"]),
        ((0.8, 0.1, 0.05), {"trained": 1}, ["", "position 2 is past"]),
        (LOWER, {}, [""]),
        (LOWER, {"written": None}, ["", "held-out prompts"]),
        (LOWER, {"sampled": True}, ["", "sample drafts"]),
        ((0.01, 0.0, 0.0), {}, ["random weights"]),
        ((0.01, 0.0, 0.0), {"sampled": True}, ["random weights", "on a CPU vLLM"]),
        ((0.5, 0.0, 0.0), {"sampled": True}, ["other inputs", "on a CPU vLLM"]),
        ((0.8, 0.1, 0.05), {"sampled": True}, ["position 2 collapses", "on a CPU vLLM"]),
        (HIGHER, {}, ["", "at the temperature"]),
        (HIGHER, {"written": None, "sampled": True}, ["", "a lower temperature"]),
    ],
)
def test_causes_follow_from_what_is_known_of_the_server(survival, known, said):
    for line, text in zip(told(survival, **known), said, strict=True):
        assert re.search(text, line)


# -- noise ---------------------------------------------------------------------------------------


def test_noise_is_what_chance_does():
    """Of many servers of the same drafter, a hundredth at most may be said to differ."""
    row, dice, wrong = a_row(), random.Random(3), 0
    for _ in range(200):
        histograms = [draw(dice, ALPHA, TOKENS)[0] for _ in range(PROMPTS)]
        found = counters.served_acceptance(counters.read(SGLANG, "there"), histograms)
        wrong += not compare(found, row_of(row), 0.0).agrees
    assert wrong <= 8  # the scorecard's own luck is the same in all of them


def test_prompts_that_differ_widen_the_noise():
    """A drafter that some prompts suit, and some do not: rounds of one answer are alike."""
    dice = random.Random(4)

    def answers():
        return [draw(dice, [dice.choice([0.2, 0.95])] * 3, TOKENS) for _ in range(PROMPTS)]

    wrong = naive = 0
    for _ in range(50):
        row, there = a_row(), answers()
        mine = answers()
        counts = Counts([TOKENS - 1] * PROMPTS, [float(n) for _, n in mine])
        survival = [sum(sum(h[j:]) for h, _ in mine) / sum(counts.rounds) for j in (1, 2, 3)]
        row["replay"] |= {"tau": counts.tau, "survival": survival, "counts": counts._asdict()}
        found = counters.served_acceptance(counters.read(SGLANG, "there"), [h for h, _ in there])
        for interval, known in ((counts.interval(), True), ([counts.tau, counts.tau], False)):
            row["replay"]["tau_interval"] = interval
            differs = not compare(found, row_of(row), 0.0).agrees
            wrong, naive = wrong + (differs and known), naive + (differs and not known)
    assert wrong <= 3
    assert naive > 10


def test_same_prompts_have_less_noise():
    """What makes a prompt easy makes it easy for both, at temperature 0."""
    dice, wrong, noise = random.Random(5), 0, []
    for _ in range(100):
        alphas = [[dice.choice([0.2, 0.95])] * 3 for _ in range(PROMPTS)]
        mine, theirs = ([draw(dice, alpha, TOKENS) for alpha in alphas] for _ in range(2))
        row, rounds = a_row(), [float(n) for _, n in mine]
        survival = [sum(sum(h[j:]) for h, _ in mine) / sum(rounds) for j in (1, 2, 3)]
        row["replay"] |= {"survival": survival, "counts": {"tokens": [20] * len(rounds), "rounds": rounds}}
        row["replay"]["tau_interval"] = [2.0, 4.0]
        found = counters.served_acceptance(counters.read(SGLANG, "there"), [h for h, _ in theirs])
        wrong += not compare(found, row_of(row), 0.0, same=True).agrees
        noise.append([compare(found, row_of(row), 0.0, same=same).tau.noise for same in (True, False)])
        row["temperature"] = 1.0
        assert compare(found, row_of(row), 0.0, same=True).tau.noise == noise[-1][1]
    assert wrong <= 5
    assert all(mine < other / 3 for mine, other in noise)


@pytest.mark.proof
def test_rounds_that_an_end_cuts_can_only_put_an_engine_above():
    row = a_row()
    sure = [row["replay"]["tau"]] * 2
    row["replay"] |= {"tau_interval": sure, "counts": {"tokens": [20] * 10**6, "rounds": [20.0] * 10**6}}
    expected = row["replay"]["survival"]
    for sign, agrees in ((1, True), (-1, False), (1.2, False)):
        off = tuple(s + sign * (1 - s) / 20 for s in expected)
        assert compare(served(off, 2e7, 6e7), row_of(row), 0.0005).agrees is agrees


def test_differences_below_the_tolerance_do_not_matter():
    row = a_row()
    off = tuple(s - 0.015 for s in row["replay"]["survival"])
    found = served(off, 1e9, 3e9)
    sure = {"tau_interval": [row["replay"]["tau"]] * 2, "counts": {"tokens": [1], "rounds": [1e9]}}
    row["replay"] |= sure
    assert not compare(found, row_of(row), 0.001).agrees
    assert compare(found, row_of(row), 0.02).agrees
