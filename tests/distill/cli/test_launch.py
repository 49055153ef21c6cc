"""Which process of a launch this is, and what it does when another has died."""

import os
import sys
import time

import pytest
from workbench import Bench, fork

from distill.utils.launcher import LAUNCHERS, PARENT, launch, watch, watch_parent
from distill.utils.run_folder import claim_at


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for numbers, others in LAUNCHERS:
        for variable in (*numbers, *others):
            monkeypatch.delenv(variable, raising=False)


def names(monkeypatch, **variables: str) -> tuple[bool, str] | None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return launch()


def test_a_process_alone_is_of_no_launch(monkeypatch):
    assert launch() is None
    assert names(monkeypatch, LOCAL_RANK="1", MASTER_ADDR="here", MASTER_PORT="1") is None


def test_tasks_of_a_slurm_step_share_a_name_and_a_requeued_job_has_another(monkeypatch):
    first = names(monkeypatch, SLURM_PROCID="0", SLURM_JOB_ID="7", SLURM_STEP_ID="0")
    other = names(monkeypatch, SLURM_PROCID="3")
    assert (first, other) == ((True, "7 0 "), (False, "7 0 "))
    assert names(monkeypatch, SLURM_RESTART_COUNT="1") == (False, "7 0 1")


def test_torchrun_inside_slurm_is_torchrun(monkeypatch):
    names(monkeypatch, SLURM_PROCID="0", SLURM_JOB_ID="7", SLURM_STEP_ID="0")
    found = names(monkeypatch, RANK="5", MASTER_ADDR="a", MASTER_PORT="1", TORCHELASTIC_RUN_ID="x")
    assert found == (False, "a 1 x")


def test_processes_started_by_hand_are_told_apart_by_node_and_place(monkeypatch):
    assert names(monkeypatch, NODE_RANK="2", MASTER_ADDR="a", MASTER_PORT="1") == (False, "a 1")
    assert names(monkeypatch, NODE_RANK="0", LOCAL_RANK="1") == (False, "a 1")
    assert names(monkeypatch, LOCAL_RANK="0") == (True, "a 1")


def ends(body) -> tuple[int, str]:
    """Exit code and stderr of a forked process that would otherwise hang."""
    inside, outside = os.pipe()

    def hang() -> int:
        os.dup2(outside, 2)
        sys.stderr = os.fdopen(2, "w")
        body()
        time.sleep(20)
        return 0

    status = fork(hang)
    os.close(outside)
    with os.fdopen(inside) as said:
        return os.waitstatus_to_exitcode(status), said.read()


def test_a_process_that_hangs_ends_after_another_has_died():
    begun = time.monotonic()
    answers = iter([None, "rank 3 has ended"])
    assert ends(lambda: watch(lambda: next(answers), grace=0.5)) == (1, "error: rank 3 has ended\n")
    assert 1.5 <= time.monotonic() - begun < 15


def test_a_rank_that_lightning_started_ends_after_its_parent(monkeypatch):
    monkeypatch.setattr("distill.utils.launcher.GRACE", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv(PARENT, str(2**22))
    assert ends(watch_parent) == (1, "error: rank 0 of this run has ended\n")


def test_a_finished_run_is_not_gone_on_with_under_another_objective(tmp_path):
    """`hydra.run.dir=` of it: only a rank that Lightning started finds its folder claimed."""
    bench = Bench(tmp_path)
    folder = f"hydra.run.dir={tmp_path / 'run'}"
    few = ["trainer.max_steps=2", "score.enabled=false", "score.every=2"]
    assert bench.train(*few, folder).succeeded().folder == tmp_path / "run"
    assert (tmp_path / "run" / "done").exists()
    bench.train(*few, folder, "objective=ce").refused("has a run of another configuration", "hydra.run.dir")
    bench.train(*few, folder, "objective=ce", "resume=never").refused("resume=never starts another")
    assert "resuming: " in bench.train(*few, folder).succeeded().out
    taken = claim_at(tmp_path / "other", tmp_path, {}, "auto")
    bench.train(*few, f"hydra.run.dir='{tmp_path}/other'").refused("another process is working there")
    taken.close()
