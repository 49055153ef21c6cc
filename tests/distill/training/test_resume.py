"""Kills, interruptions and full disks: the same command goes on, and ends as if nothing had happened."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from safetensors import SafetensorError
from workbench import final, fork, kill_in_training, leftovers, same, tau, write_prompts

from distill.rollouts import store as rollouts
from distill.rollouts import writer
from distill.training import checkpointing as callbacks
from distill.utils.run_folder import checkpoints
from drafters.checkpoint import atomic as files
from drafters.vocabulary import ceiling


@pytest.fixture(scope="module")
def straight(bench, tmp_path_factory) -> Path:
    """An undisturbed run: six steps, a save point every two."""
    folder = tmp_path_factory.mktemp("straight")
    bench.run(folder, score__every=2)
    return folder


# -- kills ---------------------------------------------------------------------------------------


def kill_in(monkeypatch, owner, name, when, step: int):
    """At a call of `owner.name` for which `when` holds."""
    call = getattr(owner, name)

    def die(*args, **options):
        if when(args, step):
            os.kill(os.getpid(), 9)
        return call(*args, **options)

    monkeypatch.setattr(owner, name, die)


def saved(args, step):
    return any(isinstance(a, Path) and a.name == f"{step}.tmp" for a in args)


def scored(args, step):
    return any(isinstance(a, Path) and a.parent.name == str(step) for a in args)


def half_scored(args, step):
    return args[0].name.startswith("score.json.") and args[0].parent.name == str(step)


def linked(args, step):
    return any(isinstance(a, Path) and a.name == str(step) for a in args)


KILLS = {
    "half a checkpoint": (lambda m: kill_in(m, callbacks.hub, "save", saved, 4), 2),
    "before the links": (lambda m: kill_in(m, callbacks, "_link_to", linked, 4), 4),
    "before the score": (lambda m: kill_in(m, callbacks, "write_json", scored, 4), 4),
    "half a score": (lambda m: kill_in(m, files, "sync", half_scored, 4), 4),
    "before the last links": (lambda m: kill_in(m, callbacks, "_link_to", linked, 6), 6),
    "before the last score": (lambda m: kill_in(m, callbacks, "write_json", scored, 6), 6),
}


def test_a_resumed_run_chooses_a_draft_vocabulary_of_the_same_size(bench, tmp_path, monkeypatch):
    """`fit` runs again, before the trainer's state is read."""
    for name, value in {"vocabulary.LARGE": 16, "vocabulary.STEP": 1, "vocabulary.FEWEST": 1}.items():
        monkeypatch.setattr(f"drafters.{name}", value)
    options = {"drafter__draft_vocab_size": "auto", "score__every": 2}
    said = bench.run(tmp_path / "straight", **options)
    config = json.loads((tmp_path / "straight" / "checkpoints" / "last" / "config.json").read_text())
    size = config["settings"]["draft_vocab_size"]
    assert f"drafter=eagle: {size} of " in said
    assert size < ceiling(260)  # bytes and special tokens
    with monkeypatch.context() as spoilt:
        kill_in(spoilt, callbacks.hub, "save", saved, 4)
        assert fork(lambda: bench.run(tmp_path / "killed", **options) and 0) == 9
    assert "resuming from step 2" in bench.run(tmp_path / "killed", **options)
    assert same(final(tmp_path / "killed"), final(tmp_path / "straight"))


@pytest.mark.parametrize("name", KILLS)
@pytest.mark.ci("half a checkpoint")
def test_a_killed_run_ends_as_if_nothing_had_happened(name, bench, straight, tmp_path, monkeypatch):
    arrange, kept = KILLS[name]
    with monkeypatch.context() as spoilt:
        arrange(spoilt)
        assert fork(lambda: bench.run(tmp_path, score__every=2) and 0) == 9
    assert checkpoints(tmp_path)[-1].name == str(kept), "more was lost than the steps since the last save"
    said = bench.run(tmp_path, score__every=2)
    assert f"resuming from step {kept}" in said
    assert same(final(tmp_path), final(straight))
    assert [p.name for p in checkpoints(tmp_path)] == ["2", "4", "6"]
    for checkpoint in checkpoints(tmp_path):
        assert tau(checkpoint) == tau(straight / "checkpoints" / checkpoint.name)
        assert (checkpoint / "trainer").exists() == (checkpoint.name != "2")
    assert (tmp_path / "checkpoints" / "last").readlink() == Path("6")
    assert (tmp_path / "checkpoints" / "best").exists()
    assert not leftovers(tmp_path)


