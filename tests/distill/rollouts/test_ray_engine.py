"""A fleet of workers makes the rows that one process makes; a lost worker loses nothing."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from stores import PLAN, fill, make_writer, rows_of
from workbench import fork, leftovers, options_of

from decode.errors import UserError
from distill.config.build import TargetSource
from distill.options.answers import FleetOptions
from distill.prompts.sources import read_prompts
from distill.rollouts import ray_workers as ray_engine
from distill.rollouts.build import load_writer, portable, work_of
from distill.rollouts.produce import rollout_plan
from distill.rollouts.ray_workers import Fleet, Worker
from distill.rollouts.store import RolloutStore

pytest.importorskip("ray.data")
CREW = FleetOptions(workers=2, address=None, cpus_per_worker=1, gpus_per_worker=0)


def begun(folder, prompts, plan=PLAN) -> RolloutStore:
    store = RolloutStore(folder, plan, prompts)
    store.open()
    return store


def nothing():
    return lambda *work: []


def outcome(store, load, shard: int = 0):
    (row,) = zip(*Worker(store, load)({"item": [shard]}).values(), strict=True)
    return row


def planned(bench, *more, **given):
    """A run's options, what makes its rows, and its plan."""
    run = options_of(*bench.command, *more)
    source = TargetSource(run.target)
    parts = source.load(), source.chat(run.prompts.template), read_prompts(bench.prompts)
    return run, parts, replace(rollout_plan(run, *parts), **given)


# -- a worker, without Ray -----------------------------------------------------------------------


def test_worker_loads_once_and_reports_each_shard(parts, tmp_path):
    store, loaded = begun(tmp_path, parts[2]), []
    worker = Worker(store, lambda: loaded.append(1) or nothing())
    for shard in (0, 2):
        assert worker({"item": [shard]}) == {"item": [shard], "outcome": ["whole"], "errno": [0]}
    assert loaded == [1]
    assert store.missing() == [1, 3]
    with store._lock("shard-00001"):
        assert outcome(store, nothing, 1) == (1, "busy", 0)
    assert not leftovers(tmp_path)


def test_errors_of_the_user_come_back_as_text(parts, tmp_path):
    store = begun(tmp_path, parts[2])

    def other():
        raise UserError("target=x: a worker has another model")

    def full(*work):
        raise OSError(28, "No space left on device", "/a/file")

    assert outcome(store, other) == (0, "target=x: a worker has another model", 0)
    assert outcome(store, lambda: full) == (0, "No space left on device (/a/file)", 28)
    assert store.missing() == [0, 1, 2, 3]


def test_shard_that_kills_every_worker_is_given_up(parts, tmp_path):
    store = begun(tmp_path, parts[2])
    for _ in range(ray_engine.TRIES):
        assert fork(lambda: outcome(store, lambda: lambda *work: os.kill(os.getpid(), 9)) and 0) == 9
    number, text, _ = outcome(store, nothing)
    assert number == 0
    assert "workers died 6 times at shard-00000.parquet" in text
    assert outcome(store, nothing)[1] == "whole", "the next run does not begin again"


def test_missing_gpus_and_packages_are_one_line(bench, monkeypatch):
    bench.train("rollout.engine=ray", "score.enabled=false").refused("choose it with rollout=ray")
    many = torch.cuda.device_count() + 1
    greedy = Fleet(replace(CREW, workers=1, gpus_per_worker=many), nothing)
    with pytest.raises(UserError, match=f"1 workers want {many} GPUs"), greedy.connected():
        pass
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(UserError, match=r"pip install 'foredraft\[ray\]'"):
        Fleet(CREW, nothing)


ENGINE = ("rollout=ray", "rollout.engine_python=/opt/vllm/bin/python")
ARGUMENTS = 'rollout.engine_arguments=["--max-model-len=64"]'


@pytest.mark.parametrize(
    ("words", "given", "said"),
    [
        (ENGINE, {"until": "length"}, "rollout.until=answer"),
        (ENGINE, {"target": "of other weights"}, "an engine would load other weights"),
        (("rollout=ray", ARGUMENTS), {}, "give rollout.engine_python"),
        (ENGINE, {"seed": 1}, "rollout.gpus_per_worker=0: the engines of 2 workers would share a GPU"),
    ],
)
def test_impossible_plans_of_engines_are_refused(bench, monkeypatch, words, given, said):
    run, (target, chat, prompts), plan = planned(bench, *words, **given)
    if "GPU" in said:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=said):
        work_of(run, target, chat, RolloutStore(bench.root / "none", plan, prompts), None)


