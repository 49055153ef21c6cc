"""foredraft advise, limit and scripts/lab/benchmark.py regret: their figures are consistent."""

from __future__ import annotations

import json
import re
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
from hydra.utils import instantiate
from workbench import CONF, Bench, command, foredraft, write_prompts

from benchmarks.regret import regrets
from decode.depth_policy import DepthPolicy
from decode.evaluation.acceptance import Acceptance
from decode.evaluation.replay import Counts, Rollout
from decode.plan import Plan
from decode.planning.auto import Forecast, best_forecast, forecast, plain_counts
from decode.planning.cost_model import PLAIN, Throughput
from decode.planning.oracle import least_seconds
from distill.cli.main import main
from distill.commands.advise import DrafterProfile, candidates, decode_overrides, describe, oracle
from distill.commands.limit import describe as describe_limit
from distill.config.compose import compose
from distill.serving.engine_settings import best_chain


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    made = Bench(tmp_path_factory.mktemp("advise"))
    return made, made.untrained_eagle()


def given(bench, folder, *more):
    sizes = ["chains=2", "trees=[4]", "widths=[2]", "repeats=2", "score.max_new_tokens=8"]
    prompts = [f"prompts={write_prompts(folder / 'p.jsonl', 16)}", "prompts.heldout_share=0.5"]
    files = [f"answers={folder / 'answers'}", f"out={folder / 'out.json'}"]
    return [f"target={bench[0].target}", *prompts, *sizes, *files, *more]


def advise(bench, folder, *more):
    done = foredraft("advise", *given(bench, folder, *more)).succeeded()
    return done.out, json.loads((folder / "out.json").read_text())


def test_every_temperature_and_batch_size_has_its_advice(bench, tmp_path):
    more = [f"checkpoint={bench[1]}", "drafter=ngram", "temperatures=[0.0,1.0]", "batch_sizes=[1,2]"]
    out, card = advise(bench, tmp_path, *more)
    assert [(r["temperature"], r["batch_size"]) for r in card["results"]] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    for result in card["results"]:
        eagle, ngram = result["drafters"]
        assert (eagle["name"], ngram["name"]) == ("eagle", "ngram")
        names = [row["decode"] for row in eagle["rows"]]
        assert names[0] == "plain"
        assert ("chain-2-sampled" in names) == bool(result["temperature"])
        assert not any("sampled" in row["decode"] for row in ngram["rows"]), "it has no probabilities"
        for row in eagle["rows"] + ngram["rows"]:
            assert row["round_seconds"] > 0
            assert row["speedup_interval"][0] <= row["speedup"] <= row["speedup_interval"][1]
            if result["batch_size"] == 1:
                assert row["tokens_per_second"] == pytest.approx(row["tau"] / row["round_seconds"])
        for one in (eagle, ngram):
            best = max(r["speedup"] for r in one["rows"] if r["adapt"] is None)
            assert one["choice"]["speedup"] >= best
        static = [r for r in eagle["rows"] + ngram["rows"] if r["adapt"] is None and not r["estimate"]]
        for name in ("tau", "speedup"):
            assert result["oracle"][name] >= max(row[name] for row in static) - 1e-9
        assert any("hybrid" in name for name in result["oracle"]["left_out"]) == bool(result["temperature"])
    assert "oracle: the best of" in out
    assert describe(card) in out


