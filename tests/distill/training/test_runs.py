"""Run folders: who gets which, after what."""

import json
import os
import signal
import time

import pytest
from workbench import fork, spawn

from decode.errors import UserError
from distill.config.recorded import settings
from distill.utils import run_folder as runs
from distill.utils.run_folder import claim, claim_at, config_hash

CONFIG = {"a": 1, "resume": "auto"}


def others_claim(root, config, resume="auto") -> str:
    """Which folder another process gets that claims now; `resumed:` before one it goes on in."""
    inside, outside = os.pipe()

    def body() -> int:
        run = claim(root, config, resume)
        os.write(outside, f"{'resumed:' if run.resumed else ''}{run.path}".encode())
        return 0

    assert fork(body) == 0
    os.close(outside)
    with os.fdopen(inside) as answer:
        return answer.read()


def test_the_same_command_twice_at_once_gets_two_folders(tmp_path):
    mine = claim(tmp_path, CONFIG, "auto")
    assert not mine.resumed
    theirs = others_claim(tmp_path, CONFIG)
    assert not theirs.startswith("resumed:")
    assert theirs != str(mine.path)


def test_many_starts_in_the_same_second_get_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.time, "strftime", lambda form: "10-00-00" if "H" in form else "2026-01-01")
    held = [claim(tmp_path, CONFIG, "never") for _ in range(12)]
    assert len({run.path for run in held}) == 12
    assert all((run.path / "run.json").exists() for run in held)


def test_an_unfinished_run_is_resumed_once_its_process_is_gone(tmp_path):
    first = others_claim(tmp_path, CONFIG)
    assert others_claim(tmp_path, CONFIG) == f"resumed:{first}"
    run = claim(tmp_path, CONFIG, "auto")
    assert run.resumed
    assert str(run.path) == first


def test_a_finished_run_is_not_resumed(tmp_path):
    run = claim(tmp_path, CONFIG, "auto")
    run.finish()
    again = others_claim(tmp_path, CONFIG)
    assert not again.startswith("resumed:")
    assert again != str(run.path)


def test_a_run_that_finishes_while_it_is_claimed_is_not_resumed(tmp_path, monkeypatch):
    others_claim(tmp_path, CONFIG)
    take = runs._Lock.take

    def finish_first(folder):
        (folder / runs.DONE).touch()
        return take(folder)

    monkeypatch.setattr(runs._Lock, "take", finish_first)
    assert not claim(tmp_path, CONFIG, "auto").resumed


def test_resume_never_starts_anew(tmp_path):
    first = others_claim(tmp_path, CONFIG)
    again = others_claim(tmp_path, CONFIG | {"resume": "never"}, "never")
    assert again not in (first, f"resumed:{first}")


def test_the_newest_unfinished_run_of_the_configuration_is_taken(tmp_path):
    older = others_claim(tmp_path, CONFIG, "never")
    newer = others_claim(tmp_path, CONFIG, "never")
    others_claim(tmp_path, {"a": 2}, "never")
    assert older != newer
    assert others_claim(tmp_path, CONFIG) == f"resumed:{newer}"


def test_how_to_resume_is_no_part_of_the_configuration():
    assert config_hash(CONFIG) == config_hash({"a": 1, "resume": "never"})
    assert config_hash(CONFIG) != config_hash({"a": 2, "resume": "auto"})


def test_a_named_folder_is_resumed_or_refused_with_the_reason(tmp_path):
    with pytest.raises(UserError, match="no run there"):
        claim(tmp_path, CONFIG, str(tmp_path / "nowhere"))
    folder = others_claim(tmp_path, CONFIG)
    with pytest.raises(UserError, match="another configuration"):
        claim(tmp_path, {"a": 2}, folder)
    run = claim(tmp_path, CONFIG, folder)
    assert run.resumed
    with pytest.raises(UserError, match="another process"):
        claim(tmp_path, CONFIG, folder)
    run.finish()
    with pytest.raises(UserError, match="finished"):
        claim(tmp_path, CONFIG, folder)


