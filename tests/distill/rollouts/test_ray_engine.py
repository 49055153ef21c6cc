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
from workbench import leftovers, options_of

from decode.errors import UserError
from distill.config.build import build_target, read_chat
from distill.options import FleetOptions
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


def fate(store, load, shard: int = 0):
    (row,) = zip(*Worker(store, load)({"item": [shard]}).values(), strict=True)
    return row


# -- a worker, without Ray -----------------------------------------------------------------------


def test_a_worker_loads_once_and_says_what_became_of_a_shard(parts, tmp_path):
    store, loaded = begun(tmp_path, parts[2]), []
    worker = Worker(store, lambda: loaded.append(1) or nothing())
    for shard in (0, 2):
        assert worker({"item": [shard]}) == {"item": [shard], "fate": ["whole"], "errno": [0]}
    assert loaded == [1]
    assert store.missing() == [1, 3]
    with store._lock("shard-00001"):
        assert fate(store, nothing, 1) == (1, "busy", 0)
    assert not leftovers(tmp_path)


def test_what_a_user_can_mend_comes_back_as_text(parts, tmp_path):
    store = begun(tmp_path, parts[2])

    def other():
        raise UserError("target=x: a worker has another model")

    def full(*work):
        raise OSError(28, "No space left on device", "/a/file")

    assert fate(store, other) == (0, "target=x: a worker has another model", 0)
    assert fate(store, lambda: full) == (0, "No space left on device (/a/file)", 28)
    assert store.missing() == [0, 1, 2, 3]


def test_a_shard_that_kills_every_worker_is_given_up(parts, tmp_path):
    store = begun(tmp_path, parts[2])

    def kill(*work):
        os.kill(os.getpid(), 9)

    for _ in range(ray_engine.TRIES):
        child = os.fork()
        if not child:
            fate(store, lambda: kill)
        assert os.waitpid(child, 0)[1] == 9
    number, text, _ = fate(store, nothing)
    assert number == 0
    assert "workers died 6 times at shard-00000.parquet" in text
    assert fate(store, nothing)[1] == "whole", "the next run does not begin anew"


def test_what_cannot_be_had_is_one_line(bench, monkeypatch):
    wrong = bench.train("rollout.engine=ray", "score.enabled=false")
    assert wrong.err == "error: rollout.engine=ray: choose it with rollout=ray, which has its settings\n"
    many = torch.cuda.device_count() + 1
    greedy = Fleet(replace(CREW, workers=1, gpus_per_worker=many), nothing)
    with pytest.raises(UserError, match=f"1 workers want {many} GPUs, and this"), greedy.connected():
        pass
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(UserError, match=r"Ray is not installed; pip install 'foredraft\[ray\]'"):
        Fleet(CREW, nothing)


def test_engines_in_workers_are_refused_what_they_cannot_do(bench, monkeypatch):
    def options(*more):
        return options_of(*bench.command, "rollout=ray", *more)

    run = options("rollout.engine_python=/opt/vllm/bin/python")
    target, chat = build_target(run.target), read_chat(run.target, run.prompts.template)
    prompts = read_prompts(bench.prompts)

    def refused(run, said, **changes):
        plan = replace(rollout_plan(run, target, chat, prompts), **changes)
        with pytest.raises(UserError, match=said):
            work_of(run, target, chat, RolloutStore(bench.root / "none", plan, prompts), None)

    refused(run, "rollout.until=answer", until="length")
    refused(run, "workers could not tell whether they have this target", target="of other weights")
    refused(options('rollout.engine_arguments=["--max-model-len=64"]'), "give rollout.engine_python")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refused(run, "rollout.gpus_per_worker=0: the engines of 2 workers would share a GPU")


def test_rows_of_engines_are_kept_apart_by_what_decides_them(bench):
    words = ["rollout=ray", "rollout.engine_python=/opt/vllm/bin/python"]
    more = ['rollout.engine_arguments=["--max-model-len=64"]']
    runs = [options_of(*bench.command, *given) for given in (["rollout=ray"], words, [*words, *more])]
    target, chat = build_target(runs[0].target), read_chat(runs[0].target, runs[0].prompts.template)
    plans = [rollout_plan(run, target, chat, read_prompts(bench.prompts)) for run in runs]
    name = str(bench.target)
    assert [plan.server for plan in plans] == ["", name, f"{name} --max-model-len=64"]
    assert len({plan.key for plan in plans}) == 3


def test_a_temperature_that_is_greedy_is_planned_as_such(bench):
    """No samples that are all alike, and no temperature that an engine would divide by."""
    words = ["rollout.samples=null", "rollout.temperature=1e-39", "rollout.prompt_temperature=1e-45"]
    run, greedy = (
        options_of(*bench.command, *given) for given in (words, [words[0], "rollout.temperature=0"])
    )
    target, chat = build_target(run.target), read_chat(run.target, run.prompts.template)
    prompts = read_prompts(bench.prompts)
    plan = rollout_plan(run, target, chat, prompts)
    assert (plan.samples, plan.sampler["temperature"], plan.prompt_sampler) == (1, 0.0, {"temperature": 0.0})
    assert plan.sampler == rollout_plan(greedy, target, chat, prompts).sampler
    for wrong in ("rollout.temperature=.inf", "rollout.prompt_temperature=.nan", "rollout.top_p=0"):
        with pytest.raises(UserError, match=r"(sampling: |not a number|must be)"):
            rollout_plan(options_of(*bench.command, wrong), target, chat, prompts)


# -- two of them ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fleet():
    """Ray on this machine, for all tests that want it."""
    with Fleet(CREW, nothing).connected():
        yield lambda load: Fleet(CREW, load)


@pytest.mark.proof
def test_the_command_gives_the_rows_of_one_process(bench, tmp_path, fleet):
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
def test_a_worker_that_is_killed_loses_no_shard_and_doubles_none(bench, tmp_path, fleet):
    options = ["rollout=ray", "rollout.temperature=0.0", "rollout.shard_size=3"]
    run = options_of(*bench.command, *options)
    target, chat = build_target(run.target), read_chat(run.target, run.prompts.template)
    prompts = read_prompts(bench.prompts)
    plan = rollout_plan(run, target, chat, prompts)
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
