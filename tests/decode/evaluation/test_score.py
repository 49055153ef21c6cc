"""The scorecard's numbers: by hand, by the decoder's record, by replay where only an engine decodes."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from heads import trained
from scripted import Oracle, greedy

from decode.errors import UserError
from decode.evaluation import score as module
from decode.evaluation.acceptance import Acceptance
from decode.evaluation.estimates import central_interval, interval, ratio, resampled_sums
from decode.evaluation.replay import Counts, Rollout, agreement
from decode.evaluation.rows import DECODED, Timing
from decode.evaluation.score import HeldOut, ScoreOptions, Setting, score
from decode.evaluation.scorecard import SCHEMA, Scorecard
from decode.evaluation.timing_ab import DecodeTimings, time_interleaved
from decode.generation.generate import generate
from decode.generation.types import Generation, Output, Times
from decode.model.abilities import Abilities
from decode.plan import Plan
from decode.sampling import Sampler
from distill.scoring.tables import settings_table
from drafters.models.eagle import Eagle

VOCAB, LENGTH = 23, 24
PROMPTS = [[5, 9, 2, 7, 3], [4], [17, 4, 21, 6, 12, 2, 8, 8], [11, 11, 2], [20, 1]]
CHAIN, TREE = Plan(depth=4), Plan(depth=3, width=3, nodes=7)
COUNTED = ("tau", "tau_interval", "survival", "alpha", "offered", "acceptance_rate")


def output(*rounds, stopped=False):
    """Rounds of (accepted, offered, emitted, drafted nodes)."""
    accepted, offered, emitted, drafted = (list(column) for column in zip(*rounds, strict=True))
    return Output([0] * (1 + sum(emitted)), emitted, accepted, offered, drafted, stopped, ttft=0.5)


# -- by hand -------------------------------------------------------------------------------------


WHOLE = [output((2, 2, 3, 2), (0, 2, 1, 2))]
# outputs, depth, survival, alpha, offered
POSITIONS = {
    "two texts": (
        [output((2, 3, 3, 3), (0, 3, 1, 3), (1, 3, 2, 3)), output((3, 3, 4, 3), (0, 3, 1, 3))],
        3,
        ([3 / 5, 2 / 5, 1 / 5], [3 / 5, 2 / 3, 1 / 2], [1, 1, 1]),
    ),
    "drafts of depth 1, 3, 0 and 2": (  # alpha counts rounds that had such a node to lose
        [output((1, 1, 2, 1), (2, 3, 3, 3)), output((0, 0, 1, 0), (1, 2, 2, 2))],
        3,
        ([3 / 4, 1 / 4, 0], [3 / 3, 1 / 2, 0 / 1], [3 / 4, 2 / 4, 1 / 4]),
    ),
    "whole": (WHOLE, 2, ([0.5, 0.5], [0.5, 1.0], [1, 1])),
    "cut": (  # a round that was cut counts by its tokens of the text: fewer than were accepted, and one
        [output((2, 2, 3, 2), (0, 2, 1, 2), (2, 2, 1, 2), stopped=True)],
        2,
        ([2 / 3, 2 / 3], [2 / 3, 1.0], [1, 1]),
    ),
    "ended by a round's last token": (
        [output((2, 2, 3, 2), (0, 2, 1, 2), stopped=True)],
        2,
        ([0.5, 0.5], [0.5, 1.0], [1, 1]),
    ),
    "no rounds": ([Output([3])], 2, ([0, 0], [0, 0], [0, 0])),
    "nothing": ([], 0, ([], [], [])),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_survival_and_alpha_by_hand(name):
    outputs, depth, expected = POSITIONS[name]
    assert module._positions(outputs, depth) == expected


def test_a_row_by_hand():
    outputs = [
        output((2, 2, 3, 4), (0, 2, 1, 3), (2, 2, 1, 4), stopped=True),  # the last one is cut
        output((1, 2, 2, 4)),
    ]
    tally, plain = DecodeTimings(), DecodeTimings()
    times = Times(prefill=9.0, draft=1.0, verify=2.0, total=4.0)
    tally.add(Generation(outputs, times, "uncompiled"), 0, 0)
    plain.add(Generation([Output([0] * 9)], Times(total=8.0), "captured"), 0, 0)
    row = module._row(Setting(Sampler(0.5), Plan(depth=2, width=2, nodes=4), 2), tally, plain)
    assert row.tokens == 3 + 1 + 1 + 2
    assert row.rounds == 4
    assert row.tau == 7 / 4  # the cut round counts: its forward was paid and its token came
    assert row.survival == [3 / 4, 3 / 8]  # and so do its tokens of the text
    assert row.alpha == [3 / 4, 1 / 2]
    assert row.acceptance_rate == (2 + 0 + 2 + 1) / (4 + 3 + 4 + 4)
    assert row.tokens_per_second == 7 / 4
    assert row.plain_tokens_per_second == 1.0
    assert row.speedup == 7 / 4
    assert row.overhead == pytest.approx(7 / 4 * 1.0 / (7 / 4) - 1)
    assert (row.draft_share, row.verify_share, row.other_share) == (0.25, 0.5, 0.25)
    passes = {"passes": "uncompiled", "plain_passes": "captured"}
    assert row.timing == Timing(seconds=[4.0], tokens=[7], plain_seconds=[8.0], plain_tokens=[8], **passes)
    assert row.timing.passes_text == "uncompiled, plain decoding captured"
    assert row.ttft == 0.5
    assert row.tpot == 2 * 4.0 / 7
    assert (row.temperature, row.batch_size, row.nodes) == (0.5, 2, 4)
    assert (row.decode, row.rule) == ("tree-4 (depth 2, width 2)", "match")


def test_repeats_are_timed_but_counted_once():
    tally = DecodeTimings()
    for run in range(3):
        for batch in range(2):
            times = Times(draft=1.0, verify=1.0, total=3.0 + batch)
            tally.add(Generation([output((1, 1, 2 + batch, 1))], times), run, batch)
    assert len(tally.outputs) == 2
    assert (tally.seconds, tally.tokens) == ([9.0, 12.0], [6, 9])  # a batch's, whatever run
    assert tally.decoded == 15
    assert tally.times.total == 21.0
    assert tally.speed == 15 / 21


def timed_in_pairs(batches, repeats, **options):
    """Timings of plain decoding and a draft: a batch takes its number + 1 seconds."""
    prompts, asked = [[7] * (n + 1) for n in range(batches)], []

    def decode(drafter, part, *, plan, requests=None, **_):
        if requests is not None:
            asked.append((plan.depth, *requests))
        return Generation([Output([0] * 3)], Times(total=float(len(part[0]))))

    plans, names = [Plan(), CHAIN], list(range(batches))
    found = time_interleaved(decode, None, plans, prompts, 1, repeats, 8, names, lambda: None, **options)
    return found, [n for depth, n in asked if not depth]


def test_plain_decoding_takes_one_batch_of_each_pair():
    (plain, draft), asked = timed_in_pairs(5, 1, first_in_pairs=True)
    assert asked == [0, 3, 4]
    assert (plain.seconds, plain.tokens) == ([1.0, 4.0, 5.0], [2, 2, 2])
    assert (draft.seconds, draft.tokens) == ([3.0, 7.0, 5.0], [4, 4, 2])
    assert len(draft.outputs) == 5
    (plain, draft), asked = timed_in_pairs(4, 2, first_in_pairs=True)
    assert sorted(asked) == [0, 1, 2, 3]  # the next run takes the others
    assert plain.seconds == [3.0, 7.0]
    assert draft.seconds == [6.0, 14.0]
    (plain, draft), asked = timed_in_pairs(3, 1)
    assert plain.seconds == draft.seconds == [1.0, 2.0, 3.0]


def test_pairs_take_no_interval_and_no_plain_answer_that_is_needed():
    lossless, lossy = Setting(GREEDY, CHAIN), Setting(GREEDY, Plan(2, rule="typical", lossy=True))
    assert [module._in_pairs([lossless], n) for n in (1, 4, 5, 9, 10)] == [True, True, False, False, True]
    assert not module._in_pairs([lossless, lossy], 16)


def test_interval_is_that_of_a_ratio_of_sums():
    assert Counts([6, 6, 6], [2, 2, 2]).interval() == [3.0, 3.0]
    assert Counts([30, 1], [10, 1]).interval() == [1.0, 3.0]  # both prompts drawn twice
    assert Counts([], []).interval() == [0, 0]


# -- from real runs ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(vocab=VOCAB, hidden=16, seed=3)


@pytest.fixture(scope="module")
def oracle(target):
    texts = [p + greedy(target.model, p, LENGTH) for p in PROMPTS]
    return Both(texts, VOCAB, right=0.75)


class Both(Oracle):
    """Chains or trees, as the plan wishes."""

    def propose(self, state, target, sampler, coin, plan):
        self.branches = 0 if plan.width == 1 else 4
        return super().propose(state, target, sampler, coin, plan)


SETTINGS = [
    Setting(Sampler(0.0), CHAIN, 1),
    Setting(Sampler(0.0), TREE, 1),
    Setting(Sampler(0.0), CHAIN, 3),
    Setting(Sampler(0.4, top_k=10), TREE, 2),
    Setting(Sampler(0.0), Plan(), 1),
]


def scored(target, drafter, prompts, settings, progress=None, **options):
    """As score.json has it."""
    return score(target, drafter, HeldOut(prompts), settings, ScoreOptions(**options), progress).to_json()


@pytest.fixture(scope="module")
def card(target, oracle):
    return scored(target, oracle, PROMPTS, SETTINGS, max_new_tokens=LENGTH, seed=4, audit_prompts=3)


def by_hand(target, oracle, setting, **options):
    options = {"max_new_tokens": LENGTH, "seed": 4} | options
    drafter = oracle if setting.plan.depth else None
    return generate(target, drafter, PROMPTS, sampler=setting.sampler, plan=setting.plan, **options).outputs


def test_conditions_and_rows_are_those_of_the_settings(card):
    assert card["audit_passed"] is True
    assert card["audit"]["tokens"] == 3 * LENGTH
    assert (card["schema"], card["seed"], card["prompts"], card["dtype"]) == (SCHEMA, 4, 5, "float64")
    assert card["threads"] == torch.get_num_threads()
    assert card["hardware"]
    layers, heads, dim = 2, 1, 8
    assert card["kv_bytes_per_token"] == layers * 2 * heads * dim * 8
    assert [(r["temperature"], r["decode"], r["batch_size"], r["nodes"]) for r in card["rows"]] == [
        (0.0, "chain-4", 1, 4),
        (0.0, "tree-7 (depth 3, width 3)", 1, 7),
        (0.0, "chain-4", 3, 4),
        (0.4, "tree-7 (depth 3, width 3)", 2, 7),
        (0.0, "plain", 1, 0),
    ]
    head, first = card["headline"], card["rows"][0]
    assert all(head[name] == first[name] for name in ("decode", "temperature", "batch_size", "speedup"))
    assert (head["tau"], head["source"]) == (first["tau"], "decoded"), "nothing was replayed"


@pytest.mark.parametrize("index", range(5))
def test_row_is_what_the_decoder_did(card, target, oracle, index):
    row, setting = card["rows"][index], SETTINGS[index]
    outputs = by_hand(target, oracle, setting)
    rounds = sum(len(o.emitted) for o in outputs)
    assert row["rounds"] == rounds
    assert row["tokens"] == sum(len(o.tokens) - 1 for o in outputs) == len(PROMPTS) * (LENGTH - 1)
    assert row["tau"] == row["tokens"] / rounds
    timed = dict(row["timing"])
    assert (timed.pop("passes"), timed.pop("plain_passes")) == ("uncompiled", "uncompiled")
    batches = -(-len(PROMPTS) // setting.batch_size)
    parts = batches if batches == len(PROMPTS) else -(-batches // 2)  # too few pairs for an interval
    assert {len(column) for column in timed.values()} == {parts}
    assert row["tokens_per_second"] == pytest.approx(sum(timed["tokens"]) / sum(timed["seconds"]))
    plain = sum(timed["plain_tokens"]) / sum(timed["plain_seconds"])
    assert row["plain_tokens_per_second"] == pytest.approx(plain)
    low, high = row["tau_interval"]
    assert low <= row["tau"] <= high
    assert len(row["survival"]) == len(row["alpha"]) == len(row["offered"]) == setting.plan.depth
    assert row["survival"] == sorted(row["survival"], reverse=True)
    assert row["draft_share"] + row["verify_share"] + row["other_share"] == pytest.approx(1)
    assert min(row["draft_share"], row["verify_share"], row["other_share"]) > 0
    for name in ("speedup", "tokens_per_second", "plain_tokens_per_second", "ttft", "tpot"):
        assert row[name] > 0
    assert row["speedup"] == row["tokens_per_second"] / row["plain_tokens_per_second"]


def test_batch_size_changes_no_count_and_plain_decoding_has_tau_1(card):
    assert [card["rows"][0][name] for name in COUNTED] == [card["rows"][2][name] for name in COUNTED]
    assert [card["rows"][4][name] for name in COUNTED] == [1, [1, 1], [], [], [], 0]


def test_progress_reaches_its_end(target, oracle):
    steps = []
    options = {"max_new_tokens": 4, "repeats": 2, "audit_prompts": 1}
    scored(target, oracle, PROMPTS, SETTINGS[:3], progress=lambda *step: steps.append(step), **options)
    total = (5 + 2) * 2 + 3
    assert steps == [(done, total) for done in range(1, total + 1)]


def test_failed_audit_is_in_the_scorecard(target, oracle, monkeypatch):
    real = module.audit
    monkeypatch.setattr(module, "audit", lambda *a, **k: replace(real(*a, **k), mismatches=1))
    row = scored(target, oracle, PROMPTS, SETTINGS[:1], max_new_tokens=4, audit_prompts=1)
    assert row["audit_passed"] is row["audit"]["passed"] is False


def test_audit_draws_by_the_settings_that_are_scored(card):
    runs = card["audit"]["sampled"]
    assert [(r["temperature"], r["decode"], r["tokens"]) for r in runs] == [
        (0.4, "tree-7 (depth 3, width 3)", 3 * LENGTH)
    ]
    assert card["audit"]["sampled_tokens"] == 3 * LENGTH
    lines = settings_table(Scorecard.from_json(card, "score.json")).splitlines()[-2:]
    assert lines[0].startswith(f"audit pass: T=0, {3 * LENGTH} tokens, own row {3 * LENGTH}, equal ")
    assert lines[1].startswith(f"  T=0.4, tree-7 (depth 3, width 3): {3 * LENGTH} tokens, impossible 0")


def test_samplers_and_plans_that_are_audited():
    def cases(*settings, full=False, drawn=True):
        return module._audit_cases([Setting(Sampler(t), plan) for t, plan in settings], full, drawn)

    cold, warm, hot = (0.0, CHAIN), (0.7, CHAIN), (1.0, TREE)
    drawn = [(Sampler(0.7), CHAIN), (Sampler(1.0), TREE)]
    assert cases(cold, (0.0, TREE)) == [(Sampler(1.0), CHAIN)]
    assert cases(cold, warm, hot, (0.7, TREE)) == drawn
    assert cases(cold, (0.0, TREE), drawn=False) == []
    assert cases(cold, warm, hot, drawn=False) == drawn
    both = [(Sampler(t), plan) for t, plan in ((0.0, TREE), (1.0, CHAIN), (1.0, TREE))]
    assert cases(cold, (0.0, TREE), full=True) == both
    assert cases(warm, hot, warm, full=True) == [(Sampler(0.0), TREE), *drawn]


def test_replay_of_fewer_prompts_is_compared_on_those_that_both_have():
    decoded = Counts([9, 9, 4, 8], [4.0, 3.0, 2.0, 4.0])
    both = Counts([9, 9], [4.2, 3.1])
    replay = module._replay(Acceptance(both, [0.5], "", None), decoded, shared=4, reserved=0)
    assert replay.prompts == 2
    assert replay.agrees
    assert replay.difference_interval == agreement(decoded.part(0, 2), both)
    assert replay.selection_tau == both.tau


def test_score_without_prompts_is_refused(target, oracle):
    with pytest.raises(UserError, match="no prompts"):
        scored(target, oracle, [], SETTINGS, max_new_tokens=4)


# -- intervals ---------------------------------------------------------------------------------------


def test_prompts_of_a_group_are_drawn_together():
    values, ones = [0.0] * 10 + [1.0] * 10, np.ones(20)
    single = interval(values, ones)
    together = interval(values, ones, [0] * 10 + [1] * 10)
    assert 0.2 < single[0] < 0.5 < single[1] < 0.8
    assert together == (0.0, 1.0), "a text or the other, or both"


def test_sample_without_rounds_counts_as_zero():
    assert interval([4.0, 0.0], [2, 0]) == (0.0, 2.0)


def test_columns_are_drawn_together():
    easy = np.arange(20.0)
    mine, other, rounds = resampled_sums([easy + 1, easy, np.ones(20)]).T
    assert np.allclose(mine - other, rounds)
    assert (rounds == 20).all()
    assert mine.std() > 10
    assert central_interval(ratio(mine, rounds)) == pytest.approx(interval(easy + 1, np.ones(20)))


def test_interval_holds_the_truth_in_nineteen_of_twenty_samples():
    random = np.random.default_rng(3)
    inside = 0
    for _ in range(60):
        bottom = random.integers(5, 15, 48)
        top = 2 * bottom + random.normal(0, 3, 48)
        low, high = interval(top, bottom)
        inside += low <= 2 <= high
    assert 52 <= inside <= 59


# -- a target that only an engine decodes ------------------------------------------------------------


SHORT_PROMPTS = [[5, 9, 2, 7, 3], [4], [11, 4, 8, 6, 12, 2, 8, 8], [11, 11, 2], [10, 1]]
GREEDY, DRAWN = Sampler(0.0), Sampler(1.0)
CHAINS = [Setting(GREEDY, Plan(depth=2)), Setting(DRAWN, Plan(depth=2, proposal="sampled"), 2)]
SIXTEEN = ScoreOptions(max_new_tokens=16, seed=4)


@pytest.fixture(scope="module")
def replayed(tiny_target):
    """Target, drafter, and the target's answers with both samplers."""
    target, drafter = trained(tiny_target, Eagle, feature_noise=0.0, feature_weight=1.0)
    rollouts = {}
    for sampler in (GREEDY, DRAWN):
        outputs = generate(target, None, SHORT_PROMPTS, max_new_tokens=16, sampler=sampler).outputs
        rollouts[sampler] = [Rollout(p, o.tokens) for p, o in zip(SHORT_PROMPTS, outputs, strict=True)]
    return target, drafter, HeldOut(SHORT_PROMPTS[:2], rollouts=rollouts, reserved=2)