def test_a_folder_that_the_user_names_is_claimed_like_any_other(tmp_path):
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
        with pytest.raises(
            UserError, match=r"mine: has a run, and resume=never starts another; give hydra\.run"
        ):
            claim_at(folder, root, CONFIG, "never")
        with pytest.raises(
            UserError, match=r"mine: has a run of another configuration; give hydra\.run\.dir"
        ):
            claim_at(folder, root, {"a": 2}, "auto")
        with pytest.raises(UserError, match=r"another folder than resume=/x"):
            claim_at(folder, root, CONFIG, "/x")
    assert claim_at(folder, root, CONFIG, str(folder)).resumed


def test_checkpoints_of_no_known_run_are_not_gone_on_from(tmp_path):
    (tmp_path / "mine" / "checkpoints" / "4").mkdir(parents=True)
    with pytest.raises(UserError, match="has checkpoints of a run that is not known"):
        claim_at(tmp_path / "mine", tmp_path, CONFIG, "auto")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"hydra\.run\.dir=.*file: .*give hydra\.run\.dir another folder"):
        claim_at(tmp_path / "file", tmp_path, CONFIG, "auto")


def test_a_named_folder_that_was_there_keeps_what_others_have_in_it(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    claim_at(tmp_path, tmp_path / "outputs", CONFIG, "auto").discard_if_empty()
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "outputs"}
    claim_at(tmp_path / "new", tmp_path, CONFIG, "auto").discard_if_empty()
    assert not (tmp_path / "new").exists()


def test_a_run_without_work_is_discarded_and_one_with_a_checkpoint_is_not(tmp_path):
    empty = claim(tmp_path, CONFIG, "never")
    (empty.path / "checkpoints").mkdir()
    empty.discard_if_empty()
    assert not empty.path.exists()
    assert not empty.path.parent.exists()
    worked = claim(tmp_path, CONFIG, "never")
    (worked.path / "checkpoints" / "3").mkdir(parents=True)
    worked.discard_if_empty()
    assert worked.path.exists()
    worked._lock.close()
    again = claim(tmp_path, CONFIG, "auto")
    again.discard_if_empty()
    assert again.path.exists(), "a resumed run was thrown away"


def test_a_folder_that_vanishes_is_passed_over(tmp_path):
    assert runs._Lock.take(tmp_path / "gone") is None


def test_the_record_says_what_the_run_is(tmp_path):
    before = time.time()
    run = claim(tmp_path, CONFIG, "auto")
    record = json.loads((run.path / "run.json").read_text())
    assert record["config"] == config_hash(CONFIG)
    assert before <= record["started"] <= time.time()
    assert not list(tmp_path.rglob("*.tmp"))


def test_checkpoints_are_the_whole_ones_by_step(tmp_path):
    for name in ("9", "10", "100", "20.tmp", "last.1.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "best").symlink_to("10")
    assert [p.name for p in runs.checkpoints(tmp_path)] == ["9", "10", "100"]


def launched(rank: int, port: int = 29500):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="here", MASTER_PORT=str(port))


def test_ranks_of_a_launch_join_the_folder_of_rank_0(tmp_path):
    inside, outside = os.pipe()

    def follow() -> int:
        launched(1)
        os.write(outside, str(runs.join(tmp_path)).encode())
        return 0

    def lead() -> int:
        launched(0)
        run = claim(tmp_path, CONFIG, "auto")
        child = os.fork()
        if not child:
            os._exit(follow())
        assert os.waitpid(child, 0)[1] == 0
        os.write(outside, f" {run.path}".encode())
        return 0

    for _ in range(2):  # the second finds what the first left behind
        assert fork(lead) == 0
        followed, led = os.read(inside, 1000).decode().split()
        assert followed == led


def joined(root, wait: float) -> str:
    """What a second rank, which begins now, says when it cannot join."""
    inside, outside = os.pipe()

    def follow() -> int:
        launched(1)
        with pytest.raises(UserError) as refused:
            runs.join(root, wait=wait)
        os.write(outside, str(refused.value).encode())
        return 0

    assert fork(follow) == 0
    return os.read(inside, 1000).decode()


def lead(root, resume: str = "auto") -> int:
    """A first rank, which ends at once."""
    launched(0)
    try:
        claim(root, CONFIG, resume).discard_if_empty()
    except UserError:
        return 2
    return 0


def test_a_launch_that_is_gone_is_not_joined(tmp_path):
    assert fork(lambda: lead(tmp_path)) == 0
    (note,) = tmp_path.glob(".launch-*.json")
    os.utime(note, (0, 0))  # clocks of processes and files are not that fine
    assert "do ranks share it" in joined(tmp_path, 0.3)


