"""Two processes that train one drafter: one dies or is told to stop, or there are more or fewer of them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from workbench import ROOT, Bench, Outcome, final, leftovers, ranks, same

from decode.errors import UserError
from distill.distributed.graceful_shutdown import Stop
from distill.scoring import scorer as scoring
from distill.training.module import DistillModule
from distill.utils.run_folder import checkpoints

OPTIONS = ["trainer=ddp", "trainer.devices=2", "score.every=2"]


def train(bench: Bench, *more: str, **options) -> list[Outcome]:
    return ranks(2, [*bench.command, *OPTIONS, *more], **options)


@pytest.fixture(scope="module")
def straight(bench) -> Path:
    """An undisturbed run of two processes."""
    done = train(bench)
    assert [d.code for d in done] == [0, 0], done
    return done[0].folder


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


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def in_step_3(_, batch, number):
    return number == 3


def scores_4(folder, *_):
    return folder.name == "4"


def waits_at_4(_, trainer):
    return trainer.global_step == 4 and not time.sleep(0.5)  # the other has begun to score by then


DEATHS = {
    "the second, in a step": (1, DistillModule, "training_step", in_step_3, 2),
    "the first, scoring": (0, scoring.hub, "load", scores_4, 4),
    "the first, in a step": (0, DistillModule, "training_step", in_step_3, 2),
    "the second, waiting": (1, Stop, "synchronize", waits_at_4, 4),
}
IN_CI = list(DEATHS)[:2]


@pytest.mark.proof
def test_nor_with_sharded_weights(bench, tmp_path):
    """Lightning's FSDP saves an optimizer without state by making a step."""
    ended = []
    for start in ("false", "true"):
        words = ["trainer=fsdp", f"score.start={start}", f"output_dir={tmp_path / start}"]
        done = ranks(2, [*bench.command, *OPTIONS, *words])
        assert [d.code for d in done] == [0, 0], done
        ended.append(final(done[0].folder))
    assert same(*ended)


def test_the_score_of_step_0_changes_nothing_behind_it(bench, straight):
    done = train(bench, "score.start=true")
    assert [d.code for d in done] == [0, 0], done
    folder = done[0].folder
    assert [path.name for path in checkpoints(folder)] == ["0", "2", "4", "6"]
    assert (folder / "checkpoints" / "0" / "score.json").exists()
    assert same(final(folder), final(straight))


@pytest.mark.parametrize(
    "death", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.proof) for name in DEATHS]
)
@pytest.mark.ci("the first, scoring")
def test_a_dead_rank_ends_the_other_with_a_line_and_the_same_command_goes_on(death, bench, straight):
    which, owner, name, when, kept = DEATHS[death]
    done = train(bench, before=at(owner, name, which, when, die))
    dead, other = done[which], done[1 - which]
    assert dead.code == -signal.SIGKILL
    assert other.code == 1, other
    assert other.ended - dead.ended < 60
    (line,) = other.err.splitlines()
    assert line.startswith("error: another process of this run has ended, or is out of reach (")
    assert line.endswith(f"; the same command goes on from checkpoints/{kept}")
    again = train(bench)
    assert [d.code for d in again] == [0, 0], again
    assert f"resuming from step {kept}" in again[0].out
    assert same(final(again[0].folder), final(straight))
    assert [p.name for p in checkpoints(again[0].folder)] == ["2", "4", "6"]
    assert not leftovers(again[0].folder)


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
def test_a_signal_to_one_task_of_a_slurm_job_stops_all_at_the_same_step(bench, straight):
    """With the signal that Lightning would requeue the job at."""

    def ask():
        os.kill(os.getpid(), signal.SIGUSR1)

    stopped = train(bench, before=at(DistillModule, "training_step", 1, in_step_3, ask), launcher=slurm)
    assert [d.code for d in stopped] == [143, 143], stopped
    said = "stopped by SIGUSR1 at step 4; the same command goes on from there\n"
    assert [d.err for d in stopped] == [said, ""]
    again = train(bench, launcher=slurm)
    assert [d.code for d in again] == [0, 0], again
    assert "resuming from step 4" in again[0].out
    assert not list(again[0].folder.rglob("hpc_ckpt*")), "Lightning saved a checkpoint of its own"
    assert same(final(again[0].folder), final(straight))


@pytest.mark.proof
def test_more_processes_than_the_configuration_asks_for_are_refused(bench):
    before = bench.runs()
    done = ranks(2, [*bench.command, "seed=5"])
    assert [d.code for d in done] == [2, 2]
    assert done[0].err == done[1].err
    assert re.fullmatch(
        r"error: trainer: devices=1 .* are 1 processes, but 2 have been started; .*\n", done[0].err
    )
    assert bench.runs() == before


def test_a_state_of_other_processes_is_refused(bench, straight, tmp_path):
    """Batches depend on how many there are."""
    shutil.copytree(straight, tmp_path / "run", symlinks=True)
    state = tmp_path / "run" / "checkpoints" / "6" / "trainer" / "state.json"
    assert json.loads(state.read_text()) == {
        "processes": 2,
        "strategy": "DDP",
        "precision": "bf16-mixed",
    }
    with pytest.raises(UserError) as refused:
        bench.run(tmp_path / "run", score__every=2)
    assert str(refused.value) == (
        f"resume: {tmp_path}/run/checkpoints/6 was saved by 2 processes (DDP, bf16-mixed), and these "
        "are 1 process (SingleDeviceStrategy, bf16-mixed); start as many as then, or a new run with "
        f"resume=never drafter.init_from={tmp_path}/run/checkpoints/6"
    )


@pytest.mark.proof
@pytest.mark.parametrize("which", [0, 1])
def test_lightnings_own_ranks_end_one_another(which, bench, straight):
    """`python train.py trainer=ddp trainer.devices=2`, SIGKILL for one of them, and the command again."""
    command = [sys.executable, "train.py", *bench.command, *OPTIONS]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    before = bench.runs()
    first = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (folder := next((p for p in bench.runs() if p not in before and checkpoints(p)), None)):
        time.sleep(0.002)
    (child,) = (int(p) for p in Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split())
    os.kill((first.pid, child)[which], signal.SIGKILL)
    killed = time.monotonic()
    _, said = first.communicate()  # ends when both have closed it
    assert time.monotonic() - killed < 60
    assert first.returncode == (-signal.SIGKILL if which == 0 else 1), said
    assert len(said.splitlines()) == 1, said
    lost = "another process of this run has ended, or is out of reach"
    assert said.startswith((f"error: {lost} (", f"error: rank {which} of this run has ended")), said
    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "resuming from step" in again.stdout
    assert again.stdout.splitlines()[-1] == str(folder)
    assert same(final(folder), final(straight))
