"""Commands that a finished run suggests."""

import json

import cards
import pytest
import torch

from decode.hardware import hardware
from distill.report import terminal

COMPILED = "target.compile=true target.capture=true"
HERE = hardware(torch.device("cpu"))
TIMES = {"seconds": [1.0], "tokens": [9], "plain_seconds": [2.0], "plain_tokens": [9]}


@pytest.fixture
def suggested(tmp_path, monkeypatch, capsys):
    def of(passes="uncompiled", compiler="", **conditions) -> str:
        timing = TIMES | {"passes": passes, "plain_passes": passes}
        best = tmp_path / "checkpoints" / "best"
        best.mkdir(parents=True)
        (best / "config.json").write_text("{}")
        card = cards.scorecard([cards.row(timing=timing)], **{"hardware": HERE} | conditions)
        (best / "score.json").write_text(json.dumps(card))
        monkeypatch.setattr(terminal, "missing_compiler", lambda device: compiler)
        monkeypatch.setattr(terminal, "best", lambda folder: best)
        terminal.places(tmp_path)
        return capsys.readouterr().out

    return of


def test_compiled_rounds_are_suggested_where_they_were_not_scored(suggested):
    assert f"checkpoints/best {COMPILED}\n" in suggested()


@pytest.mark.parametrize(
    "known",
    [
        {"passes": "captured, compiled"},
        {"compiler": "no C++ compiler"},
        {"dtype": "float32"},
        {"hardware": "a GPU"},
        {"elsewhere": "in an engine"},
    ],
    ids=lambda known: "".join(known),
)
def test_and_nowhere_else(suggested, known):
    out = suggested(**known)
    assert "foredraft score checkpoint=" in out
    assert COMPILED not in out
