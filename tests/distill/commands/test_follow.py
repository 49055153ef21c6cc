"""foredraft follow: a drafter for a target that is being trained."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from workbench import QUICK, Bench, foredraft, same, train, weights

from decode.evaluation.scorecard import read_scorecard
from distill.commands import follow
from distill.commands.follow import FILE, Update, newest, stamp, whole
from distill.utils.run_folder import best, checkpoints

FEW = ("score.replay_prompts=4", "trainer.max_steps=4", "score.every=4")


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    """A target, and the same after 100 and 200 steps of somebody's trainer."""
    made = Bench(tmp_path_factory.mktemp("follow"))
    for step in (100, 200):
        moved(made.target, made.root / "ckpt" / f"step_{step}", step)
    return made


def moved(model: Path, folder: Path, seed: int) -> None:
    shutil.copytree(model, folder)
    torch.manual_seed(seed)
    changed = {name: w + 0.05 * w.std() * torch.randn_like(w) for name, w in weights(model).items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})


def words(bench: Bench, models: str, folder: Path, *more: str) -> list[str]:
    prompts = [f"prompts={bench.prompts}", f"prompts.heldout={bench.heldout}"]
    return [models, *QUICK, *prompts, *FEW, "--folder", str(folder), *more]


@pytest.fixture
def quick(monkeypatch):
    """Runs in this process, which saves the imports."""
    monkeypatch.setattr(follow, "_train", lambda options, lock: train(options).code)


def copy_models(bench: Bench, models: Path, *steps: int) -> None:
    for step in steps:
        shutil.copytree(bench.root / "ckpt" / f"step_{step}", models / f"step_{step}")


def copy_target(bench: Bench, *folders: Path) -> None:
    for folder in folders:
        shutil.copytree(bench.target, folder)


def started(command: list[str]) -> subprocess.Popen:
    argv = [sys.executable, "-m", "foredraft", "follow", *command]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def updates(folder: Path) -> list[dict]:
    return json.loads((folder / FILE).read_text())["updates"]


@pytest.mark.usefixtures("quick")
def test_drafter_is_trained_on_for_every_newer_model(bench, tmp_path):
    models, folder = tmp_path / "models", tmp_path / "out"
    copy_models(bench, models, 100)
    command = words(bench, f"{models}/step_*", folder, "--patience", "0", "--then", "trainer.max_steps=2")
    command += ["--then", "score.every=2", "--then", f"rollout.drafter={folder}/latest"]
    done = foredraft("follow", *command).succeeded()
    assert "no newer model" in done.out + done.err
    (first,) = updates(folder)
    assert first["target"] == f"{models}/step_100"
    assert first["stale"] is None
    assert first["tau"] >= 1

    copy_models(bench, models, 200)
    printed = foredraft("follow", *command).succeeded().out
    _, second = updates(folder)
    run = folder / second["run"]
    start = read_scorecard(run / "checkpoints" / "0" / "score.json")
    assert second["stale"] == start.headline.tau
    assert second["tau"] == read_scorecard(run / "checkpoints" / "best" / "score.json").headline.tau
    assert [path.name for path in checkpoints(run)] == ["0", "2"]  # `--then` counts from the second run on
    # It began as the drafter that the run before had made, and belongs to the new model.
    assert same(weights(best(folder / first["run"])), weights(run / "checkpoints" / "0"))
    origin = json.loads((run / "checkpoints" / "2" / "config.json").read_text())["target"]
    assert origin["name"] == f"{models}/step_200"
    # Answers of the older model are removed.
    assert (folder / "latest").resolve() == best(run)
    assert not (folder / first["run"] / "rollouts").exists()
    (plan,) = (run / "rollouts").glob("*/plan.json")
    assert json.loads(plan.read_text())["plan"]["drafter"]  # the older one drafted the new model's answers
    assert f"{second['tau']:.2f}" in printed


@pytest.mark.proof
def test_stopped_run_resumes_and_ends_with_the_same_weights(bench, tmp_path, monkeypatch):
    whole_run, stopped = tmp_path / "whole", tmp_path / "stopped"
    options = ["trainer.max_steps=60", "score.every=20", "--updates", "1"]
    command, again = (
        words(bench, f"{bench.root}/ckpt/step_200", folder, *options) for folder in (stopped, whole_run)
    )
    process, end = started(command), time.monotonic() + 120
    while not (stopped / "0000" / "checkpoints" / "20").exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    printed = process.communicate()[0].decode()
    assert process.returncode == 143, printed
    assert updates(stopped)[0]["tau"] is None
    monkeypatch.setattr(follow, "_train", lambda options, lock: train(options).code)
    foredraft("follow", *command).succeeded()
    foredraft("follow", *again).succeeded()
    assert same(*(weights(folder / "0000" / "checkpoints" / "60") for folder in (whole_run, stopped)))
    assert updates(stopped)[0]["tau"] == updates(whole_run)[0]["tau"]


