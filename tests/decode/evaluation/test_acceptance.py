"""Replay in the scorecard: it agrees with the decoder, chooses the best and settles `decode=auto`."""

import logging
import random
from pathlib import Path
from types import SimpleNamespace

import cards
import pytest
from exact import Grown

from decode.depth_policy import DepthPolicy
from decode.errors import UserError
from decode.evaluation.acceptance import acceptance
from decode.evaluation.replay import Rollout
from decode.evaluation.score import HeldOut, ScoreOptions, Setting, score
from decode.evaluation.scorecard import read_scorecard
from decode.generation.generate import generate
from decode.plan import Plan
from decode.planning import auto as module
from decode.planning.auto import Auto
from decode.sampling import Sampler
from distill.scoring.tables import settings_table
from distill.training.checkpointing import ScoreCheckpoint
from distill.utils.phase_log import PhaseLog

VOCAB, LENGTH, STOP = 6, 12, [5]
WARM = Sampler(0.8)
TREE, CHAIN = Plan(3, 2, 6), Plan(2, proposal="sampled")
HYBRID = Plan(2, 2, 4, proposal="hybrid")


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(vocab=VOCAB)


def rollouts(target, sampler, count=24, seed=0):
    dice = random.Random(1)
    prompts = [[dice.randrange(VOCAB) for _ in range(dice.randint(1, 5))] for _ in range(count)]
    run = generate(target, None, prompts, max_new_tokens=LENGTH, sampler=sampler, stop=STOP, seed=seed)
    return [Rollout(p, o.tokens) for p, o in zip(prompts, run.outputs, strict=True)]


def scored(target, drafter, plans, samplers, **options):
    answers = {sampler: rollouts(target, sampler) for sampler in samplers}
    prompts = [r.prompt for r in answers[samplers[0]]][:10]
    settings = [Setting(s, plan) for s in samplers for plan in plans]
    options = {"max_new_tokens": LENGTH, "stop": STOP, "audit_prompts": 2} | options
    held_out = HeldOut(prompts, rollouts=answers)
    return score(target, drafter, held_out, settings, ScoreOptions(**options))


def test_every_row_is_replayed_and_agrees(target):
    card = scored(target, Grown(VOCAB), [TREE, CHAIN, HYBRID], [Sampler(0.0), WARM])
    assert card.replay_agrees is True
    for row in card.rows:
        replay = row.replay
        assert replay.prompts == 24 > card.conditions.prompts
        assert replay.tau_interval[0] <= replay.tau <= replay.tau_interval[1]
        assert len(replay.survival) == len(row.survival)
        inexact = row.temperature and row.decode.startswith("hybrid")
        assert replay.method.startswith("estimate (" if inexact else "exact")
        assert replay.exact is not bool(inexact)
        assert (replay.difference_interval is None) == bool(inexact)
    text = settings_table(card)
    assert f"{card.rows[0].replay.tau:.2f}" in text
    assert f"{card.rows[-1].replay.tau:.2f}~" in text, "an estimate is marked"


def test_match_replays_to_the_round_and_reserved_prompts_choose_the_best(target):
    """Seed and names say which text is drawn, and `match` draws the text that was stored."""
    card = scored(target, Grown(VOCAB), [TREE], [WARM])
    assert card.rows[0].replay.difference_interval == pytest.approx([0, 0], abs=1e-9)
    answers, options = rollouts(target, WARM), {"max_new_tokens": LENGTH, "stop": STOP}
    (same,) = acceptance(target, Grown(VOCAB), answers[:10], [TREE], WARM, **options)
    (rest,) = acceptance(target, Grown(VOCAB), answers[10:], [TREE], WARM, **options)
    assert card.rows[0].tau == pytest.approx(same.counts.tau)
    assert card.rows[0].replay.selection_tau == pytest.approx(rest.counts.tau)
    assert card.rows[0].replay.selection_tau != pytest.approx(card.rows[0].replay.tau)
    low, high = scored(target, Grown(VOCAB), [TREE], [WARM], seed=1).rows[0].replay.difference_interval
    assert low < 0 < high


def saved(saver: ScoreCheckpoint, step: int) -> tuple[SimpleNamespace, Path]:
    folder = saver.root / str(step)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return SimpleNamespace(loggers=[], max_steps=30, precision="32-true"), folder


