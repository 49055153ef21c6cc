"""Sweeps: mistakes are found before a job starts, other jobs run when one fails, jobs return tau."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
from compared import FAST, card, row
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import DictConfig
from workbench import CONF, ROOT, Bench, Outcome, command, leftovers, tau, train

from decode.errors import UserError
from distill.cli import sweep as multirun
from distill.cli.main import main

SMALL = Path("conf")
YAML = {
    "config.yaml": "defaults: [drafter: eagle, prompts: jsonl, _self_]\noutput_dir: out\n",
    "drafter/eagle.yaml": "depth: 2\n",
    "drafter/medusa.yaml": "depth: 5\n",
    "prompts/jsonl.yaml": "path: null\n",
}
GRID = ["-m", "drafter.depth=2,4"]


# Hydra executes the modules of its plugins itself, so that what is imported is another class.
BASIC = Plugins.instance().class_name_to_class["hydra._internal.core_plugins.basic_sweeper.BasicSweeper"]


class Recorder(BASIC):
    """Keeps what jobs return; as with any sweeper but Hydra's own, its jobs are not known beforehand."""

    values: list[float]

    def sweep(self, arguments: list[str]) -> None:
        Recorder.values = [job.return_value for batch in super().sweep(arguments) for job in batch]


@pytest.fixture
def recorder(monkeypatch) -> type[Recorder]:
    """As a plugin, which `hydra/sweeper=recorder` chooses."""
    plugin = ModuleType("hydra_plugins.recorder")
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    monkeypatch.setattr(Recorder, "__module__", plugin.__name__)
    monkeypatch.setattr(plugin, "Recorder", Recorder, raising=False)
    Plugins.instance().register(Recorder)
    node = {"_target_": "hydra_plugins.recorder.Recorder", "max_batch_size": None, "params": None}
    ConfigStore.instance().store(group="hydra/sweeper", name="recorder", node=node)
    return Recorder


def depth_of(cfg: DictConfig, folder: Path) -> float:
    """A job that takes no time."""
    (folder / "worked").touch()
    return float(cfg.drafter.depth)


def sweep(*argv: str, task: Callable[[DictConfig, Path], float] = depth_of, conf: Path = SMALL) -> Outcome:
    return command(lambda: main(task, conf.absolute()), ["train.py", *argv])


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """A configuration with next to nothing in it: Hydra composes one a dozen times in a sweep."""
    monkeypatch.chdir(tmp_path)
    for name, text in YAML.items():
        (SMALL / name).parent.mkdir(parents=True, exist_ok=True)
        (SMALL / name).write_text(text)


def jobs(done: Outcome) -> dict[str, Path]:
    """Folders of the jobs that began, by name."""
    found = sorted(done.folder.glob("*/run.json"))
    return {json.loads(path.read_text())["job"]: path.parent for path in found}


def test_job_has_its_own_folder_and_name(tmp_path):
    """Of an experiment that sweeps, one of whose choices the command line replaces."""
    argv = ["experiment=sweep_depth_objective", "objective=tv", f"output_dir={tmp_path / 'out'}"]
    done = sweep(*argv, conf=CONF).succeeded()
    assert done.err == ""
    assert done.folder.parent.parent == Path("multirun")
    found = jobs(done)
    assert list(found) == ["drafter.depth=2", "drafter.depth=4"]
    assert all((folder / "done").exists() and (folder / "worked").exists() for folder in found.values())
    assert not (tmp_path / "out").exists()


def test_drafter_inside_another_is_swept():
    (SMALL / "drafter" / "union.yaml").write_text("defaults: [/drafter@first: eagle]\ndepth: 3\n")
    done = sweep("-m", "drafter=union", "drafter.first=medusa,eagle").succeeded()
    found = {frozenset(name.split(",")) for name in jobs(done)}
    assert found == {frozenset(("drafter=union", f"drafter@drafter.first={n}")) for n in ("medusa", "eagle")}


@pytest.mark.proof
def test_paths_and_groups_are_swept(tmp_path, recorder):
    files = [tmp_path / name for name in ("a b.jsonl", "it's.jsonl")]
    for file in files:
        file.touch()
    done = sweep("-m", f"prompts={files[0]},{files[1]}", "drafter=medusa,eagle", "hydra/sweeper=recorder")
    assert done.code == 0, done.err
    assert recorder.values == [5.0, 2.0] * 2
    seen = [json.loads((folder / "run.json").read_text()) for folder in jobs(done).values()]
    assert len({one["config"] for one in seen}) == 4


def fails(cfg: DictConfig, folder: Path) -> float:
    if cfg.drafter.depth == 3:
        raise UserError("something: cannot be")
    if cfg.drafter.depth == 4:
        raise ZeroDivisionError("a mistake\nof ours")
    return depth_of(cfg, folder)


def test_other_jobs_run_when_one_fails(recorder):
    done = sweep("-m", "drafter.depth=3,4,5", "hydra/sweeper=recorder", task=fails)
    assert done.code == 1
    assert done.err.splitlines()[-2:] == [
        "error: drafter.depth=3: something: cannot be",
        "error: drafter.depth=4: ZeroDivisionError: a mistake",
    ]
    assert "in fails" in done.err, "a bug keeps its traceback"
    assert [math.isnan(value) for value in recorder.values] == [True, True, False]
    assert [(folder / "done").exists() for folder in jobs(done).values()] == [False, False, True]


def test_interruption_ends_the_sweep():
    def interrupts(cfg: DictConfig, folder: Path) -> float:
        raise KeyboardInterrupt

    done = sweep(*GRID, task=interrupts)
    assert done.code == 130
    assert len(jobs(done)) == 1


