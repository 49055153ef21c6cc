"""foredraft advise and scripts/lab/benchmark.py regret: their figures are consistent."""

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
    done = foredraft("advise", *given(bench, folder, *more))
    return done, json.loads((folder / "out.json").read_text()) if done.code == 0 else None


def test_every_temperature_and_batch_size_has_its_advice(bench, tmp_path):
    more = [f"checkpoint={bench[1]}", "drafter=ngram", "temperatures=[0.0,1.0]", "batch_sizes=[1,2]"]
    done, card = advise(bench, tmp_path, *more)
    assert done.code == 0, done.err
    assert [(r["temperature"], r["batch_size"]) for r in card["results"]] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    for result in card["results"]:
        eagle, ngram = result["drafters"]
        assert (eagle["name"], ngram["name"]) == ("eagle", "ngram")
        names = [row["decode"] for row in eagle["rows"]]
        assert names[0] == "plain"
        assert ("chain-2-sampled" in names) == bool(result["temperature"])
        assert not any("sampled" in row["decode"] for row in ngram["rows"]), "it has no probabilities"
        for one in (eagle, ngram):
            for row in one["rows"]:
                assert row["round_seconds"] > 0
                assert row["speedup_interval"][0] <= row["speedup"] <= row["speedup_interval"][1]
                if result["batch_size"] == 1:
                    assert row["tokens_per_second"] == pytest.approx(row["tau"] / row["round_seconds"])
            best = max(r["speedup"] for r in one["rows"] if r["adapt"] is None)
            assert one["choice"]["speedup"] >= best
        static = [r for r in eagle["rows"] + ngram["rows"] if r["adapt"] is None and not r["estimate"]]
        assert result["oracle"]["tau"] >= max(row["tau"] for row in static) - 1e-9
        assert result["oracle"]["speedup"] >= max(row["speedup"] for row in static) - 1e-9
        assert any("hybrid" in name for name in result["oracle"]["left_out"]) == bool(result["temperature"])
    assert "oracle: the best of" in done.out
    assert describe(card) in done.out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "give checkpoint="),
        (["drafter=eagle"], "must be trained first"),
        (["drafter=ngram", "temperatures=[]"], "at least one of each"),
        (["drafter=ngram", "out=."], "out=.: is a folder"),
    ],
)
def test_bad_input_is_one_line(bench, tmp_path, more, said):
    done, _ = advise(bench, tmp_path, *more)
    done.refused(said)


PLANS = [
    Plan(3, proposal="sampled", min_confidence=0.3),
    Plan(4, 3, 16, proposal="hybrid"),
    Plan(2, adapt=DepthPolicy(0.625, ((1, (1.0, 1.25, 1.5)), (8, (1.0, 1.5, 2.25))))),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)
def test_a_setting_is_what_makes_the_plan(plan):
    cfg = compose(shlex.split(decode_overrides(plan)), CONF)
    assert instantiate(cfg.decode) == plan


def rows(*speeds):
    return [Forecast(plan, 1.0, "", 1.0, Throughput(one, (one,) * 3, full)) for plan, one, full in speeds]


def test_a_server_is_told_the_best_chain_of_a_full_batch():
    tree = Plan(3, 2, 6)
    found = rows((PLAIN, 1.0, 1.0), (Plan(1), 1.5, 1.4), (Plan(2), 1.4, 1.5), (tree, 2.0, 2.0))
    assert best_forecast(found).plan == tree
    assert best_chain(found, {Plan(2): [0.5, 0.4]}, 8) == (8, 2, False, [0.5, 0.4])
    assert best_chain(rows((PLAIN, 1.0, 1.0), (Plan(1), 1.5, 0.9)), {}, 8).tokens == 0
    drawn = Plan(3, proposal="sampled")
    assert best_chain(rows((PLAIN, 1.0, 1.0), (Plan(3), 1.0, 1.2), (drawn, 1.0, 1.3)), {}, 1).drawn


def test_a_plan_that_adapts_must_be_faster_by_a_margin():
    plan = PLANS[-1]
    assert best_forecast(rows((PLAIN, 1.0, 1.0), (plan, 1.01, None))).plan == PLAIN
    assert best_forecast(rows((PLAIN, 1.0, 1.0), (plan, 1.05, None))).plan == plan


def test_the_oracle_is_a_bound_over_all_timings():
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
        table=lambda batch: {"verify": {"slots": [1], "seconds": [1.0]}, "draft": []},
    )
    monkeypatch.setattr("distill.commands.advise.measure", lambda *_, **__: slow)
    done, card = advise(bench, tmp_path, "drafter=ngram", "batch_sizes=[1]")
    assert "do not draft" in done.out
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
    worst = max(one["ratio"] for one in row["best"])
    assert row["regret"] == pytest.approx(worst - 1)
    assert row["regret_interval"][0] <= row["regret"] <= row["regret_interval"][1]
    if row["choice"] in [one["decode"] for one in row["best"]]:
        assert row["regret"] >= 0
    assert card["clock"] == "process_time"
    assert re.search(r"regret -?\d", done.out)