@pytest.mark.parametrize("resume", ["auto", "/nowhere"])
def test_ranks_do_not_wait_for_a_rank_0_that_has_ended(resume, tmp_path):
    """With an error: it has discarded its folder, or got none."""

    def late() -> int:
        os.waitpid(spawn(lambda: lead(tmp_path, resume)), 0)
        launched(1)
        with pytest.raises(UserError, match="rank 0 of this launch has ended"):
            runs.join(tmp_path)
        return 0

    assert fork(late) == 0


LONG = [pytest.mark.proof, pytest.mark.long]


def slow_locks(monkeypatch, latency: float) -> None:
    """Every lock is held for so many seconds longer, as on a network file system."""
    flock = runs.fcntl.flock

    def slow(handle, operation):
        flock(handle, operation)
        time.sleep(latency)

    monkeypatch.setattr(runs.fcntl, "flock", slow)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "restarts"), [(6, 4), pytest.param(32, 200, marks=LONG)])
def test_a_restarted_launch_resumes_while_its_other_ranks_look_for_rank_0(
    ranks, restarts, tmp_path, monkeypatch
):
    """They look whether the run of the last launch is in use, which neither rank 0 nor another may notice."""
    slow_locks(monkeypatch, 0.001)
    sleep = time.sleep
    monkeypatch.setattr(runs.time, "sleep", lambda seconds: sleep(min(seconds, 0.005)))
    begun = tmp_path / "begun"

    def follow(rank: int) -> int:
        launched(rank)
        folder = runs.join(tmp_path)
        return 0 if begun.exists() and folder.is_dir() else 3

    def restart() -> str:
        begun.unlink(missing_ok=True)
        followers = [spawn(lambda rank=rank: follow(rank)) for rank in range(1, ranks)]
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


def damaged_run(root, config=CONFIG, about=None):
    """A run's folder with half a run.json, and perhaps with its configuration."""
    folder = root / "2026-01-01" / "10-00-00"
    (folder / ".hydra").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"config": config_hash(config), "started": 7.0})[:20])
    if about is not None:
        (folder / ".hydra" / "config.yaml").write_text(about)
    return folder


def test_a_damaged_run_json_is_known_by_the_configuration_beside_it(tmp_path, capsys):
    folder = damaged_run(tmp_path, about="a: 1\nresume: auto\n")
    other = claim(tmp_path, {"a": 2, "resume": "auto"}, "auto", settings)
    assert other.path != folder
    assert capsys.readouterr().out == ""
    run = claim(tmp_path, CONFIG, "auto", settings)
    assert run.resumed
    assert run.path == folder
    record = folder / "run.json"
    assert capsys.readouterr().out == (f"{record}: damaged; written again from the configuration beside it\n")
    assert json.loads(record.read_text())["config"] == config_hash(CONFIG)


@pytest.mark.parametrize("about", [None, "a: [", "- 1", "a: ${b}"])
@pytest.mark.parametrize("text", ["", "{", "[]", '"text"', '{"config": 3}'])
@pytest.mark.parametrize("named", [False, True])
def test_a_damaged_run_json_without_a_configuration_ends_the_command(named, text, about, tmp_path):
    folder = damaged_run(tmp_path, about=about)
    (folder / "run.json").write_text(text)
    with pytest.raises(UserError) as refused:
        claim(tmp_path, CONFIG, str(folder) if named else "auto", settings)
    assert str(refused.value) == (
        f"{folder}/run.json: damaged, so that it is not known whether this command goes on there; remove "
        f"{folder}, or start another run with resume=never"
    )
    assert not claim(tmp_path, CONFIG, "never").resumed


def test_a_damaged_run_json_of_a_finished_run_is_left_alone(tmp_path):
    folder = damaged_run(tmp_path)
    (folder / runs.DONE).touch()
    assert not claim(tmp_path, CONFIG, "auto", settings).resumed


def test_a_damaged_run_json_of_a_job_is_written_again(tmp_path, capsys):
    folder = damaged_run(tmp_path, about="a: 1\n")
    run = runs.occupy(folder, CONFIG, "a=1", settings)
    assert run.resumed
    assert json.loads((folder / "run.json").read_text())["job"] == "a=1"
    assert "damaged; written again" in capsys.readouterr().out
