"""Run folders and launches: which command and which process gets which folder."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from workbench import fork, spawn

from decode.errors import UserError
from distill.config.recorded import settings
from distill.utils import run_folder as runs
from distill.utils.launcher import LAUNCHERS, PARENT, launch, watch, watch_parent
from distill.utils.run_folder import claim, claim_at, config_hash

CONFIG = {"a": 1, "resume": "auto"}
READ = partial(settings, current=OmegaConf.create(CONFIG))


def in_another_process(body) -> str:
    """What `body` returns as text in a forked process."""
    inside, outside = os.pipe()
    assert fork(lambda: os.write(outside, body().encode()) and 0) == 0
    os.close(outside)
    with os.fdopen(inside) as answer:
        return answer.read()


def others_claim(root, config=CONFIG, resume="auto") -> str:
    """Which folder another process gets that claims now; `resumed:` before one that it resumes."""

    def body() -> str:
        run = claim(root, config, resume)
        return f"{'resumed:' if run.resumed else ''}{run.path}"

    return in_another_process(body)


def test_unfinished_run_is_resumed_once_its_process_is_gone(tmp_path):
    first = others_claim(tmp_path)
    assert others_claim(tmp_path) == f"resumed:{first}"
    run = claim(tmp_path, CONFIG, "auto")
    assert (run.resumed, str(run.path)) == (True, first)
    second = others_claim(tmp_path)  # the first is in use
    third = others_claim(tmp_path, CONFIG | {"resume": "never"}, "never")
    others_claim(tmp_path, {"a": 2}, "never")
    assert len({first, second, third} - {f"resumed:{first}"}) == 3
    assert others_claim(tmp_path) == f"resumed:{third}", "the newest of this configuration"
    run.finish()
    run.close()
    (Path(third) / runs.DONE).touch()
    assert others_claim(tmp_path) == f"resumed:{second}", "what is finished is not resumed"


def test_many_starts_in_the_same_second_get_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.time, "strftime", lambda form: "10-00-00" if "H" in form else "2026-01-01")
    before = time.time()
    held = [claim(tmp_path, CONFIG, "never") for _ in range(12)]
    assert len({run.path for run in held}) == 12
    for run in held:
        record = json.loads((run.path / "run.json").read_text())
        assert record["config"] == config_hash(CONFIG)
        assert before <= record["started"] <= time.time()
    assert not list(tmp_path.rglob("*.tmp"))


def test_run_that_finishes_while_it_is_claimed_is_not_resumed(tmp_path, monkeypatch):
    others_claim(tmp_path)
    take = runs._Lock.take

    def finish_first(folder):
        (folder / runs.DONE).touch()
        return take(folder)

    monkeypatch.setattr(runs._Lock, "take", finish_first)
    assert not claim(tmp_path, CONFIG, "auto").resumed
    assert take(tmp_path / "gone") is None, "a folder that vanishes is passed over"


def test_named_folder_is_resumed_or_refused_with_the_reason(tmp_path):
    with pytest.raises(UserError, match="no run there"):
        claim(tmp_path, CONFIG, str(tmp_path / "nowhere"))
    folder = others_claim(tmp_path)
    with pytest.raises(UserError, match="another configuration"):
        claim(tmp_path, {"a": 2}, folder)
    run = claim(tmp_path, CONFIG, folder)
    assert run.resumed
    with pytest.raises(UserError, match="another process"):
        claim(tmp_path, CONFIG, folder)
    run.finish()
    with pytest.raises(UserError, match="finished"):
        claim(tmp_path, CONFIG, folder)


def test_folder_given_by_hydra_run_dir_is_claimed_like_any_other(tmp_path):
    folder, root = tmp_path / "mine", tmp_path / "outputs"
    run = claim_at(folder, root, CONFIG, "auto")
    assert (run.path, run.resumed) == (folder, False)
    with pytest.raises(UserError, match="another process is working there"):
        claim_at(folder, root, CONFIG, "auto")
    run.close()
    for done in (False, True):  # what is finished has nothing left to do
        again = claim_at(folder, root, CONFIG, "auto")
        assert again.resumed
        if done:
            again.finish()
        again.close()
        for config, resume, said in (
            (CONFIG, "never", "mine: has a run, and resume=never"),
            ({"a": 2}, "auto", "mine: has a run of another configuration"),
            (CONFIG, "/x", "differs from resume=/x"),
        ):
            with pytest.raises(UserError, match=said):
                claim_at(folder, root, config, resume)
    assert claim_at(folder, root, CONFIG, str(folder)).resumed


def test_folder_with_checkpoints_of_no_known_run_is_refused(tmp_path):
    (tmp_path / "mine" / "checkpoints" / "4").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for name, said in (("mine", "an unknown run"), ("file", r"hydra\.run\.dir=.*/file: ")):
        with pytest.raises(UserError, match=said):
            claim_at(tmp_path / name, tmp_path, CONFIG, "auto")


def test_run_without_checkpoint_is_discarded_and_others_are_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    for folder in (tmp_path, tmp_path / "new"):
        claim_at(folder, tmp_path / "outputs", CONFIG, "auto").discard_if_empty()
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "outputs"}
    empty = claim(tmp_path, CONFIG, "never")
    (empty.path / "checkpoints").mkdir()
    empty.discard_if_empty()
    assert not empty.path.parent.exists()
    worked = claim(tmp_path, CONFIG, "never")
    (worked.path / "checkpoints" / "3").mkdir(parents=True)
    worked.discard_if_empty()
    worked.close()
    again = claim(tmp_path, CONFIG, "auto")
    assert again.path == worked.path
    (again.path / "checkpoints" / "3").rmdir()
    again.discard_if_empty()
    assert again.path.exists(), "a resumed run was thrown away"


def test_checkpoints_are_the_whole_ones_by_step(tmp_path):
    for name in ("9", "10", "100", "20.tmp", "last.1.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "best").symlink_to("10")
    assert [p.name for p in runs.checkpoints(tmp_path)] == ["9", "10", "100"]


# -- several ranks -------------------------------------------------------------------------------


def launched(rank: int):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="here", MASTER_PORT="29500")


def follow(root, rank: int = 1, wait: float = 600.0) -> str:
    """The folder that another rank joins, or why it cannot."""
    launched(rank)
    try:
        return str(runs.join(root, wait=wait))
    except UserError as refused:
        return str(refused)


def test_ranks_of_a_launch_join_the_folder_of_rank_0(tmp_path):
    def lead() -> str:
        launched(0)
        run = claim(tmp_path, CONFIG, "auto")
        return f"{run.path} {in_another_process(lambda: follow(tmp_path))}"

    for _ in range(2):  # the second finds what the first left
        led, followed = in_another_process(lead).split()
        assert followed == led


def lead_and_end(root, resume: str = "auto") -> int:
    """A first rank, which ends at once."""
    launched(0)
    try:
        claim(root, CONFIG, resume).discard_if_empty()
    except UserError:
        return 2
    return 0


def test_launch_that_is_gone_is_not_joined(tmp_path):
    assert fork(lambda: lead_and_end(tmp_path)) == 0
    (note,) = tmp_path.glob(".launch-*.json")
    os.utime(note, (0, 0))  # clocks of processes and files are not that fine
    assert "do ranks share it" in in_another_process(lambda: follow(tmp_path, wait=0.3))


@pytest.mark.parametrize("resume", ["auto", "/nowhere"])
def test_ranks_do_not_wait_for_a_rank_0_that_has_ended(resume, tmp_path):
    """With an error: it has discarded its folder, or got none."""

    def late() -> str:
        os.waitpid(spawn(lambda: lead_and_end(tmp_path, resume)), 0)
        return follow(tmp_path)

    assert "rank 0 of this launch has ended" in in_another_process(late)


LONG = [pytest.mark.proof, pytest.mark.long]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "restarts"), [(6, 4), pytest.param(32, 200, marks=LONG)])
def test_restarted_launch_resumes_while_its_other_ranks_look_for_rank_0(
    ranks, restarts, tmp_path, monkeypatch
):
    """They look whether the run of the last launch is in use, which neither rank 0 nor another may notice."""
    flock, sleep, begun = runs.fcntl.flock, time.sleep, tmp_path / "begun"

    def slow(handle, operation):
        """As on a network file system."""
        flock(handle, operation)
        time.sleep(0.001)

    monkeypatch.setattr(runs.fcntl, "flock", slow)
    monkeypatch.setattr(runs.time, "sleep", lambda seconds: sleep(min(seconds, 0.005)))

    def joins(rank: int) -> int:
        folder = Path(follow(tmp_path, rank))
        return 0 if begun.exists() and folder.is_dir() else 3

    def restart() -> str:
        begun.unlink(missing_ok=True)
        followers = [spawn(lambda rank=rank: joins(rank)) for rank in range(1, ranks)]
        inside, outside = os.pipe()

        def lead() -> int:
            launched(0)
            sleep(0.03)  # the others look by now
            begun.touch()
            run = claim(tmp_path, CONFIG, "auto")
            os.write(outside, str(run.path).encode())
            sleep(60)
            return 0

        rank_0 = spawn(lead)
        assert [os.waitpid(follower, 0)[1] for follower in followers] == [0] * len(followers)
        path = os.read(inside, 4096).decode()
        os.kill(rank_0, signal.SIGKILL)
        os.waitpid(rank_0, 0)
        os.close(inside)
        os.close(outside)
        return path

    first = restart()
    assert {restart() for _ in range(restarts)} == {first}


# -- a damaged run.json --------------------------------------------------------------------------


def damaged_run(root, about=None):
    """A run's folder with half a run.json, and perhaps with its configuration."""
    folder = root / "2026-01-01" / "10-00-00"
    (folder / ".hydra").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"config": config_hash(CONFIG), "started": 7.0})[:20])
    if about is not None:
        (folder / ".hydra" / "config.yaml").write_text(about)
    return folder


