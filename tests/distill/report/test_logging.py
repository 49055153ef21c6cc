"""W&B, online and offline, TensorBoard and the CSV file hold the same numbers."""

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cards
import pytest
from cards import row_of
from fake_wandb import KEY, FakeWandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record
from workbench import ROOT, Bench, fork, tau, train

from decode.errors import UserError
from decode.evaluation.scorecard import read_scorecard
from distill.loggers import loggers as tracking
from distill.loggers.base import accepted_lengths, setting
from distill.loggers.wandb_logger import Wandb
from distill.options.run import LoggerOptions
from distill.report.history import read as history_of
from distill.training import checkpointing as callbacks
from distill.utils.run_record import ResolvedOptions, RunRecord

BLOCK = 32768  # of the LevelDB log format


def records(path: Path) -> Iterator[Record]:
    """Records of a .wandb file: 7 bytes of header, then LevelDB log framing."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    place, part = 7, b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:  # padding at the end of a block
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or last of several
            yield Record.FromString(part)
            part = b""


def read(run: Path) -> tuple[dict, list[dict], list]:
    """Configuration, history and artifacts of a run's .wandb file."""

    def values(items) -> dict:
        return {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}

    (path,) = run.glob("wandb/offline-run-*/run-*.wandb")
    config, history, artifacts = {}, [], []
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            history.append(values(record.history.item))
        elif kind in ("config", "run"):
            config |= values((record.config if kind == "config" else record.run.config).update)
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            artifacts.append(record.request.log_artifact.artifact)
        elif kind == "artifact":
            artifacts.append(record.artifact)
    return config, history, artifacts


def values_of(history: list[dict], name: str) -> dict[int, float]:
    """A metric's values by step."""
    return {row["trainer/global_step"]: row[name] for row in history if name in row}


def offline(folder: Path) -> None:
    """No key, a home where W&B may write, and what is printed to stderr in a file."""
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        os.environ.pop(name, None)
    os.environ["HOME"] = str(folder)
    with (folder / "stderr").open("w") as file:
        os.dup2(file.fileno(), 2)


def offline_sweep(bench: Bench, folder: Path) -> int:
    """Two jobs with W&B in one process, as somebody without an account runs them."""
    os.chdir(folder)
    offline(folder)
    sys.stderr = sys.__stderr__
    done = train(["-m", *bench.command, "logger=wandb", "seed=1,2"])
    (folder / "log").write_text(done.err)
    return done.code


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    bench = Bench(tmp_path_factory.mktemp("logging"))
    folder = tmp_path_factory.mktemp("sweep")
    status = fork(lambda: offline_sweep(bench, folder))
    assert status == 0, (folder / "log").read_text() + (folder / "stderr").read_text()
    return folder


@pytest.mark.proof
def test_every_job_has_its_own_offline_run(sweep):
    """With its configuration and the losses and scores of its files, and nothing is printed."""
    seeds = []
    for job in [path.parent for path in sorted(sweep.glob("multirun/*/*/*/checkpoints"))]:
        config, history, _ = read(job)
        seeds.append(config["seed"])
        assert (config["trainer"]["max_steps"], config["drafter"]["depth"]) == (6, 2)
        losses = values_of(history, "train/loss")
        curve, rows = history_of(job).curves["loss"][1], (job / "csv" / "metrics.csv").read_text()
        assert list(losses.values()) == pytest.approx(curve, rel=1e-6), (losses, rows)
        assert len(losses) == 6
        assert values_of(history, "score/tau") == {s: tau(job / "checkpoints" / str(s)) for s in (3, 6)}
        logged = {key for row in history for key in row}
        assert {"train/divergence_1", "train/top1_2", "score/speedup", "score/survival_1"} <= logged
    assert seeds == [1, 2]
    assert (sweep / "log").read_text() + (sweep / "stderr").read_text() == ""


