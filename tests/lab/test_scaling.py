"""scripts/lab/benchmark.py scaling: what it starts, and what it makes of what runs log."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from workbench import CONF

from benchmarks import scaling
from decode.errors import UserError
from distill.config.compose import compose


def config(tmp_path: Path, *overrides: str):
    places = [f"out={tmp_path / 'out.json'}", f"rollouts={tmp_path}"]
    return compose([*places, *overrides], CONF, "lab/scaling")


def stand_in(monkeypatch, speeds, code: int = 0) -> list[dict[str, str]]:
    """Runs that log a warm-up line and then a speed of each."""
    started, real = [], subprocess.run

    def run(command, **options):
        if command[0] != sys.executable:  # git, for the commit
            return real(command, **options)
        words = dict(word.split("=", 1) for word in command[2:])
        started.append(words)
        speed = speeds[words["trainer"], int(words["trainer.devices"])].pop(0)
        log = Path(words["hydra.run.dir"].strip("'")) / "csv" / "metrics.csv"
        log.parent.mkdir(parents=True)
        lines = [f"{value},1.5," for value in (1.0, speed - 1, speed, speed + 1)]
        head = "train/tokens_per_second,train/peak_gib,train/loss"
        log.write_text("\n".join([head, *lines, ",,3.0"]) + "\n")
        return subprocess.CompletedProcess(command, code, "", "noise\nerror: no such device\n")

    monkeypatch.setattr(scaling.subprocess, "run", run)
    return started


def test_efficiency_is_relative_to_one_process_of_the_same_turn(tmp_path, monkeypatch, capsys):
    speeds = {("ddp", 1): [100.0, 50.0, 10.0], ("ddp", 2): [150.0, 80.0, 18.0]}
    started = stand_in(monkeypatch, speeds)
    cfg = config(tmp_path, "trainers=[ddp]", "overrides=['drafter=medusa']")
    assert scaling.scaling(cfg, tmp_path) == pytest.approx(0.8)
    assert [(w["trainer"], w["trainer.devices"]) for w in started] == [("ddp", "1"), ("ddp", "2")] * 3
    assert all(w["drafter"] == "medusa" and w["resume"] == "never" for w in started)
    one, two = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (one["efficiency"], one["tokens_per_second"]) == (1.0, 50.0)
    assert (two["efficiency"], two["tokens_per_second"], two["peak_gib"]) == (0.8, 80.0, 1.5)
    assert "ddp          2        80         80%" in capsys.readouterr().out


def test_a_run_that_fails_is_one_line(tmp_path, monkeypatch):
    stand_in(monkeypatch, {("ddp", 1): [1.0]}, code=2)
    with pytest.raises(UserError, match=r"^benchmark: trainer=ddp on 1 processes: no such device$"):
        scaling.scaling(config(tmp_path, "trainers=[ddp]"), tmp_path)
