"""foredraft advise engine=...: costs in an engine, what acceptance makes of them, and traffic."""

from __future__ import annotations

import json

import pytest
from fake_engine import a_card, a_row
from workbench import foredraft, make_target, options_of, write_prompts

from decode.errors import UserError
from distill.commands.advise_engine import advise, describe
from distill.engine_costs.measure import Measured
from distill.options.commands import AdviseEngineOptions
from distill.serving.diagnosis import CPU_DRAWS

SMALL = ["score.prompts=2", "score.max_new_tokens=24", "lengths=[1,3]", "passes=[1,4]"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("advise") / "target"
    make_target(folder)
    write_prompts(folder.parent / "p.jsonl", 16)
    return folder


def words(target, *more):
    """The target as its own drafter in transformers: everything is accepted."""
    prompts = [f"prompts={target.parent / 'p.jsonl'}", "prompts.heldout_share=0.5", "target.dtype=float64"]
    named = any(word.startswith(("drafter=", "checkpoint=")) for word in more)
    drafter = [] if named else ["drafter=lm_given"]
    drafter += [f"drafter.path={target}"] * bool(drafter)
    return [f"target={target}", *prompts, *drafter, *SMALL, f"logs={target.parent / 'logs'}", *more]


def options(target, *more):
    named = [] if any(word.startswith("engine=") for word in more) else ["engine=transformers"]
    return options_of(*words(target, *named, *more), cls=AdviseEngineOptions, name="advise_engine")


@pytest.mark.parametrize("engine", ["transformers", "foredraft"])
def test_command_prints_and_writes_what_a_draft_model_gains(target, tmp_path, engine):
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt_tokens": 4, "completion_tokens": 400}\n')
    out = tmp_path / "out.json"
    more = [f"engine={engine}", "acceptance=1.0", f"traffic={log}", f"out={out}"]
    said = foredraft("advise", *words(target, *more)).succeeded().out
    card = json.loads(out.read_text())
    costs = card["measured"]["costs"][0]
    assert card["measured"]["engine"].startswith(engine)
    assert set(card["measured"]["passes"]) == {"1", "4"}
    assert [one["length"] for one in costs["lengths"]] == [1, 3]
    for one in costs["lengths"]:
        assert one["tau"] == pytest.approx(1 + one["drafted"], abs=0.1)  # all are accepted
    found = card["results"][0]
    assert found["speedup"] == found["ceiling"]
    assert f"ceiling: {found['ceiling']:.2f}x" in said
    verdict = "do not draft here" if found["speedup"] < 1.05 else f"{found['speedup']:.2f}x with drafts of"
    assert verdict in said
    assert card["traffic"]["requests"] == 1
    assert "traffic, 1 requests" in said
    assert not list((target.parent / "logs").iterdir()), "the exported drafter is removed"


def test_own_decoder_times_drafters_of_every_kind_and_batch(target, tmp_path):
    """A drafter of fixed depth is timed at that depth, and a batch takes a row's share of its seconds."""
    out = tmp_path / "out.json"
    more = ["engine=foredraft", "drafter=medusa", "drafter.depth=2", "batch_sizes=[1,3]", f"out={out}"]
    advise(options(target, *more))
    costs = json.loads(out.read_text())["measured"]["costs"]
    assert [one["batch_size"] for one in costs] == [1, 3]
    assert [one["length"] for one in costs[0]["lengths"]] == [1, 2]


@pytest.mark.parametrize(
    ("engine", "temperature", "on_cpu", "warned"),
    [
        ("vllm 0.32.0", 1.0, True, 1),
        ("vllm 0.32.0", 0.0, True, 0),
        ("vllm 0.32.0", 1.0, False, 0),
        ("llama.cpp b11549", 1.0, True, 0),
    ],
)
def test_wrong_draws_of_an_engine_are_named(engine, temperature, on_cpu, warned):
    card = {"temperature": temperature, "on_cpu": on_cpu, "prompts": 8, "max_new_tokens": 96, "results": []}
    card |= {"hardware": "a CPU", "load_average": 1.0}
    lines = list(describe(card, Measured(engine=engine, passes={}, costs=()), None, None))
    assert sum(CPU_DRAWS in line for line in lines) == warned


def test_without_an_acceptance_the_ceiling_is_the_result(target, tmp_path, capsys):
    out = tmp_path / "out.json"
    value = advise(options(target, f"out={out}"))
    card = json.loads(out.read_text())
    assert value == card["results"][0]["ceiling"]
    assert card["acceptance"] is None
    assert "predicted" not in capsys.readouterr().out


def test_drafts_that_cannot_pay_are_advised_against(target, capsys):
    """A draft of the target's own size costs as much as what it saves."""
    assert advise(options(target, "acceptance=0.1")) < 1.05
    said = capsys.readouterr().out
    assert "lm (given weights), T=0, batch 1" in said
    assert "=> T=0, batch 1: do not draft here: " in said


def test_an_acceptance_shorter_than_the_drafts_is_refused(target):
    with pytest.raises(UserError, match="known of 1 tokens, and the drafts have 2 or more"):
        advise(options(target, "acceptance=[0.5]", "lengths=[2]"))


def test_a_scorecard_gives_the_acceptance(target, tmp_path, capsys):
    card = tmp_path / "score.json"
    card.write_text(json.dumps(a_card(target, [a_row()])))
    advise(options(target, f"acceptance={card}"))
    assert f"acceptance: scored: chain-3, T=0, step 7 of {card}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["engine=tgi"], "engine=tgi: choose"),
        (["engine=vllm"], "engine=vllm: give engine_python="),
        (["engine=vllm", "engine_python=/nowhere/python"], "engine_python=/nowhere/python: no interpreter"),
        (["engine_python=/usr/bin/python3"], "engine_python: transformers runs in this process"),
        (["batch_sizes=[1,4]"], "one request at a time"),
        (["lengths=[]"], "lengths: give numbers"),
        (["lengths=[0,2]"], "lengths: give numbers"),
        (["passes=[0]"], "passes: give numbers"),
        (["lengths=[8]"], "score.max_new_tokens=24: too few .* give 36 or more"),
        (["checkpoint=x", "drafter=lm_given"], "give checkpoint="),
        (["traffic=none.jsonl"], "No such file"),
        (["acceptance=2.0"], "acceptance="),
        (["drafter=eagle", "drafter.path=null"], "drafter"),
    ],
)
def test_wrong_options_are_refused_before_the_target_is_loaded(target, more, message, monkeypatch):
    from distill.commands import advise_engine

    monkeypatch.setattr(advise_engine.TargetSource, "load", lambda *args, **more: pytest.fail("loaded"))
    with pytest.raises(UserError, match=message):
        advise(options(target, *more))


def test_a_drafter_is_needed(target):
    prompts = f"prompts={target.parent / 'p.jsonl'}"
    words = [f"target={target}", "engine=transformers", prompts, "prompts.heldout_share=0.5"]
    with pytest.raises(UserError, match="give checkpoint="):
        advise(options_of(*words, cls=AdviseEngineOptions, name="advise_engine"))


def test_traffic_needs_an_acceptance(target, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt_tokens": 4, "completion_tokens": 400}\n')
    with pytest.raises(UserError, match="traffic: needs the drafter's acceptance"):
        advise(options(target, f"traffic={log}"))


def test_a_drafter_that_the_engine_cannot_load_is_refused(target):
    with pytest.raises(UserError, match="eagle"):
        advise(options(target, "drafter=eagle"))


def test_options_of_the_other_advise_are_unknown():
    done = foredraft("advise", "engine=transformers", "drafter=eagle", "trees=[4]")
    assert done.code == 2
    assert "trees" in done.err