def test_newest_model_has_the_highest_number_and_is_whole(bench, tmp_path):
    assert newest(f"{tmp_path}/*step_*") is None
    names = ("step_90", "step_100", "step_200.tmp", ".step_300", "step_400")
    copy_target(bench, *(tmp_path / name for name in names))
    for file in (tmp_path / "step_400").glob("tokenizer*"):
        file.unlink()
    assert newest(f"{tmp_path}/*step_*") == tmp_path / "step_100"
    (tmp_path / "step_100" / "config.json").unlink()
    assert newest(f"{tmp_path}/*step_*") == tmp_path / "step_90"


def test_model_is_whole_with_all_of_its_weights(bench, tmp_path):
    folder = tmp_path / "model"
    copy_target(bench, folder)
    tensors, file = weights(bench.target), folder / "model.safetensors"
    written = file.read_bytes()
    for part in (b"", written[:4], written[: len(written) // 2]):
        file.write_bytes(part)
        assert not whole(folder)
    file.unlink()
    assert not whole(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {')
    assert not whole(folder)
    names = sorted(tensors)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    index.write_text(
        json.dumps({"weight_map": {name: file for file, part in parts.items() for name in part}})
    )
    for file, part in parts.items():
        assert not whole(folder)
        save_file({name: tensors[name] for name in part}, folder / file)
    assert whole(folder)


def test_higher_number_or_a_rewritten_folder_is_newer(bench, tmp_path):
    models = [tmp_path / f"step_{step}" for step in (90, 100, 110)]
    copy_target(bench, *models)
    last = Update(str(models[1]), stamp(models[1]), "0000", tau=1.0)
    assert [follow._is_newer(model, last) for model in models] == [False, False, True]
    (models[1] / "model.safetensors").touch()
    assert follow._is_newer(models[1], last)
    assert not last.valid
    shutil.rmtree(models[1])
    assert stamp(models[1]) == ""
    assert not last.valid


@pytest.mark.usefixtures("quick")
def test_model_that_is_removed_while_read_stops_nothing(bench, tmp_path, monkeypatch):
    models, folder = tmp_path / "models", tmp_path / "out"
    copy_models(bench, models, 100, 200)
    run = follow._train

    def keep_last(options, lock):
        if (models / "step_200").exists():
            shutil.rmtree(models / "step_200")
        return run(options, lock)

    monkeypatch.setattr(follow, "_train", keep_last)
    done = foredraft("follow", *words(bench, f"{models}/step_*", folder, "--updates", "1")).succeeded()
    assert "gone or changed" in done.out + done.err
    assert [update["target"] for update in updates(folder)] == [f"{models}/step_100"]


@pytest.mark.usefixtures("quick")
def test_drafter_without_training_is_fitted_again(bench, tmp_path):
    models, folder = tmp_path / "models", tmp_path / "out"
    command = words(bench, f"{models}/step_*", folder, "drafter=suffix", "--patience", "0")
    command.remove("drafter.depth=2")
    for step in (100, 200):
        copy_models(bench, models, step)
        foredraft("follow", *command).succeeded()
    assert [update["stale"] for update in updates(folder)] == [None, None]


def training(parent: int) -> list[int]:
    """Children of a command that train; it has others for moments, such as git."""
    found = []
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            found += [int(child)] if b"train" in words else []
    return found


def test_folder_stays_locked_while_a_run_lives(bench, tmp_path):
    """The run of a command that was killed trains on, and the command does not begin another."""
    folder = tmp_path / "out"
    command = words(bench, f"{bench.root}/ckpt/step_200", folder, "--updates", "1", "trainer.max_steps=2000")
    process, end = started(command), time.monotonic() + 60
    while not (found := training(process.pid)) and time.monotonic() < end:
        time.sleep(0.05)
    (child,) = found
    process.kill()
    process.wait()
    try:
        foredraft("follow", *command).refused("another process is working there")
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("target=elsewhere",), "target: "),
        (("--then", "drafter.init_from=x"), "drafter.init_from: "),
        (("score.enabled=false",), "score.enabled: "),
        (("step_100",), "quote the pattern"),
        (("--updates", "0"), "--updates"),
    ],
)
def test_options_that_follow_sets_are_refused(bench, tmp_path, more, said):
    foredraft("follow", *words(bench, f"{bench.root}/ckpt/*", tmp_path / "out", *more)).refused(said)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("quick")
def test_folder_of_another_command_and_a_run_that_fails(bench, tmp_path):
    folder = tmp_path / "out"
    bad = words(bench, f"{bench.root}/ckpt/*", folder, "decode.depth=-1", "--updates", "1")
    assert foredraft("follow", *bad).code == 2  # as the run said
    other = words(bench, f"{bench.root}/ckpt/*", folder, "--updates", "1")
    foredraft("follow", *other).succeeded()  # the first had done nothing yet
    foredraft("follow", *other, "drafter.depth=1").refused("another configuration", "--folder")