# -- a run that is killed and resumed ----------------------------------------------------------------


def stop_at(step: int, how: int) -> None:
    """Have this process send itself a signal behind a step."""
    end = callbacks.TrainingBar.on_train_batch_end

    def stop(self, trainer, *rest):
        end(self, trainer, *rest)
        if trainer.global_step == step:
            os.kill(os.getpid(), how)

    callbacks.TrainingBar.on_train_batch_end = stop


def read_events(folder: Path) -> EventAccumulator:
    """All of them: 0 is no limit."""
    events = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0, "tensors": 0})
    events.Reload()
    return events


@pytest.fixture(scope="module")
def resumed(bench) -> Path:
    """Killed behind step 5, two steps behind its newest checkpoint; then made to its end."""
    words = ["logger=all", "logger.weights=always"]
    killed = bench.fork(*words, before=lambda: (offline(bench.root), stop_at(5, signal.SIGKILL)))
    assert killed == signal.SIGKILL
    assert bench.fork(*words, before=lambda: offline(bench.root)) == 0
    (folder,) = bench.runs()
    return folder


@pytest.mark.proof
def test_killed_run_resumes_its_record_without_gaps(resumed, bench):
    assert (bench.root / "stderr").read_text() == ""
    config, history, _ = read(resumed)
    losses, events = values_of(history, "train/loss"), read_events(resumed / "tensorboard")
    assert list(losses) == [row["trainer/global_step"] for row in history if "train/loss" in row]
    assert list(losses) == [e.step for e in events.Scalars("train/loss")] == [0, 1, 2, 3, 4, 5]
    assert list(values_of(history, "score/tau")) == [e.step for e in events.Scalars("score/tau")] == [3, 6]
    assert config["commit"] == json.loads((resumed / "checkpoints/6/score.json").read_text())["commit"]
    for values in history_of(resumed).curves["loss"][1], [e.value for e in events.Scalars("train/loss")]:
        assert values == pytest.approx(list(losses.values()), rel=1e-6)