def test_engine_and_its_arguments_are_in_the_plan(bench):
    plans = [planned(bench, *words)[2] for words in (["rollout=ray"], ENGINE, [*ENGINE, ARGUMENTS])]
    name = str(bench.target)
    assert [plan.server for plan in plans] == ["", name, f"{name} --max-model-len=64"]
    assert len({plan.key for plan in plans}) == 3


def test_tiny_temperature_is_planned_as_greedy(bench):
    """No samples that are all alike, and no temperature that an engine would divide by."""
    samples = "rollout.samples=null"
    tiny = ["rollout.temperature=1e-39", "rollout.prompt_temperature=1e-45"]
    plan, greedy = (planned(bench, samples, *more)[2] for more in (tiny, ["rollout.temperature=0"]))
    assert (plan.samples, plan.sampler["temperature"], plan.prompt_sampler) == (1, 0.0, {"temperature": 0.0})
    assert plan.sampler == greedy.sampler
    for wrong in ("rollout.temperature=.inf", "rollout.prompt_temperature=.nan", "rollout.top_p=0"):
        with pytest.raises(UserError, match=r"(sampling: |not a number|must be)"):
            planned(bench, wrong)


# -- two of them ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fleet():
    """Ray on this machine, for all tests that want it."""
    with Fleet(CREW, nothing).connected():
        yield lambda load: Fleet(CREW, load)


@pytest.mark.proof
def test_command_gives_the_rows_of_one_process(bench, tmp_path, fleet):
    assert bench.base.rollout.temperature == 1
    options = ["score.enabled=false", "trainer.max_steps=1", "score.every=1"]
    one = bench.train(*options, f"output_dir={tmp_path / 'hf'}")
    many = bench.train(*options, f"output_dir={tmp_path / 'ray'}", "rollout=ray")
    assert (one.code, many.code) == (0, 0), many.err
    assert many.err == ""
    hf, ray = ({p.name: p.read_bytes() for p in (tmp_path / n).rglob("*.parquet")} for n in ("hf", "ray"))
    assert len(ray) == 3
    assert ray == hf
    assert not leftovers(tmp_path)
    again = bench.train(*options, f"output_dir={tmp_path / 'ray'}", "rollout=ray", "resume=never")
    assert "rollouts: reusing all 3 shards" in again.out


@pytest.mark.proof
def test_worker_that_is_killed_loses_no_shard_and_doubles_none(bench, tmp_path, fleet):
    options = ["rollout=ray", "rollout.temperature=0.0", "rollout.shard_size=3"]
    run, (target, chat, prompts), plan = planned(bench, *options)
    straight = RolloutStore(tmp_path / "hf", plan, prompts)
    fill(straight, make_writer(target, chat, plan))
    away, log = portable(run), tmp_path / "log"

    def load():
        writer = load_writer(away, plan)

        def make(shard, *work):
            with log.open("a") as lines:
                lines.write(f"{os.getpid()} {shard}\n")
            time.sleep(1.5)
            return writer(shard, *work)

        return make

    def begun_by() -> list[tuple[int, int]]:
        lines = log.read_text().splitlines() if log.exists() else []
        return [(int(pid), int(shard)) for pid, shard in map(str.split, lines)]

    killed = []

    def kill():
        while not killed:
            time.sleep(0.05)
            if len(made := begun_by()) > 2:  # the third shard, in the middle
                time.sleep(0.5)
                with suppress(ProcessLookupError):
                    os.kill(made[2][0], signal.SIGKILL)
                killed.append(made[2])

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    store, told = begun(tmp_path / "ray", prompts, plan), []
    fleet(load).fill(store, told.append)
    killer.join()
    assert store.complete
    assert rows_of(store) == rows_of(straight)
    times = [sum(shard == n for _, shard in begun_by()) for n in range(4)]
    assert times == [2 if n == killed[0][1] else 1 for n in range(4)], "a shard that was whole was made again"
    assert os.getpid() not in {pid for pid, _ in begun_by()}
    assert told[-1] == 0
    assert not leftovers(store.folder)