@pytest.mark.proof
def test_only_the_same_sweep_resumes_in_its_folder(tmp_path):
    place = f"hydra.sweep.dir={tmp_path / 'it is'}"
    first = sweep("-m", "drafter.depth=3", place, task=fails)
    assert (first.code, first.err) == (2, "error: something: cannot be\n")
    again = sweep("-m", "drafter.depth=3", place)
    assert (again.code, again.err) == (0, "")
    assert again.folder == tmp_path / "it is"
    sweep("-m", "drafter.depth=4", place).refused("has a job of another configuration", "hydra.sweep.dir")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["drafter.depht=2,4"], "drafter.depht=2: drafter.depht: no such option"),
        (["objective=kl,kll"], "objective=kll: objective=kll: "),
        (["batch_size=2,0"], "batch_size=0: batch_size=0: must be at least 1"),
        (["drafter=lm,eagle", "drafter.depth=2"], "drafter=lm: drafter.depth: no such option"),
        (["hydra/launcher=nonsense"], "hydra/launcher=nonsense: not installed"),
        (["hydra/launcher=submitit_slurm"], "hydra/launcher=submitit_slurm: no srun"),
        (["trainer=ddp", "trainer.devices=2"], "trainer.devices=2 in a sweep"),
        (["trainer.devices=1,2"], "trainer.devices=2: trainer.devices=2 in a sweep"),
        (["prompts=bundled,/x"], "names and paths in one sweep"),
        (["experiment=nonsense"], "experiment=nonsense: "),
    ],
)
def test_mistake_is_found_before_a_job_starts(argv, said, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no srun
    sweep("-m", *argv, conf=CONF).refused(said)
    assert not Path("multirun").exists()


def test_sweep_under_torchrun_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert "start torchrun once for each setting" in sweep(*GRID).err


@pytest.mark.proof
def test_slurm_is_composed_and_checked(tmp_path, monkeypatch):
    """Up to the submission, which needs a cluster."""
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher

    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    given: list[tuple[dict, Sequence[Sequence[str]]]] = []
    monkeypatch.setattr(SlurmLauncher, "launch", lambda self, o, **_: given.append((self.params, o)) or [])
    sweep(*GRID, "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu").succeeded()
    ((params, found),) = given
    assert (params["partition"], len(found)) == ("gpu", 2)


@pytest.mark.parametrize("launcher", ["joblib", pytest.param("submitit_local", marks=pytest.mark.proof)])
def test_launchers_run_jobs_in_own_processes(launcher, recorder):

    def task(cfg: DictConfig, folder: Path) -> float:  # pickled by value, as no module of tests is there
        (folder / "pid").write_text(str(os.getpid()))
        if cfg.drafter.depth == 3:
            raise ValueError("no")
        return 1.0 * cfg.drafter.depth

    argv = ["-m", "drafter.depth=2,3", "hydra/sweeper=recorder", f"hydra/launcher={launcher}"]
    done = sweep(*argv, *["hydra.launcher.n_jobs=2"] * (launcher == "joblib"), task=task)
    assert done.code == 1
    assert done.err.splitlines()[-1] == "error: drafter.depth=3: ValueError: no"
    pids = [int((folder / "pid").read_text()) for folder in jobs(done).values()]
    assert len({*pids, os.getpid()}) >= 2
    assert recorder.values == pytest.approx([2.0, math.nan], nan_ok=True)


@pytest.mark.proof
def test_job_returns_tau_of_its_best_checkpoint(tmp_path, recorder):
    bench = Bench(tmp_path)
    done = train([*bench.command, "-m", "objective=kl,lk", "hydra/sweeper=recorder"]).succeeded()
    assert recorder.values == [tau(folder / "checkpoints" / "best") for folder in jobs(done).values()]
    assert min(recorder.values) >= 1
    rows = [line.split() for line in done.out.splitlines() if line.startswith("objective=")]
    assert {row[0] for row in rows} == {"objective=kl", "objective=lk"}
    assert float(rows[0][2]) >= float(rows[1][2])


@pytest.mark.proof
def test_concurrent_jobs_make_one_store(tmp_path):
    """Under the launcher's own processes, each of which imports everything."""
    bench = Bench(tmp_path)
    argv = [*bench.command, "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "objective=kl,lk"]
    command = [sys.executable, str(ROOT / "train.py"), *argv]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("multirun/*/*")
    assert Path(done.stdout.splitlines()[-1]).resolve() == folder
    assert len(list(folder.glob("*/checkpoints/best/score.json"))) == 2
    (store,) = (tmp_path / "outputs" / "rollouts").iterdir()
    assert len(list(store.glob("shard-*.parquet"))) == 3
    assert not leftovers(tmp_path / "outputs")


def test_table_is_at_the_first_setting_of_all_jobs(tmp_path):
    short = [rounds / 2 for rounds in FAST]
    jobs = {"a": [row(FAST, batch=8), row(short)], "b": [row(short, 1.0), row(FAST)], "c": [row(FAST)]}
    for name, rows in jobs.items():
        card(tmp_path / name / "checkpoints" / "best", rows)
        (tmp_path / name / "run.json").write_text(json.dumps({"job": name}))
    found = multirun.table(tmp_path)
    assert "at batch 1, " in found
    assert [line.split()[0] for line in found.splitlines()[1:4]] == ["a", "b", "c"], "the longest first"
    card(tmp_path / "c" / "checkpoints" / "best", [row(FAST, batch=4)])
    assert multirun.table(tmp_path).startswith("no table: b: not scored at T=0, batch 8")
