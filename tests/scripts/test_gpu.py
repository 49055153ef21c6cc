"""The script of everything that is to be measured on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from workbench import ROOT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")


def test_without_a_gpu_it_says_what_it_would_run(capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import gpu

    assert gpu.main("gpu", ["score.prompts=4"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("no GPU here")
    steps = gpu.steps("gpu", ["score.prompts=4"])
    assert said.count("\n    python") == len(steps)
    assert all("score.prompts=4" in step.command for step in steps[1:])


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_its_commands_run_on_a_cpu():
    """With a run of a minute, in this clone's outputs/gpu."""
    words = ["--accelerator", "cpu", "score.prompts=2", "score.max_new_tokens=8"]
    command = [sys.executable, "scripts/gpu.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (ROOT / done.stdout.splitlines()[-1].removeprefix("written: ")).read_text()
    assert text.count("## ") == 4
    assert "speedup" in text
