"""Kills and interruptions: the same command resumes the run, with the same result."""

import json
import os
import signal
from pathlib import Path

import pytest
from workbench import Outcome, final, fork, kill_in_training, leftovers, same, train, write_prompts

from distill.rollouts import store as rollouts
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


def kill_in(monkeypatch, owner, name, when):
    """At a call of `owner.name` for which `when` holds."""
    call = getattr(owner, name)

    def die(*args, **options):
        if when(*args):
            os.kill(os.getpid(), 9)
        return call(*args, **options)

    monkeypatch.setattr(owner, name, die)


def saves_4(drafter, target, folder, *_):
    return folder.name == "4.tmp"


def half_scores_4(path, *_):
    return path.name.startswith("score.json.") and path.parent.name == "4"


def links(step: str):
    return lambda *args: any(isinstance(a, Path) and a.name == step for a in args)


def scores(step: str):
    return lambda *args: any(isinstance(a, Path) and a.parent.name == step for a in args)


KILLS = {
    "half a checkpoint": (callbacks.checkpoint_io, "save", saves_4, 2),
    "before the links": (callbacks, "_link_to", links("4"), 4),
    "before the score": (callbacks, "write_json", scores("4"), 4),
    "half a score": (files, "sync", half_scores_4, 4),
    "before the last links": (callbacks, "_link_to", links("6"), 6),
    "before the last score": (callbacks, "write_json", scores("6"), 6),
}


# -- kills ---------------------------------------------------------------------------------------


def test_resumed_run_chooses_a_draft_vocabulary_of_the_same_size(bench, tmp_path, monkeypatch):
    """`fit` runs again, before the trainer's state is read."""
    for name, value in {"LARGE": 16, "STEP": 1, "FEWEST": 1}.items():
        monkeypatch.setattr(f"drafters.vocabulary.{name}", value)
    options = {"drafter__draft_vocab_size": "auto", "score__every": 2}
    bench.run(tmp_path / "straight", **options)
    config = json.loads((tmp_path / "straight" / "checkpoints" / "last" / "config.json").read_text())
    assert config["settings"]["draft_vocab_size"] < ceiling(260)  # bytes and special tokens
    with monkeypatch.context() as spoilt:
        kill_in(spoilt, callbacks.checkpoint_io, "save", saves_4)
        assert fork(lambda: bench.run(tmp_path / "killed", **options) and 0) == 9
    assert "resuming from step 2" in bench.run(tmp_path / "killed", **options)
    assert same(final(tmp_path / "killed"), final(tmp_path / "straight"))


@pytest.mark.parametrize("name", KILLS)
@pytest.mark.ci("half a checkpoint")
def test_killed_run_ends_as_undisturbed(name, bench, straight, tmp_path, monkeypatch, assert_same_run):
    *call, kept = KILLS[name]
    with monkeypatch.context() as spoilt:
        kill_in(spoilt, *call)
        assert fork(lambda: bench.run(tmp_path, score__every=2) and 0) == 9
    assert checkpoints(tmp_path)[-1].name == str(kept), "more was lost than the steps since the last save"
    assert f"resuming from step {kept}" in bench.run(tmp_path, score__every=2)
    assert_same_run(tmp_path, straight)


STATES = {
    "muon": ["drafter.depth=2", "optimizer=muon"],
    "fresh rollouts": ["drafter.depth=2", "rollout.refresh_every=2"],
    "on-policy answers": ["drafter=lm", "drafter.layers=1", "on_policy.share=0.6"],
}


@pytest.mark.proof
@pytest.mark.parametrize("name", STATES)
def test_killed_run_with_more_state_ends_with_the_same_bits(name, bench, tmp_path, monkeypatch):
    more = [*STATES[name], "score.enabled=false", "score.every=2", "trainer.accumulate_grad_batches=2"]
    command = [option for option in bench.command if not option.startswith("drafter.")] + more

    def run(folder: str) -> Outcome:
        return train([*command, f"output_dir={tmp_path / folder}"])

    straight = run("a").succeeded()
    with monkeypatch.context() as spoilt:
        kill_in_training(spoilt)
        assert fork(lambda: run("b").code) == 9
    resumed = run("b")
    assert "resuming from step 2" in resumed.out
    assert same(final(straight.folder), final(resumed.folder))


def test_same_command_resumes_a_killed_run_in_its_folder(bench, monkeypatch):
    command = "seed=14", "score.enabled=false"
    with monkeypatch.context() as spoilt:
        kill_in(spoilt, rollouts.pq, "write_table", lambda table, path, *_: "shard-00001" in path.name)
        assert bench.fork(*command) == 9
    (folder,) = unfinished(bench)
    with monkeypatch.context() as spoilt:
        kill_in_training(spoilt)
        assert bench.fork(*command, "batch_size=4") == 9  # another configuration
        assert bench.fork(*command) == 9
    assert folder in unfinished(bench)
    assert len(unfinished(bench)) == 2
    done = bench.train(*command)
    assert done.out.startswith(f"resuming: {folder}\n")
    assert "rollouts: reusing all 3 shards" in done.out
    assert done.folder == folder
    other = bench.train(*command)
    assert other.folder != folder
    assert same(final(folder), final(other.folder))
    assert not leftovers(bench.root / "outputs" / "rollouts")


def unfinished(bench) -> list[Path]:
    return [p for p in bench.runs() if not (p / "done").exists()]


@pytest.mark.proof
def test_run_on_changed_prompts_is_not_resumed(bench, tmp_path, monkeypatch):
    prompts = write_prompts(tmp_path / "p.jsonl", 6)
    with monkeypatch.context() as spoilt:
        kill_in_training(spoilt)
        assert bench.fork(f"prompts={prompts}", "score.every=2") == 9
    write_prompts(prompts, 7)
    bench.train(f"prompts={prompts}", "score.every=2").refused("have changed since", "resume=never")
    bench.train(f"prompts={prompts}", "score.every=2", "resume=never").succeeded()


def test_ctrl_c_in_training_leaves_the_run_unfinished(bench, monkeypatch):
    end, before = callbacks.TrainingBar.on_train_batch_end, unfinished(bench)

    def interrupt(self, trainer, *rest):
        if trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        end(self, trainer, *rest)

    with monkeypatch.context() as spoilt:
        spoilt.setattr(callbacks.TrainingBar, "on_train_batch_end", interrupt)
        status = bench.fork("seed=15", "score.enabled=false")
    assert os.waitstatus_to_exitcode(status) == 130
    (folder,) = set(unfinished(bench)) - set(before)
    done = bench.train("seed=15", "score.enabled=false")
    assert done.folder == folder
    assert "resuming from step 3" in done.out
