"""Rollout runs that are killed: the same command ends with the same rows."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from workbench import ROOT, Bench, leftovers

from distill.rollouts.shard import is_whole

SHORT = ["score.enabled=false", "trainer.max_steps=1", "score.every=1", "target.dtype=float32"]
LONG = ["rollout.shard_size=1", "rollout.max_new_tokens=60"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def straight(bench, tmp_path_factory) -> tuple[dict[str, bytes], float]:
    """Shards of an undisturbed run, and the seconds it spent on them."""
    store = tmp_path_factory.mktemp("straight")
    bench.train(*SHORT, *LONG, f"rollout.store={store}").succeeded()
    seconds = [(store / name).stat().st_mtime for name in ("plan.json", "manifest.json")]
    return shards(store), seconds[1] - seconds[0]


def shards(store: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(store.glob("*.parquet"))}


def ids(store: Path) -> list[str]:
    return [name for p in sorted(store.glob("*.parquet")) for name in pq.read_table(p)["id"].to_pylist()]


def kill(bench: Bench, reached: Callable[[], bool], *options: str) -> bool:
    """`python train.py` until `reached`, then SIGKILL; whether it was still running."""
    child = os.fork()
    if not child:
        try:
            bench.train(*options)
        finally:
            os._exit(0)
    while not reached():
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def ends_the_same(bench: Bench, store: Path, straight: dict[str, bytes], *options: str) -> None:
    for shard in store.glob("*.parquet"):
        number = int(shard.stem.removeprefix("shard-"))
        key = pq.read_schema(shard).metadata[b"plan"].decode()
        assert is_whole(shard, key, number), "half a shard has a whole one's name"
    whole = {p: p.stat().st_mtime_ns for p in store.glob("*.parquet")}
    bench.train(*options).succeeded()
    assert shards(store) == straight
    assert len(set(ids(store))) == len(ids(store)) == 12
    assert {name: (store / name).stat().st_mtime_ns for name in whole} == whole, (
        "a whole shard was made again"
    )
    assert not leftovers(store)


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_run_killed_at_20_random_moments_ends_with_the_same_rows(bench, straight, tmp_path):
    rows, seconds = straight
    left = []
    for i, place in enumerate(np.random.default_rng(0).uniform(0, 13, 20)):
        store = tmp_path / str(i)
        options = [*SHORT, *LONG, f"rollout.store={store}", "resume=never"]
        there: list[float] = []

        def reached(store=store, there=there, place=place):
            if not there and (store / "plan.json").exists() and len(shards(store)) >= int(place):
                there.append(time.time())
            return bool(there) and time.time() - there[0] > place % 1 * seconds / 12

        assert kill(bench, reached, *options)
        left.append(12 - len(shards(store)))
        ends_the_same(bench, store, rows, *options)
    print(f"shards still missing at the 20 kills: {left}")
    assert {0, 12} <= set(left), "no kill before the first shard, or none after the last"
    assert len(set(left)) > 7, "the moments were not spread over the run"


@pytest.mark.proof
def test_rank_that_torchrun_restarts_loses_no_shard(bench, straight, tmp_path):
    store = tmp_path / "store"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["trainer=ddp", "trainer.devices=2", *SHORT, *LONG, f"rollout.store={store}"]
    run = subprocess.Popen(
        [*launcher, "--max-restarts=1", "train.py", *bench.command, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    while run.poll() is None and not shards(store):
        time.sleep(0.002)
    (second,) = [pid for pid in children(run.pid) if "RANK=1" in environment(pid)]
    os.kill(second, signal.SIGKILL)
    before = shards(store)
    _, error = run.communicate()
    assert run.returncode == 0, error
    assert len(before) < 12, "the kill came too late to prove anything"
    assert shards(store) == straight[0]
    assert len(set(ids(store))) == len(ids(store)) == 12


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_in_rollouts_ends_the_run_with_a_line(bench, monkeypatch, capfd, number):
    def make(*_: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    before = bench.runs()
    monkeypatch.setattr("distill.train.produce", make)
    status = bench.fork(f"seed={number}")
    assert os.waitstatus_to_exitcode(status) == 128 + number
    (folder,) = [run for run in bench.runs() if run not in before]
    said = f"stopped by {signal.Signals(number).name}: what is finished is kept; the same command continues"
    assert f"{said} in {folder}\n" in capfd.readouterr().err
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.fixture
def lightning(bench, tmp_path, request) -> Iterator[tuple[Path, subprocess.Popen]]:
    """A store, and `python train.py trainer=ddp trainer.devices=2` that fills it: Lightning starts rank 1."""
    options = ["trainer=ddp", "trainer.devices=2", *SHORT, *LONG, f"rollout.store={tmp_path / 'store'}"]
    command = [sys.executable, "train.py", *bench.command, *options, *getattr(request, "param", ())]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, **pipes)
    yield tmp_path / "store", run
    run.kill()


@pytest.mark.proof
def test_ranks_that_lightning_starts_make_the_rows_of_one_process(lightning, straight):
    store, run = lightning
    out, error = run.communicate()
    assert run.returncode == 0, error
    assert shards(store) == straight[0]
    (line,) = [line for line in out.splitlines() if "shards made by each of 2 processes" in line]
    each = [int(word) for word in line.rpartition(": ")[2].split(", ")]
    assert sum(each) == 12
    assert all(each), "a rank had nothing to do"


@pytest.mark.proof
def test_rank_that_dies_in_rollouts_ends_the_run_in_one_line(lightning):
    store, run = lightning
    while run.poll() is None and not shards(store):
        time.sleep(0.002)
    (second,) = [pid for pid in children(run.pid) if "LOCAL_RANK=1" in environment(pid)]
    os.kill(second, signal.SIGKILL)
    killed = time.monotonic()
    _, error = run.communicate()
    assert time.monotonic() - killed < 60
    assert run.returncode == 1, error
    (line,) = error.splitlines()
    assert line.startswith(("error: rank 1 of this run has ended with code -9", "error: another process"))


@pytest.mark.proof
@pytest.mark.parametrize(
    "lightning", [["rollout=openai", "rollout.url=http://127.0.0.1:9/v1"]], indirect=True
)
def test_error_of_all_ranks_is_reported_once(lightning):
    _, run = lightning
    _, error = run.communicate()
    assert run.returncode == 2, error
    (line,) = error.splitlines()
    assert line.startswith("error: rollout.url=http://127.0.0.1:9/v1")


def children(parent: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def environment(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")