def test_damaged_run_json_is_written_again_from_its_configuration(tmp_path, capsys):
    folder = damaged_run(tmp_path, about="a: 1\nresume: auto\n")
    assert claim(tmp_path, {"a": 2, "resume": "auto"}, "auto", READ).path != folder
    assert capsys.readouterr().out == ""
    run = claim(tmp_path, CONFIG, "auto", READ)
    assert (run.resumed, run.path) == (True, folder)
    assert f"{folder / 'run.json'}: damaged; written again" in capsys.readouterr().out
    assert json.loads((folder / "run.json").read_text())["config"] == config_hash(CONFIG)


def test_interpolations_of_a_damaged_run_are_not_followed(tmp_path):
    """They have the values that the same ones have in this command; any other is another configuration."""
    one, other = (OmegaConf.create({"a": text, "b": 1, "resume": "auto"}) for text in ("${b}", "1"))
    for current, resumed in ((one, True), (other, False)):
        folder = damaged_run(tmp_path / str(resumed), about="a: ${b}\nb: 1\nresume: auto\n")
        resolved = OmegaConf.to_container(current, resolve=True)
        run = claim(tmp_path / str(resumed), resolved, "auto", partial(settings, current=current))
        assert (run.path == folder) == resumed


@pytest.mark.parametrize("about", [None, "a: [", "- 1"])
@pytest.mark.parametrize("text", ["", "{", "[]", '"text"', '{"config": 3}'])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.covering
def test_damaged_run_json_without_a_configuration_ends_the_command(named, text, about, tmp_path):
    folder = damaged_run(tmp_path, about=about)
    (folder / "run.json").write_text(text)
    with pytest.raises(UserError, match=rf"^{folder}/run\.json: damaged.*resume=never$"):
        claim(tmp_path, CONFIG, str(folder) if named else "auto", READ)
    assert not claim(tmp_path, CONFIG, "never").resumed


