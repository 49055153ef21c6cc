"""What is logged where: W&B offline files and the CSV file hold the same numbers."""

import csv
import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from wandb.proto import wandb_internal_pb2
from workbench import Bench, fork, train

BLOCK = 32768  # of the LevelDB log format


def records(path: Path) -> Iterator[bytes]:
    """Raw records of a .wandb file: 7 bytes of header, then LevelDB log framing."""
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
            yield part
            part = b""


def read(path: Path) -> tuple[dict, list[dict], list]:
    """Configuration, history and artifacts of a .wandb file."""
    config, history, artifacts = {}, [], []
    for raw in records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(raw)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = record.history.item
            history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        elif kind in ("config", "run"):
            update = record.config.update if kind == "config" else record.run.config.update
            config |= {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in update}
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            artifacts.append(record.request.log_artifact.artifact)
        elif kind == "artifact":
            artifacts.append(record.artifact)
    return config, history, artifacts


def offline_sweep(bench: Bench, folder: Path) -> int:
    """Two jobs with W&B in one process, as somebody without an account runs them."""
    os.chdir(folder)
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        os.environ.pop(name, None)
    with (folder / "stderr").open("w") as file:
        os.dup2(file.fileno(), 2)
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


def jobs(sweep: Path) -> list[Path]:
    return [p.parent for p in sorted(sweep.glob("multirun/*/*/*/checkpoints"))]


def test_every_job_has_its_own_offline_run_with_its_configuration(sweep):
    seeds = []
    for job in jobs(sweep):
        (file,) = job.glob("wandb/offline-run-*/run-*.wandb")
        config, *_ = read(file)
        seeds.append(config["seed"])
        assert config["trainer"]["max_steps"] == 6
        assert config["drafter"]["depth"] == 2
    assert seeds == [1, 2]


def test_history_holds_losses_and_scores_as_the_files_do(sweep):
    for job in jobs(sweep):
        (file,) = job.glob("wandb/offline-run-*/run-*.wandb")
        _, history, _ = read(file)
        losses = [row["train/loss"] for row in history if "train/loss" in row]
        with (job / "csv" / "metrics.csv").open() as lines:
            table = list(csv.DictReader(lines))
        assert losses == pytest.approx([float(r["train/loss"]) for r in table if r["train/loss"]], rel=1e-6)
        assert len(losses) == 6
        taus = {row["trainer/global_step"]: row["score/tau"] for row in history if "score/tau" in row}
        cards = {s: json.loads((job / "checkpoints" / str(s) / "score.json").read_text()) for s in (3, 6)}
        assert taus == {step: card["tau"] for step, card in cards.items()}
        logged = {key for row in history for key in row}
        assert {"train/divergence_1", "train/top1_2", "score/speedup", "score/survival_1"} <= logged


def test_nothing_is_muttered_on_the_side(sweep):
    assert (sweep / "log").read_text() == ""
    assert (sweep / "stderr").read_text() == ""