def test_disagreement_is_logged_and_the_best_is_chosen_by_reserved_prompts(tmp_path, caplog):
    more = {"agrees": False, "difference_interval": [0.1, 0.4]}
    rows = {
        10: cards.row(0.7, tau=3.2, replay=cards.replay(3.0, selection_tau=2.5, **more)),
        20: cards.row(0.7, tau=9.0, replay=cards.replay(3.0, selection_tau=2.0)),
    }
    scorer = {step: cards.card_of([one]) for step, one in rows.items()}
    saver = ScoreCheckpoint(PhaseLog(tmp_path), 10, lambda folder, step, early: scorer[step], "")
    with caplog.at_level(logging.ERROR):
        for step in rows:
            saver._score(*saved(saver, step))
    (line,) = caplog.messages
    assert "step 10, chain-2, T=0.7: replay and decoder disagree" in line
    assert "0.100 to 0.400" in line
    assert (saver.root / "best").resolve().name == "10"


def test_last_and_best_checkpoints_are_scored_on_all_prompts(tmp_path):
    taus, calls = {10: 2.0, 20: 2.5, 30: 2.2}, []

    def scorer(folder, step, early):
        calls.append((step, early))
        return cards.card_of([cards.row(0.0, replay=cards.replay(taus[step], selection_tau=taus[step]))])

    saver = ScoreCheckpoint(PhaseLog(tmp_path), 10, scorer, "")
    for step in taus:
        saver.trained = float(step)
        trainer, folder = saved(saver, step)
        assert saver._score(trainer, folder)
        saver.rescore_best(trainer, folder)
    assert calls == [(10, True), (20, True), (30, False), (20, False)]
    assert (saver.root / "best").resolve().name == "20"
    best = read_scorecard(saver.root / "20" / "score.json")
    assert best.checkpoint.train_seconds == 20.0  # when it was saved, not when it was scored again


def test_lossy_plan_is_labelled_and_never_the_headline(target):
    lossy = Plan(3, 2, 6, rule="typical", lossy=True)
    card = scored(target, Grown(VOCAB), [TREE, lossy], [WARM])
    assert [row.lossy for row in card.rows] == [False, True]
    assert card.rows[1].decode.endswith("typical 0.3 0.09 LOSSY")
    assert card.rows[1].replay is None
    with pytest.raises(UserError, match="cannot be the headline"):
        scored(target, Grown(VOCAB), [lossy, TREE], [WARM])


def test_auto_takes_the_most_tokens_a_second(target, monkeypatch):
    plans = [{"depth": 1}, {"depth": 3, "width": 2, "nodes": 6}, {"depth": 2, "proposal": "sampled"}]
    auto, answers = Auto(plans, adapt=False), rollouts(target, WARM)
    options = {"max_new_tokens": LENGTH, "stop": STOP, "seed": 0}
    chosen = []
    for cost in ([1, 1, 1, 1], [1, 9, 9, 9], [1, 1.01, 9, 9], [1, 9, 9, 1.01]):
        seconds = dict(zip(auto.plans, cost, strict=True))
        costs = SimpleNamespace(
            round_seconds=lambda plan, _, seconds=seconds: seconds[plan], idle_seconds=lambda _: 1
        )
        monkeypatch.setattr(module, "measure", lambda *_, costs=costs, **__: costs)
        plan, curve = auto.choose(target, Grown(VOCAB), answers, WARM, 1, **options)
        assert [row["decode"] for row in curve] == [p.name for p in auto.plans]
        assert curve[0]["tau"] == curve[0]["speedup"] == 1
        speeds = [row["tau"] / c for row, c in zip(curve, cost, strict=True)]
        assert [row["tokens_per_second"] for row in curve] == pytest.approx(speeds)
        for row in curve:
            low, high = row["speedup_interval"]
            assert low <= row["speedup"] <= high
        assert plan == auto.plans[speeds.index(max(speeds))]
        chosen.append(auto.plans.index(plan))
    assert chosen[1:] == [0, 1, 3]


def test_auto_times_candidates_and_may_adapt(target):
    auto = Auto([{"depth": 1}, {"depth": 3}, {"depth": 2, "width": 2, "nodes": 3}], prompts=3, repeats=2)
    plan, curve = auto.choose(
        target, Grown(VOCAB), rollouts(target, WARM), WARM, 2, max_new_tokens=LENGTH, stop=STOP, seed=0
    )
    assert all(row["round_seconds"] > 0 for row in curve)
    assert [row["decode"] for row in curve] == [*(p.name for p in auto.plans), "chain-3 (adaptive)"]
    assert plan in auto.plans or plan.adapt is not None
    assert set(dict(DepthPolicy(**curve[-1]["adapt"]).costs)) == {1, 2}


@pytest.mark.parametrize(
    ("plans", "word"),
    [([], "give decode.plans"), ([{"depth": 2, "rule": "typical", "lossy": True}], "lossless")],
)
def test_auto_refuses_no_plans_and_lossy_plans(plans, word):
    with pytest.raises(UserError, match=word):
        Auto(plans)
