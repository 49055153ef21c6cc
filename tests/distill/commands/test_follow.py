"""foredraft follow: a drafter for a target that is being trained."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from workbench import QUICK, Bench, foredraft, train

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


def moved(model: Path, folder: Path, seed: int) -> Path:
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(seed)
    changed = {name: w + 0.05 * w.std() * torch.randn_like(w) for name, w in weights.items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return folder


def words(bench: Bench, models: str, folder: Path, *more: str) -> list[str]:
    prompts = [f"prompts={bench.prompts}", f"prompts.heldout={bench.heldout}"]
    return [models, *QUICK, *prompts, *FEW, "--folder", str(folder), *more]


@pytest.fixture
def quick(monkeypatch):
    """Runs in this process, which need not import all anew."""
    monkeypatch.setattr(follow, "_train", lambda options, lock: train(options).code)


def updates(folder: Path) -> list[dict]:
    return json.loads((folder / FILE).read_text())["updates"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.usefixtures("quick")
def test_the_drafter_goes_on_with_every_newer_model(bench, tmp_path):
    models, folder = tmp_path / "models", tmp_path / "out"
    shutil.copytree(bench.root / "ckpt" / "step_100", models / "step_100")
    command = words(bench, f"{models}/step_*", folder, "--patience", "0", "--then", "trainer.max_steps=2")
    command += ["--then", "score.every=2", "--then", f"rollout.drafter={folder}/latest"]
    done = foredraft("follow", *command).succeeded()
    assert "no newer model" in done.out + done.err
    (first,) = updates(folder)
    assert first["target"] == f"{models}/step_100"
    assert first["stale"] is None
    assert first["tau"] >= 1

    shutil.copytree(bench.root / "ckpt" / "step_200", models / "step_200")
    printed = foredraft("follow", *command).succeeded().out
    _, second = updates(folder)
    run = folder / second["run"]
    start = read_scorecard(run / "checkpoints" / "0" / "score.json")
    assert second["stale"] == start.compared.tau
    assert second["tau"] == read_scorecard(run / "checkpoints" / "best" / "score.json").compared.tau
    assert [path.name for path in checkpoints(run)] == ["0", "2"]  # `--then` counts in the second run alone
    # It began as the drafter that the run before had made, and belongs to the new model.
    before, now = (weights_of(path) for path in (best(folder / first["run"]), run / "checkpoints" / "0"))
    assert all(torch.equal(before[name], now[name]) for name in before)
    origin = json.loads((run / "checkpoints" / "2" / "config.json").read_text())["target"]
    assert origin["name"] == f"{models}/step_200"
    # Whoever decodes reads one link; answers of models that are no more the newest are gone.
    assert (folder / "latest").resolve() == best(run)
    assert not (folder / first["run"] / "rollouts").exists()
    (plan,) = (run / "rollouts").glob("*/plan.json")
    assert json.loads(plan.read_text())["plan"][
        "drafter"
    ]  # of the model before, which drafted the new one's answers
    assert f"{second['tau']:.2f}" in printed


@pytest.mark.proof
def test_a_stopped_run_goes_on_and_ends_as_if_it_had_not_been(bench, tmp_path, monkeypatch):
    models = f"{bench.root}/ckpt/step_200"
    steps = ["trainer.max_steps=60", "score.every=20", "--updates", "1"]
    whole_run, stopped = tmp_path / "whole", tmp_path / "stopped"
    command = words(bench, models, stopped, *steps)
    process = subprocess.Popen(
        [sys.executable, "-m", "foredraft", "follow", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    end = time.monotonic() + 120
    while not (stopped / "0000" / "checkpoints" / "20").exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    printed = process.communicate()[0].decode()
    assert process.returncode == 143, printed
    assert updates(stopped)[0]["tau"] is None
    monkeypatch.setattr(follow, "_train", lambda options, lock: train(options).code)
    foredraft("follow", *command).succeeded()
    foredraft("follow", *words(bench, models, whole_run, *steps)).succeeded()
    one, two = (weights_of(folder / "0000" / "checkpoints" / "60") for folder in (whole_run, stopped))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert updates(stopped)[0]["tau"] == updates(whole_run)[0]["tau"]


@pytest.mark.usefixtures("quick")
def test_a_model_that_is_gone_is_given_up_for_the_newest(bench, tmp_path):
    models, folder = tmp_path / "models", tmp_path / "out"
    shutil.copytree(bench.root / "ckpt" / "step_200", models / "step_200")
    command = words(bench, f"{models}/step_*", folder, "--updates", "1")
    half = {"target": f"{models}/step_100", "stamp": "x", "run": "0000"}
    (folder / "0000").mkdir(parents=True)
    (folder / "0000" / "rollouts.json").write_text('{"store": "of another model"}')
    (folder / FILE).write_text(json.dumps({"updates": [half]}))
    said = foredraft("follow", *command).succeeded()
    assert "gone or changed before its run had ended" in said.out + said.err
    assert [update["target"] for update in updates(folder)] == [f"{models}/step_200"]


def test_the_newest_model_has_the_highest_number_and_all_of_its_weights(bench, tmp_path):
    assert newest(f"{tmp_path}/step_*") is None
    for step in (90, 100):
        shutil.copytree(bench.target, tmp_path / f"step_{step}")
    assert newest(f"{tmp_path}/step_*") == tmp_path / "step_100"
    file = tmp_path / "step_100" / "model.safetensors"
    written = file.read_bytes()
    for part in (b"", written[:4], written[: len(written) // 2]):
        file.write_bytes(part)
        assert newest(f"{tmp_path}/step_*") == tmp_path / "step_90"
    file.unlink()
    assert not whole(tmp_path / "step_100")
    file.write_bytes(written)
    (tmp_path / "step_100" / "config.json").unlink()
    assert not whole(tmp_path / "step_100")


def test_models_that_are_no_models_yet_are_passed_over(bench, tmp_path):
    shutil.copytree(bench.target, tmp_path / "step_100")
    for name in ("step_200.tmp", ".step_300"):
        shutil.copytree(bench.target, tmp_path / name)
    shutil.copytree(bench.target, tmp_path / "step_400")
    for file in (tmp_path / "step_400").glob("tokenizer*"):
        file.unlink()
    assert newest(f"{tmp_path}/*step_*") == tmp_path / "step_100"


def test_what_is_newer(bench, tmp_path):
    """Higher numbers, or the same folder written again; not what a trainer leaves that goes back."""
    models = [Path(shutil.copytree(bench.target, tmp_path / f"step_{step}")) for step in (90, 100, 110)]
    last = Update(str(models[1]), stamp(models[1]), "0000", tau=1.0)
    assert [follow._is_newer(model, last) for model in models] == [False, False, True]
    (models[1] / "model.safetensors").touch()
    assert follow._is_newer(models[1], last)
    assert not last.valid
    shutil.rmtree(models[1])
    assert stamp(models[1]) == ""
    assert not last.valid


@pytest.mark.usefixtures("quick")
def test_a_model_that_goes_away_while_it_is_read_does_not_end_it(bench, tmp_path, monkeypatch):
    models, folder = tmp_path / "models", tmp_path / "out"
    for step in (100, 200):
        shutil.copytree(bench.root / "ckpt" / f"step_{step}", models / f"step_{step}")
    run = follow._train

    def keep_last(options, lock):
        if (models / "step_200").exists():
            shutil.rmtree(models / "step_200")
        return run(options, lock)

    monkeypatch.setattr(follow, "_train", keep_last)
    foredraft("follow", *words(bench, f"{models}/step_*", folder, "--updates", "1")).succeeded()
    assert [update["target"] for update in updates(folder)] == [f"{models}/step_100"]


@pytest.mark.usefixtures("quick")
def test_a_drafter_that_trains_nothing_is_fitted_anew(bench, tmp_path):
    models, folder = tmp_path / "models", tmp_path / "out"
    command = words(bench, f"{models}/step_*", folder, "drafter=suffix", "--patience", "0")
    command.remove("drafter.depth=2")
    for step in (100, 200):
        shutil.copytree(bench.root / "ckpt" / f"step_{step}", models / f"step_{step}")
        foredraft("follow", *command).succeeded()
    assert [update["stale"] for update in updates(folder)] == [None, None]


def test_the_folder_stays_locked_while_a_run_lives(bench, tmp_path):
    """Should the command be killed, its run trains on; the command again does not begin another beside it."""
    folder = tmp_path / "out"
    command = words(bench, f"{bench.root}/ckpt/step_200", folder, "--updates", "1", "trainer.max_steps=2000")
    process = subprocess.Popen(
        [sys.executable, "-m", "foredraft", "follow", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    child, end = 0, time.monotonic() + 60
    while not child and time.monotonic() < end:
        found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
        child = int((found.stdout.split() or ["0"])[0])
        time.sleep(0.05)
    process.kill()
    process.wait()
    try:
        foredraft("follow", *command).refused("another process is working there")
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_model_in_parts_is_whole_with_all_of_them(bench, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(bench.target, folder)
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {')
    assert not whole(folder)
    index.write_text(
        json.dumps({"weight_map": {name: file for file, part in parts.items() for name in part}})
    )
    save_file({name: weights[name] for name in parts["a.safetensors"]}, folder / "a.safetensors")
    assert not whole(folder)
    save_file({name: weights[name] for name in parts["b.safetensors"]}, folder / "b.safetensors")
    assert whole(folder)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("target=elsewhere",), "target: foredraft follow sets it"),
        (("--then", "drafter.init_from=x"), "drafter.init_from: foredraft follow sets it"),
        (("score.enabled=false",), "score.enabled: foredraft follow sets it"),
        (("step_100",), "step_100 is no OPTION=VALUE; quote the pattern"),
        (("--updates", "0"), "--updates is 1 or more"),
    ],
)
def test_what_is_refused(bench, tmp_path, more, said):
    foredraft("follow", *words(bench, f"{bench.root}/ckpt/*", tmp_path / "out", *more)).refused(said)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("quick")
def test_a_folder_of_another_command_and_a_run_that_fails(bench, tmp_path):
    folder = tmp_path / "out"
    bad = words(bench, f"{bench.root}/ckpt/*", folder, "decode.depth=-1", "--updates", "1")
    assert foredraft("follow", *bad).code == 2  # as the run said
    other = words(bench, f"{bench.root}/ckpt/*", folder, "--updates", "1")
    foredraft("follow", *other).succeeded()  # the first had done nothing yet
    foredraft("follow", *other, "drafter.depth=1").refused(
        "another configuration", "give --folder another folder", f"drafter.init_from={folder}/latest"
    )
