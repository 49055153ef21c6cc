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


SLURM = {"SLURM_PROCID": 0, "SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0}
BY_HAND = {"MASTER_ADDR": "a", "MASTER_PORT": 1}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"LOCAL_RANK": 1, **BY_HAND}, None),  # of Lightning
        (SLURM, (True, "7 0 ")),
        (SLURM | {"SLURM_PROCID": 3}, (False, "7 0 ")),
        (SLURM | {"SLURM_RESTART_COUNT": 1}, (True, "7 0 1")),
        (SLURM | BY_HAND | {"RANK": 5, "TORCHELASTIC_RUN_ID": "x"}, (False, "a 1 x")),
        ({"NODE_RANK": 2, **BY_HAND}, (False, "a 1")),
        ({"NODE_RANK": 0, "LOCAL_RANK": 1, **BY_HAND}, (False, "a 1")),
        ({"NODE_RANK": 0, "LOCAL_RANK": 0, **BY_HAND}, (True, "a 1")),
    ],
)
def test_processes_of_a_launch_share_a_name(variables, expected, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert launch() == expected


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


def test_a_finished_run_is_not_resumed_under_another_objective(tmp_path):
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