@pytest.fixture
def elsewhere(replayed, monkeypatch):
    """The same, of a target that cannot be decoded here."""
    monkeypatch.setattr(replayed[0], "abilities", Abilities(decode="it goes forward", own_cache=True))
    return replayed


@pytest.fixture(scope="module")
def ordinary(replayed):
    return score(*replayed, CHAINS, SIXTEEN)


def test_replayed_numbers_are_those_of_a_target_that_decodes(ordinary, elsewhere):
    steps = []
    card = score(*elsewhere, CHAINS, SIXTEEN, lambda *at: steps.append(at))
    assert steps == [(1, 2), (2, 2)]
    for row, other in zip(card.rows, ordinary.rows, strict=True):
        assert row.replay == replace(other.replay, difference_interval=None)
        same = other.replay
        assert (row.tau, row.survival, row.tau_interval) == (same.tau, same.survival, same.tau_interval)
        assert row.replay.selection_tau == row.replay.counts.part(2).tau
        assert row.alpha == [row.survival[0], row.survival[1] / row.survival[0]]
        assert row.tau > 1
        assert {getattr(row, name) for name in DECODED} == {None}
        assert row.timing is None
    assert (card.audit, card.audited, card.conditions.prompts) == (None, "not run", 0)
    assert card.conditions.elsewhere == "it goes forward"
    assert not ordinary.conditions.elsewhere
    values = json.loads(json.dumps(card.to_json()))
    assert [values[name] for name in ("audit", "audit_passed")] == [None] * 2
    assert [values["rows"][0]["tpot"], values["headline"]["speedup"]] == [None] * 2
    assert Scorecard.from_json(values, "score.json") == card
    assert not card.pays


@pytest.mark.parametrize(
    ("plan", "sampler", "reason"),
    [
        (Plan(depth=2, width=2, nodes=4), GREEDY, "engines verify chains"),
        (Plan(), GREEDY, "engines verify chains"),
        (Plan(depth=2, proposal="sampled", drafts=2), DRAWN, "engines verify chains"),
        (Plan(depth=2, proposal="sampled", rule="block"), DRAWN, "weighs whole paths"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_plan_that_cannot_be_replayed_is_refused(plan, sampler, reason, elsewhere):
    with pytest.raises(UserError, match=reason):
        score(*elsewhere, [Setting(sampler, plan)], SIXTEEN)


def test_score_without_answers_is_refused(elsewhere):
    target, drafter, _ = elsewhere
    with pytest.raises(UserError, match=r"score\.replay_prompts"):
        score(target, drafter, HeldOut(SHORT_PROMPTS), CHAINS, SIXTEEN)