def test_the_same_command_resumes_a_killed_run_in_its_folder(bench, monkeypatch):
    with monkeypatch.context() as spoilt:
        kill_in(spoilt, rollouts.pq, "write_table", lambda args, _: "shard-00001" in args[1].name, 0)
        assert bench.fork("seed=14", "score.enabled=false") == 9
    (folder,) = [p for p in bench.runs() if not (p / "done").exists()]
    with monkeypatch.context() as spoilt:
        kill_in_training(spoilt)
        assert bench.fork("seed=14", "score.enabled=false", "batch_size=4") == 9  # another configuration
        assert bench.fork("seed=14", "score.enabled=false") == 9
    unfinished = {p for p in bench.runs() if not (p / "done").exists()}
    assert folder in unfinished
    assert len(unfinished) == 2
    done = bench.train("seed=14", "score.enabled=false")
    assert done.out.startswith(f"resuming: {folder}\n")
    assert "rollouts: reusing all 3 shards" in done.out
    assert done.folder == folder
    assert (folder / "done").exists()
    anew = bench.train("seed=14", "score.enabled=false")
    assert anew.folder != folder
    assert same(final(folder), final(anew.folder))
    assert not leftovers(bench.root / "outputs" / "rollouts")


@pytest.mark.proof
def test_a_run_is_not_continued_on_other_prompts(bench, tmp_path, monkeypatch):
    prompts = write_prompts(tmp_path / "p.jsonl", 6)
    with monkeypatch.context() as spoilt:
        kill_in_training(spoilt)
        assert bench.fork(f"prompts={prompts}", "score.every=2") == 9
    write_prompts(prompts, 7)
    done = bench.train(f"prompts={prompts}", "score.every=2")
    assert done.code == 2
    assert "have changed since this run began; resume=never" in done.err
    assert bench.train(f"prompts={prompts}", "score.every=2", "resume=never").code == 0


def test_ctrl_c_in_training_leaves_the_run_unfinished(bench, monkeypatch):
    end = callbacks.TrainingBar.on_train_batch_end

    def interrupt(self, trainer, *rest):
        if trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        end(self, trainer, *rest)

    with monkeypatch.context() as spoilt:
        spoilt.setattr(callbacks.TrainingBar, "on_train_batch_end", interrupt)
        status = bench.fork("seed=15", "score.enabled=false")
    assert os.waitstatus_to_exitcode(status) == 130
    (folder,) = [p for p in bench.runs() if not (p / "done").exists() and _seed(p) == 15]
    done = bench.train("seed=15", "score.enabled=false")
    assert done.folder == folder
    assert "resuming from step 3" in done.out


def _seed(folder: Path) -> int:
    found = re.search(r"^seed: (\d+)", (folder / ".hydra" / "config.yaml").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def test_ctrl_c_in_the_rollouts_is_one_line(bench, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(writer.Writer, "__call__", interrupt)
    done = bench.train("seed=16")
    assert done.code == 130
    assert re.fullmatch(r"interrupted; the same command goes on in \S+\n", done.err)


# -- full disks ----------------------------------------------------------------------------------


@pytest.mark.proof
def test_a_full_disk_while_saving_is_one_line_and_the_run_goes_on_later(bench, straight, monkeypatch):
    save = callbacks.hub.save

    def full(drafter, target, folder, *rest):
        if folder.name == "4.tmp":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save(drafter, target, folder, *rest)

    with monkeypatch.context() as spoilt:
        spoilt.setattr(callbacks.hub, "save", full)
        done = bench.train("score.every=2", "score.max_new_tokens=5")
    assert done.code == 1
    assert len(done.err.splitlines()) == 1
    assert "No space left on device" in done.err
    again = bench.train("score.every=2", "score.max_new_tokens=5")
    assert again.code == 0
    assert "resuming from step 2" in again.out
    assert same(final(again.folder), final(straight))
    assert not leftovers(again.folder)


def test_a_full_disk_in_the_rollouts_is_one_line(bench, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as spoilt:
        spoilt.setattr(rollouts.pq, "write_table", full)
        done = bench.train("seed=17")
    assert done.code == 1
    assert re.match(r"error: No space left on device \(\S+/shard-00000\.parquet\): the disk at /", done.err)
    assert bench.train("seed=17", "score.enabled=false").code == 0