@pytest.mark.parametrize(
    ("command", "more", "reason"),
    [
        ("advise", [], "give checkpoint="),
        ("advise", ["drafter=eagle"], "must be trained first"),
        ("advise", ["drafter=ngram", "temperatures=[]"], "at least one of each"),
        ("advise", ["drafter=ngram", "out=."], "out=.: is a folder"),
        ("limit", ["temperature=-1"], "temperature"),
        ("limit", ["nodes=[]"], "nodes"),
        ("limit", ["starts=0"], "starts=0"),
        ("limit", ["checkpoint=/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_is_one_line(bench, tmp_path, command, more, reason):
    prompts = f"prompts={write_prompts(tmp_path / 'p.jsonl', 4)}", "prompts.heldout_share=0.5"
    foredraft(command, f"target={bench[0].target}", *prompts, *more).refused(reason)


PLANS = [
    Plan(3, proposal="sampled", min_confidence=0.3),
    Plan(4, 3, 16, proposal="hybrid"),
    Plan(2, adapt=DepthPolicy(0.625, ((1, (1.0, 1.25, 1.5)), (8, (1.0, 1.5, 2.25))))),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)
def test_setting_is_what_makes_the_plan(plan):
    cfg = compose(shlex.split(decode_overrides(plan)), CONF)
    assert instantiate(cfg.decode) == plan


def rows(*speeds):
    return [Forecast(plan, 1.0, "", 1.0, Throughput(one, (one,) * 3, full)) for plan, one, full in speeds]


def test_server_is_told_the_best_chain_of_a_full_batch():
    tree = Plan(3, 2, 6)
    found = rows((PLAIN, 1.0, 1.0), (Plan(1), 1.5, 1.4), (Plan(2), 1.4, 1.5), (tree, 2.0, 2.0))
    assert best_forecast(found).plan == tree
    assert best_chain(found, {Plan(2): [0.5, 0.4]}, 8) == (8, 2, False, [0.5, 0.4])
    assert best_chain(rows((PLAIN, 1.0, 1.0), (Plan(1), 1.5, 0.9)), {}, 8).tokens == 0
    drawn = Plan(3, proposal="sampled")
    assert best_chain(rows((PLAIN, 1.0, 1.0), (Plan(3), 1.0, 1.2), (drawn, 1.0, 1.3)), {}, 1).drawn


def test_plan_that_adapts_must_be_faster_by_a_margin():
    for speed, plan in (1.01, PLAIN), (1.05, PLANS[-1]):
        assert best_forecast(rows((PLAIN, 1.0, 1.0), (PLANS[-1], speed, None))).plan == plan


def test_oracle_is_a_bound_over_all_timings():
    """Once for each drafter, and faster the second time."""
    plan, accepted = Plan(1), [np.full((6, 1), 0.6)] * 2
    counts = Counts([6, 6], [least_seconds([keep], [1.0]) for keep in accepted])

    def profile(single, drafted):
        prices = {PLAIN: (single, 1.2), plan: (drafted, drafted)}
        costs = SimpleNamespace(round_seconds=lambda plan, batch: prices[plan][batch - 1])
        return DrafterProfile("", [plan], [Acceptance(counts, [0.6], "", accepted)], costs)

    rollouts = [Rollout([0], [0] * 7)] * 2
    profiles = [profile(1.2, 2.4), profile(0.5, 1.2)]
    bound = oracle(profiles, rollouts, 2)["speedup"]
    for one in profiles:
        rows = forecast(one.plans, one.acceptances, one.costs, 2, False, plain_counts(rollouts))
        assert bound >= max(row.throughput.speedup[0] for row in rows) - 1e-9


def test_no_draft_is_advised_in_words_where_plain_is_fastest(bench, tmp_path, monkeypatch):
    """The rounds of this drafter take nine passes a token."""
    slow = SimpleNamespace(
        round_seconds=lambda plan, batch: 1.0 + 9 * plan.depth,
        idle_seconds=lambda batch: 1.0,
        table=lambda batch: {"passes": "uncompiled", "verify": {"slots": [1], "seconds": [1.0]}, "draft": []},
    )
    monkeypatch.setattr("distill.commands.advise.measure", lambda *_, **__: slow)
    out, card = advise(bench, tmp_path, "drafter=ngram", "batch_sizes=[1]")
    assert "do not draft" in out
    choice = card["results"][0]["choice"]
    assert (choice["decode"], choice["speedup"]) == ("plain", 1)


def test_candidate_trees_have_room_for_their_nodes():
    plans = candidates(8, [4, 8, 16, 32], [2, 4], [0.3], ["fixed", "sampled", "hybrid"])
    assert len(plans) == len(set(plans))
    trees = [(p.depth, p.width, p.nodes) for p in plans if p.width > 1 and p.proposal == "fixed"]
    assert trees == [(2, 2, 4), (2, 4, 4), (3, 2, 8), (3, 4, 8), (5, 2, 16), (4, 4, 16), (5, 4, 32)]
    assert {p.proposal for p in plans if p.width > 1} == {"fixed", "hybrid"}
    lengths = [p.depth for p in plans if p.width == 1 and not p.min_confidence]
    assert lengths == [*range(1, 9), *range(1, 9)]
    assert [p.proposal for p in plans if p.min_confidence] == ["fixed", "sampled"]


def test_regret_races_the_choice_with_the_two_fastest(bench, tmp_path):
    argv = [*given(bench, tmp_path, f"checkpoint={bench[1]}"), "score.prompts=4", "score.repeats=3"]
    argv += ["batch_sizes=[2]", "adapt=false"]
    done = command(lambda: main(regrets, CONF, "lab/regret"), ["benchmark.py", *argv]).succeeded()
    card = json.loads((tmp_path / "out.json").read_text())
    (row,) = card["rows"]
    swept = {one["decode"]: one["measured"] for one in row["sweep"]}
    assert list(swept)[:3] == ["plain", "chain-1", "chain-2"]
    assert [one["decode"] for one in row["best"]] == sorted(swept, key=lambda n: -swept[n])[:2]
    assert row["regret"] == pytest.approx(max(one["ratio"] for one in row["best"]) - 1)
    assert row["regret_interval"][0] <= row["regret"] <= row["regret_interval"][1]
    if row["choice"] in [one["decode"] for one in row["best"]]:
        assert row["regret"] >= 0
    assert card["clock"] == "process_time"
    assert re.search(r"regret -?\d", done.out)


def limit(bench, folder, *more, drafter=False):
    argv = [f"target={bench[0].target}", f"prompts={write_prompts(folder / 'p.jsonl', 12)}"]
    argv += ["prompts.heldout_share=0.5", "nodes=[2,4,8]", "starts=6", "score.max_new_tokens=8"]
    argv += [f"answers={folder / 'answers'}", f"out={folder / 'out.json'}"]
    done = foredraft("limit", *argv, *[f"checkpoint={bench[1]}"] * drafter, *more).succeeded()
    return done.out, json.loads((folder / "out.json").read_text())


def test_target_has_a_bound_and_best_trees(bench, tmp_path):
    out, card = limit(bench, tmp_path)
    assert [tree["nodes"] for tree in card["trees"]] == [2, 4, 8]
    best = [tree["best"] for tree in card["trees"]]
    assert sorted(best) == best
    assert all(low <= mean <= high for mean, low, high in best)
    assert (card["bounded"], card["drafter"]) == (True, None)
    assert f"mu = {card['mu'][0]:.3f}" in out


def test_fraction_and_losses_of_a_drafter_sum_to_1(bench, tmp_path):
    out, card = limit(bench, tmp_path, "decode.depth=2", "decode.width=2", "decode.nodes=4", drafter=True)
    parts = [card["drafter"][name][0] for name in ("fraction", "coverage_loss", "shape_loss")]
    assert sum(parts) == pytest.approx(1)
    assert min(parts) >= 0
    assert "of the best trees of 4 nodes" in out


def test_bound_that_does_not_apply_is_left_out(bench, tmp_path):
    out, card = limit(bench, tmp_path, "temperature=0")
    assert not card["bounded"]
    assert "T=0: the target is certain" in out
    drawn = ["decode=chain", "decode.depth=2", "decode.proposal=sampled"]
    out, card = limit(bench, tmp_path, *drawn, drafter=True)
    assert card["drafter"]["fraction"] is None
    assert 0 < card["drafter"]["first_level"][0] <= 1
    assert "its tokens are sampled" in out


def test_trees_that_keep_more_than_the_bound_are_explained():
    tree = {"nodes": 8, "bound": 1.0, "published": 2.0, "best": [1.5, 1.4, 1.6]}
    card = {"temperature": 1.0, "bounded": True, "mu": [2.0, 1.9, 2.1], "mu2": 5.0, "correlation": [0.5]}
    card |= {"positions": 9, "starts": 3, "trees": [tree], "drafter": None}
    card |= {"per_doubling": [0.3, 0.2, 0.4], "expected_per_doubling": 0.35}
    assert "at 8 nodes the best trees keep more than the bound" in describe_limit(card)
