"""`rollout=ray rollout.engine_python=...`: vLLM inside two Ray workers, one of which is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_tests import MARK, own_engines
from stores import rows_of
from workbench import ROOT, options_of

from decode.errors import UserError
from distill.config.build import TargetSource
from distill.options.answers import FleetOptions
from distill.prompts.sources import read_prompts
from distill.rollouts.build import EngineWriter, portable
from distill.rollouts.produce import rollout_plan
from distill.rollouts.ray_workers import Fleet
from distill.rollouts.store import RolloutStore

pytest.importorskip("ray.data")
pytestmark = pytest.mark.engine


@pytest.fixture
def options(bench, vllm_python: Path, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    arguments = ["--enforce-eager", "--max-model-len=256", "--max-num-seqs=8", MARK]
    given = ["rollout=ray", f"rollout.engine_python={vllm_python}", "rollout.temperature=0.0"]
    given += [f"target={ROOT / 'data' / 'pocket'}", "target.dtype=float32", "rollout.shard_size=3"]
    given += ["rollout.max_new_tokens=48"]
    return options_of(*bench.command, *given, rollout__engine_arguments=arguments)


def children(process: int) -> set[int]:
    words = ["pgrep", "-P", str(process)]
    found = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    return {int(pid) for pid in found.split()}


def remaining(find: Callable[[], set[int]], seconds: float = 30.0) -> set[int]:
    """Processes that are still found after so many seconds."""
    end = time.monotonic() + seconds
    while (found := find()) and time.monotonic() < end:
        time.sleep(0.2)
    return found


def alive(processes: set[int]) -> set[int]:
    return {process for process in processes if running(process)}


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def fleet(options) -> Iterator:
    crew = FleetOptions(workers=2, address=None, cpus_per_worker=1, gpus_per_worker=0)
    with Fleet(crew, lambda: lambda *work: []).connected():
        yield lambda load: Fleet(crew, load)


def test_killed_worker_loses_no_row_and_ends_its_engine(bench, options, fleet, tmp_path):
    source = TargetSource(options.target)
    target, chat = source.load(), source.chat(options.prompts.template)
    prompts = read_prompts(bench.prompts)
    plan = rollout_plan(options, target, chat, prompts)
    assert plan.server.startswith(options.target.name)  # rows of their own: another program draws them
    away, log = portable(options), tmp_path / "log"
    one = RolloutStore(tmp_path / "one", plan, prompts)
    one.open()
    single = EngineWriter(away, plan)
    one.fill(single, lambda missing: None)
    del single
    assert not remaining(own_engines)

    def load():
        writer = EngineWriter(away, plan)

        def make(shard, *work):
            with log.open("a") as lines:
                lines.write(f"{os.getpid()} {shard}\n")
            return writer(shard, *work)

        return make

    killed, engines = [], []

    def kill():
        while not killed:
            time.sleep(0.02)
            lines = log.read_text().split() if log.exists() else []
            if len(lines) > 4:  # the third shard, while its answers are written
                time.sleep(0.2)
                worker = int(lines[4])
                engines.append(alive(children(worker)))
                os.kill(worker, signal.SIGKILL)
                engines.append(remaining(lambda: alive(engines[0])))
                killed.append(lines[5])

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    many = RolloutStore(tmp_path / "many", plan, prompts)
    many.open()
    fleet(load).fill(many, lambda missing: None)
    killer.join()
    assert many.complete
    assert rows_of(many) == rows_of(one)
    made = log.read_text().split()[1::2]
    assert sorted(made) == sorted(["0", "1", "2", "3", *killed])
    of_worker, left = engines
    assert of_worker, "the worker had an engine"
    assert not left, "which ends with it"
    assert not remaining(own_engines), "as do the others at the end"


def test_an_engine_that_cannot_start_says_why(bench, options):
    wrong = replace(options, rollout=replace(options.rollout, engine_arguments=("--no-such-option",)))
    source = TargetSource(options.target)
    target, chat = source.load(), source.chat(options.prompts.template)
    plan = rollout_plan(options, target, chat, read_prompts(bench.prompts))
    with pytest.raises(UserError, match=r"ended with code 2 before it was ready: .*no-such-option"):
        EngineWriter(portable(wrong), plan)