def test_damaged_run_json_of_a_job_is_written_again_and_of_a_finished_run_left(tmp_path, capsys):
    folder = damaged_run(tmp_path, about="a: 1\n")
    assert runs.occupy(folder, CONFIG, "a=1", READ).resumed
    assert json.loads((folder / "run.json").read_text())["job"] == "a=1"
    assert "damaged; written again" in capsys.readouterr().out
    (folder / "run.json").write_text("{")
    (folder / ".hydra" / "config.yaml").unlink()
    (folder / runs.DONE).touch()
    assert not claim(tmp_path, CONFIG, "auto", READ).resumed


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
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


EXIT_1 = 1 << 8  # as a wait status


def hang(prepare) -> int:
    prepare()
    time.sleep(20)
    return 0


def test_process_that_hangs_ends_after_another_has_died(capfd):
    begun, answers = time.monotonic(), iter([None, "rank 3 has ended"])
    assert fork(lambda: hang(lambda: watch(lambda: next(answers), grace=0.5))) == EXIT_1
    assert 1.5 <= time.monotonic() - begun < 15
    assert capfd.readouterr().err == "error: rank 3 has ended\n"


def test_rank_that_lightning_started_ends_after_its_parent(monkeypatch, capfd):
    monkeypatch.setattr("distill.utils.launcher.GRACE", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv(PARENT, str(2**22))
    assert fork(lambda: hang(watch_parent)) == EXIT_1
    assert capfd.readouterr().err == "error: rank 0 of this run has ended\n"


def test_new_run_names_the_killed_one_before_it_and_what_differs(bench):
    few = ["score.enabled=false", "score.every=1", "seed=71"]
    first = bench.train(*few, "trainer.max_steps=2").succeeded()
    assert "a new run" not in first.out
    (first.folder / "done").unlink()  # as if it had been killed
    line = f"a new run: the one before, {first.folder}, is not finished and has other values of "
    second = bench.train(*few, "trainer.max_steps=1", "batch_size=3").succeeded()
    assert f"{line}batch_size, trainer.max_steps; its own options continue it\n" in second.out
    assert "a new run" not in bench.train(*few, "trainer.max_steps=1").succeeded().out  # after a finished one
    assert "resuming: " in bench.train(*few, "trainer.max_steps=2").succeeded().out


def test_finished_run_is_not_resumed_under_another_objective(bench, tmp_path):
    """`hydra.run.dir=` of it: only a rank that Lightning started finds its folder claimed."""
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
