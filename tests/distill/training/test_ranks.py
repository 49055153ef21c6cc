"""Processes that train one drafter: one dies, hangs or stops, or there are more or fewer of them."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from workbench import ROOT, Bench, Outcome, Ranks, final, leftovers, ranks, same, weights

from decode.errors import UserError
from distill.distributed.graceful_shutdown import Stop
from distill.rollouts import store as rollouts
from distill.scoring import scorer as scoring
from distill.training.module import DistillModule
from distill.utils.run_folder import checkpoints

OPTIONS = ["trainer=ddp", "trainer.devices=2", "score.every=2"]


def train(bench: Bench, *more: str, **options) -> list[Outcome]:
    return ranks(2, [*bench.command, *OPTIONS, *more], **options)


def finish(bench: Bench, *more: str, **options) -> Outcome:
    """The same, of which rank 0 is returned if both succeed."""
    done = train(bench, *more, **options)
    assert [d.code for d in done] == [0, 0], done
    return done[0]


@pytest.fixture(scope="module")
def straight(bench) -> Path:
    """An undisturbed run of two processes."""
    return finish(bench).folder


def at(owner, name: str, which: int, when, what) -> object:
    """`what` in process `which` at the first call of `owner.name` for which `when` holds."""

    def arrange(rank: int) -> None:
        call, done = getattr(owner, name), []

        def spoilt(*args, **options):
            if not done and when(*args):
                done.append(True)
                what()
            return call(*args, **options)

        if rank == which:
            setattr(owner, name, spoilt)

    return arrange


def send(number: int):
    """A function that sends this process a signal."""
    return lambda: os.kill(os.getpid(), number)


def in_step_3(_, batch, number):
    return number == 3


def scores_4(folder, *_):
    return folder.name == "4"


def waits_at_4(_, trainer):
    return trainer.global_step == 4 and not time.sleep(0.5)  # the other has begun to score by then


@pytest.mark.parametrize("trainer", ["ddp", "fsdp"])
@pytest.mark.proof
def test_score_of_step_0_changes_no_weight(trainer, bench, straight, tmp_path):
    """Lightning's FSDP saves an optimizer without state by making a step."""
    words = [f"trainer={trainer}", f"output_dir={tmp_path}"]
    folder = finish(bench, *words, "score.start=true").folder
    assert [path.name for path in checkpoints(folder)] == ["0", "2", "4", "6"]
    assert (folder / "checkpoints" / "0" / "score.json").exists()
    plain = straight if trainer == "ddp" else finish(bench, *words).folder
    assert same(final(folder), final(plain))


# rank, where it dies, the step of the newest checkpoint by then
DEATHS = {
    "the second, in a step": (1, DistillModule, "training_step", in_step_3, 2),
    "the first, scoring": (0, scoring.checkpoint_io, "load", scores_4, 4),
    "the first, in a step": (0, DistillModule, "training_step", in_step_3, 2),
    "the second, waiting": (1, Stop, "synchronize", waits_at_4, 4),
}


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.ci("the first, scoring")
def test_dead_rank_ends_the_other_and_the_same_command_resumes(death, bench, straight):
    which, owner, name, when, kept = DEATHS[death]
    done = train(bench, before=at(owner, name, which, when, send(signal.SIGKILL)))
    dead, other = done[which], done[1 - which]
    assert dead.code == -signal.SIGKILL
    assert other.code == 1, other
    assert other.ended - dead.ended < 60
    (line,) = other.err.splitlines()
    assert line.startswith("error: another process of this run has ended")
    assert line.endswith(f"checkpoints/{kept}")
    folder = next((bench.root / "outputs").rglob("checkpoints")).parent
    (folder / "phases.json.1.tmp").write_text("{")  # killed while it wrote
    again = finish(bench)
    assert f"resuming from step {kept}" in again.out
    assert same(final(again.folder), final(straight))
    assert [p.name for p in checkpoints(again.folder)] == ["2", "4", "6"]
    assert not leftovers(again.folder)


def slurm(rank: int, count: int, port: int) -> dict[str, str]:
    """What srun tells a task on one node."""
    return {
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": str(count),
        "SLURM_NTASKS_PER_NODE": str(count),
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


@pytest.mark.proof
def test_signal_to_one_slurm_task_stops_all_at_the_same_step(bench, straight):
    """With the signal that Lightning would requeue the job at."""
    ask = at(DistillModule, "training_step", 1, in_step_3, send(signal.SIGUSR1))
    stopped = train(bench, before=ask, launcher=slurm)
    assert [d.code for d in stopped] == [143, 143], stopped
    assert stopped[0].err.startswith("stopped by SIGUSR1 at step 4;")
    assert stopped[1].err == ""
    again = finish(bench, launcher=slurm)
    assert "resuming from step 4" in again.out
    assert not list(again.folder.rglob("hpc_ckpt*")), "Lightning saved a checkpoint of its own"
    assert same(final(again.folder), final(straight))


@pytest.mark.proof
def test_more_processes_than_configured_are_refused(bench):
    before = bench.runs()
    done = ranks(2, [*bench.command, "seed=5"])
    for outcome in done:
        outcome.refused("trainer: devices=1", "2 have been started")
    assert bench.runs() == before


def test_state_of_other_processes_is_refused(bench, straight, tmp_path):
    """Batches depend on how many there are."""
    shutil.copytree(straight, tmp_path / "run", symlinks=True)
    state = tmp_path / "run" / "checkpoints" / "6" / "trainer" / "state.json"
    assert json.loads(state.read_text()) == {"processes": 2, "strategy": "DDP", "precision": "bf16-mixed"}
    with pytest.raises(UserError, match=r"^resume: .*/6 was saved by 2 processes.*these are 1 process"):
        bench.run(tmp_path / "run", score__every=2)


@pytest.mark.proof
@pytest.mark.parametrize("which", [0, 1])
def test_lightnings_own_ranks_end_one_another(which, bench, straight):
    """`python train.py trainer=ddp trainer.devices=2`, SIGKILL for one of them, and the command again."""
    command = [sys.executable, "train.py", *bench.command, *OPTIONS]
    place = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "text": True}
    before = bench.runs()
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **place)
    while not (folder := next((p for p in bench.runs() if p not in before and checkpoints(p)), None)):
        time.sleep(0.002)
    (child,) = (int(p) for p in Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split())
    os.kill((first.pid, child)[which], signal.SIGKILL)
    killed = time.monotonic()
    _, said = first.communicate()  # ends when both have closed it
    assert time.monotonic() - killed < 60
    assert first.returncode == (-signal.SIGKILL if which == 0 else 1), said
    (line,) = said.splitlines()
    assert line.startswith(("error: another process of this run", f"error: rank {which} of this run")), said
    again = subprocess.run(command, capture_output=True, **place)
    assert again.returncode == 0, again.stderr
    assert "resuming from step" in again.stdout
    assert again.stdout.splitlines()[-1] == str(folder)
    assert same(final(folder), final(straight))


