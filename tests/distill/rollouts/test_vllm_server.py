"""`rollout=vllm`: sizes by the GPUs, one server that all processes of a machine share, and its errors."""

import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_server import FakeServer
from workbench import make_tokenizer, ranks

from decode.errors import UserError
from distill.engines import launch, vllm
from distill.engines.gpus import Gpu, spread, visible_gpus
from distill.prompts.chat_template import Chat
from distill.rollouts import vllm_server
from distill.utils.phase_log import STARTING, read_phases

GIB = 2**30
H100 = Gpu(79 * GIB, 80 * GIB)
START = 0.2  # seconds
SHORT = ["score.enabled=false", "trainer.max_steps=1", "score.every=1"]


@pytest.mark.parametrize(
    ("gpus", "gigabytes", "given", "arguments", "copies"),
    [
        ([H100] * 8, 16, [], "--gpu-memory-utilization=0.9 --data-parallel-size=8", 8),
        ([Gpu(60 * GIB, 80 * GIB)] * 8, 16, [], "--gpu-memory-utilization=0.72 --data-parallel-size=8", 8),
        (
            [H100] * 8,
            141,
            [],
            "--gpu-memory-utilization=0.9 --tensor-parallel-size=4 --data-parallel-size=2",
            2,
        ),
        ([H100], 16, ["--gpu-memory-utilization=0.5"], "", 1),
        ([H100] * 8, 16, ["-tp", "8"], "--gpu-memory-utilization=0.9", 1),
        ([H100] * 8, 16, ["--data-parallel-size=4"], "--gpu-memory-utilization=0.9", 4),
        ([], 16, [], "", 1),  # a vLLM for CPUs
    ],
)
def test_target_is_spread_over_as_few_gpus_as_hold_it(gpus, gigabytes, given, arguments, copies):
    assert spread(gpus, gigabytes * GIB, 32, given) == (arguments.split(), copies)


def test_target_that_does_not_fit_is_one_line():
    with pytest.raises(UserError, match=r"weights of 16\.0 GiB do not fit on 1 GPU with 12\.0 GiB free"):
        spread([Gpu(12 * GIB, 80 * GIB)], 16 * GIB, 32)
    with pytest.raises(UserError, match="do not fit on 3 GPUs"):  # three do not share 32 heads
        spread([H100] * 3, 141 * GIB, 32)
    with pytest.raises(UserError, match=r"rollout\.engine_arguments: .*invalid int value: 'x'"):
        spread([H100], GIB, 32, ["-tp=x"])


def test_interpreter_without_torch_is_named(tmp_path):
    (python := tmp_path / "python").write_text("#!/bin/sh\necho 'No module named torch' >&2; exit 1\n")
    python.chmod(0o755)
    with pytest.raises(UserError, match="cannot look for GPUs there: No module named torch"):
        visible_gpus(python)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollout.engine=vllm"], "choose it with rollout=vllm"),
        (["rollout=vllm"], "rollout=vllm: give rollout.engine_python or FOREDRAFT_VLLM_PYTHON"),
        (["rollout=vllm", "rollout.engine_python=/no/python"], "engine_python=/no/python: no interpreter"),
        (["rollout=vllm", f"rollout.engine_python={sys.executable}"], "has no package vllm"),
    ],
)
def test_missing_interpreters_are_refused_before_any_work(bench, monkeypatch, words, said):
    monkeypatch.delenv("FOREDRAFT_VLLM_PYTHON", raising=False)
    before = bench.runs()
    bench.train(*SHORT, *words).refused(said)
    assert bench.runs() == before


@pytest.fixture
def shared(bench, tmp_path):
    """Runs two ranks with a `serve` instead of vLLM's; each start is a line of a file."""
    log = tmp_path / "log"

    def run(serve, *words: str):
        def arrange(rank: int) -> None:
            @contextmanager
            def started(self, target, name, place, *arguments):
                with log.open("a") as lines:
                    lines.write(f"{rank} {' '.join(arguments)}\n")
                time.sleep(START)
                yield launch.Running(url=serve(place), pid=os.getpid())

            patch = pytest.MonkeyPatch()  # of a process that ends
            patch.setattr(launch, "interpreter", lambda python, *_: Path(python))
            patch.setattr(vllm.VLLM, "serve_target", started)
            patch.setattr(vllm_server, "visible_gpus", lambda python: [H100] * 2)

        options = ["trainer=ddp", "trainer.devices=2", "rollout=vllm", "rollout.engine_python=/vllm/python"]
        done = ranks(2, [*bench.command, *SHORT, *options, *words], before=arrange)
        return done, log.read_text().splitlines()

    return run


def test_ranks_share_one_server_and_both_make_rows(bench, shared):
    fake = FakeServer(Chat(make_tokenizer()), models=(str(bench.target),), delay=0.05)
    try:
        done, starts = shared(lambda place: fake.url.removesuffix("/v1"), "rollout.shard_size=1")
    finally:
        fake.kill()
    assert [one.code for one in done] == [0, 0], done
    assert starts == ["0 --gpu-memory-utilization=0.9 --data-parallel-size=2"]
    (rollouts,) = (phase for phase in read_phases(max(bench.runs())) if phase.name == "rollouts")
    assert START <= rollouts.amounts[STARTING] < rollouts.seconds  # which foredraft plan takes out
    (line,) = [line for line in done[0].out.splitlines() if "shards made by each of 2 processes" in line]
    assert all(int(count) for count in line.rpartition(": ")[2].split(", "))


def test_server_that_does_not_start_ends_all_ranks_in_the_same_line(shared):
    def fails(place):
        raise UserError(f"vllm: ended with code 1 before it was ready: no CUDA; see {place}")

    done, starts = shared(fails, "seed=7")
    assert len(starts) == 1
    for one in done:
        one.refused("ended with code 1 before it was ready: no CUDA")