def test_scorecards_are_tables_and_accepted_lengths_histograms(resumed):
    scored = [read_scorecard(resumed / f"checkpoints/{s}/score.json") for s in (3, 6)]
    _, history, _ = read(resumed)
    *_, newest = values_of(history, "scorecard/path").values()
    (file,) = resumed.glob(f"wandb/offline-run-*/files/{newest}")
    table = json.loads(file.read_text())
    columns = ("step", "tau", "tau_decoded", "decode", "audit", "drafter", "s_1")
    lines = [[line[table["columns"].index(name)] for name in columns] for line in table["data"]]
    rows = [(step, card.rows[0]) for step, card in zip((3, 6), scored, strict=True)]
    assert lines == [
        [step, row.replay.tau, row.tau, row.decode, "pass", "eagle", row.replay.survival[0]]
        for step, row in rows
    ]
    name = f"accepted_length/{setting(scored[1].rows[0])}"
    shown = values_of(history, f"{name}/values")
    events = read_events(resumed / "tensorboard")
    histograms = events.Histograms(name)
    assert list(shown) == [histogram.step for histogram in histograms] == [3, 6]
    assert sum(shown[6]) == histograms[-1].histogram_value.num == scored[1].rows[0].rounds
    assert values_of(history, f"{name}/bins")[6][:2] == [-0.5, 0.5]
    text = events.Tensors("scorecard/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert f"{scored[1].headline.tau:.2f}" in text
    survived = row_of(cards.row(rounds=10, survival=[0.7, 0.4, 0.1]))
    assert accepted_lengths(survived) == [3, 3, 3, 1]


def test_checkpoints_are_artifacts(resumed):
    *_, artifacts = read(resumed)
    models = [a for a in artifacts if a.type == "model"]
    best = (resumed / "checkpoints" / "best").readlink()
    aliases = {next(a for a in m.aliases if a.startswith("step-")): set(m.aliases) for m in models}
    assert "last" in aliases["step-6"]
    assert "best" in aliases[f"step-{best}"]
    (page,) = [a for a in artifacts if a.type == "report"]
    assert [Path(e.local_path) for e in page.manifest.contents] == [resumed / "report.html"]
    for model in models:
        entries = {e.path: Path(e.local_path) for e in model.manifest.contents}
        assert set(entries) == {"model.safetensors", "config.json", "score.json"}
        assert {path.parents[1] for path in entries.values()} == {resumed / "checkpoints"}


# -- a server ----------------------------------------------------------------------------------------


def connect(folder: Path, server: FakeWandb, patience: int) -> None:
    offline(folder)
    os.environ.update(WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY, WANDB_INIT_TIMEOUT=str(patience))


@pytest.mark.proof
def test_with_a_key_the_run_is_online(bench, tmp_path):
    server, place = FakeWandb(), f"output_dir={tmp_path / 'outputs'}"
    assert bench.fork("logger=wandb", place, before=lambda: connect(tmp_path, server, 60)) == 0
    (record,) = tmp_path.glob("outputs/*/*/run.json")
    folder = record.parent
    assert [r["trainer/global_step"] for r in server.history if "train/loss" in r] == [0, 1, 2, 3, 4, 5]
    models = [a for a in server.artifacts if a["artifactTypeName"] == "model"]
    best = (folder / "checkpoints" / "best").readlink()
    aliases = {f"step-{best}": "best", "step-6": "last"}
    for step, name in aliases.items():
        (given,) = [n for m in models if step in (n := {a["alias"] for a in m["aliases"]})]
        assert name in given
    assert len(models) == len({best, Path("6")})
    written = "".join(p.read_text() for p in folder.rglob("*.log")) + (folder / "run.json").read_text()
    assert KEY not in written
    server.close()


@pytest.mark.proof
def test_server_that_fails_stops_no_run(tmp_path, capfd):
    bench, server = Bench(tmp_path), FakeWandb()
    server.broken = True

    def body() -> int:
        connect(tmp_path, server, 3)
        done = bench.train("logger=wandb")
        os.write(1, (done.out + done.err).encode())
        return done.code

    assert fork(body) == 0
    said = capfd.readouterr().out
    assert len([line for line in said.splitlines() if "this run is recorded offline" in line]) == 1
    assert KEY not in said
    (run,) = bench.runs()
    assert len(values_of(read(run)[1], "train/loss")) == 6
    server.close()


def test_failure_is_printed_once_without_the_key(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    logger = Wandb(RunRecord(tmp_path, ResolvedOptions({})), "p", "never")
    asked = []

    def fail(*_):
        asked.append(1)
        raise OSError(28, "No space left on device for secret-key")

    monkeypatch.setattr(logger, "_begin", fail)
    for step in range(3):
        logger.log_metrics({"train/loss": 1.0}, step)
    assert len(asked) == 1
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "No space left" in said
    assert "secret-key" not in said


def test_missing_wandb_names_another_logger(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    options = LoggerOptions(wandb=True, tensorboard=False, project="p", weights="end")
    with pytest.raises(UserError, match="pip install wandb, or logger=csv"):
        tracking.loggers(options, RunRecord(tmp_path, ResolvedOptions({})), 0)


def test_wandb_is_imported_by_runs_that_log_to_it():
    """It takes a second, and a machine may lack it."""
    code = "import sys; import distill.main, foredraft; assert 'wandb' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}
    )


def test_missing_tensorboard_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    options = LoggerOptions(wandb=False, tensorboard=True, project="p", weights="end")
    for weights, said in (("end", r"foredraft\[tensorboard\]"), ("some", r"logger\.weights=some")):
        with pytest.raises(UserError, match=said):
            tracking.loggers(replace(options, weights=weights), RunRecord(tmp_path, ResolvedOptions({})), 0)