@pytest.mark.proof
@pytest.mark.timeout(1800)  # eight processes on a few cores
@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.long)])
def test_run_of_eight_that_is_killed_ends_with_the_same_bits(bench, tmp_path, kills):
    """At random moments: one process, all of them, or a signal to one, which stops all at the same step."""
    steps = 12
    sizes = ["batch_size=1", f"trainer.max_steps={steps}", "trainer.precision=32-true", "taps=online"]
    command = [*bench.command, *OPTIONS, *sizes, "trainer.devices=8", "score.enabled=false"]
    begun = time.monotonic()
    done = ranks(8, [*command, f"hydra.run.dir={tmp_path / 'straight'}"])
    assert [outcome.code for outcome in done] == [0] * 8, done
    whole = time.monotonic() - begun
    straight = weights(tmp_path / "straight" / "checkpoints" / str(steps))

    dice, killed, runs, resumed = random.Random(0), 0, 0, 0
    while killed < kills or resumed == 0:
        runs += 1
        assert runs <= 2 * kills, "kills come too late to prove anything"
        folder = tmp_path / f"killed-{runs}"
        while True:
            begun = time.monotonic()
            started = Ranks(8, [*command, f"hydra.run.dir={folder}"])
            resumed += bool(checkpoints(folder))
            time.sleep(dice.uniform(0.2, 0.9) * whole)
            alive = [pid for pid in started.pids if Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"]
            if len(alive) == 8 and killed < kills:
                number, hit = dice.choice([(signal.SIGKILL, 1), (signal.SIGKILL, 8), (signal.SIGTERM, 1)])
                for pid in dice.sample(alive, hit):
                    os.kill(pid, number)
                killed += 1
            if all(outcome.code == 0 for outcome in started.wait()):
                whole = min(whole, time.monotonic() - begun)
                break
        assert same(weights(folder / "checkpoints" / str(steps)), straight)
        assert not leftovers(folder)


MINUTES = 0.05  # 3 seconds
LIMIT = f"timeout_minutes={MINUTES}"


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.ci("0")
@pytest.mark.usefixtures("straight")
def test_rank_that_hangs_ends_with_all_others(which, bench):
    def hang() -> None:
        time.sleep(600)

    begun = time.monotonic()
    done = train(
        bench,
        LIMIT,
        f"seed={which + 3}",
        "score.enabled=false",
        before=at(DistillModule, "training_step", which, in_step_3, hang),
    )
    assert time.monotonic() - begun < 60
    assert [d.code for d in done] == [1, 1], done
    for rank, one in enumerate(done):
        (line,) = one.err.splitlines()
        own = rf"error: rank {rank} has made no progress for 0\.05 minutes in step 4, at \w+ \(.+:\d+\)"
        lost = r"error: another process of this run has ended"
        assert re.match(own if rank == which else f"{own}|{lost}", line), line
        assert "checkpoints/2" in line
    assert "at hang (test_ranks.py:" in done[which].err
    assert "timeout_minutes= gives more time" in done[which].err


@pytest.mark.usefixtures("straight")
@pytest.mark.proof
def test_scores_of_rank_0_may_take_longer(bench):
    """The other rank waits in a collective meanwhile."""
    slow = at(scoring.Scorer, "__call__", 0, lambda *_: True, lambda: time.sleep(2 * 60 * MINUTES))
    done = finish(bench, LIMIT, "seed=5", "trainer.max_steps=2", before=slow)
    assert [c.name for c in checkpoints(done.folder)] == ["2"]


@pytest.mark.proof
def test_rollouts_of_a_later_phase_may_take_longer(bench, monkeypatch):
    opened, times = rollouts.RolloutStore.open, []

    def slow(self):
        times.append(self)
        if len(times) > 1:
            time.sleep(2 * 60 * MINUTES)
        opened(self)

    monkeypatch.setattr(rollouts.RolloutStore, "open", slow)
    assert bench.fork(LIMIT, "rollout.refresh_every=3", "score.enabled=false") == 0
