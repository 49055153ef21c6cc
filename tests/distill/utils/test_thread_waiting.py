"""Threads wait passively where the user set nothing, from before torch is imported on."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from workbench import ROOT

from distill.engines import launch
from distill.utils import thread_waiting
from distill.utils.thread_waiting import NAME, OTHERS, chosen_here, described, wait_passively

# What the process, and one that it starts, have when the body of a command runs.
BODY = """
import json, os, subprocess, sys
import foredraft.cli as cli
from distill.utils.thread_waiting import chosen_here
def configured(*given):
    assert "torch" not in sys.modules
    child = [sys.executable, "-c", "import os; print(os.environ.get('OMP_WAIT_POLICY'))"]
    said = subprocess.run(child, capture_output=True, text=True).stdout.strip()
    print(json.dumps([os.environ.get("OMP_WAIT_POLICY"), said, chosen_here()]))
cli.configured = configured
"""
ENTRIES = {
    "foredraft": "sys.argv = ['foredraft', 'train']; cli.main()",
    "train.py": "import runpy; sys.argv = ['train.py']; runpy.run_path('train.py', run_name='__main__')",
}


def entry(body: str, **variables: str) -> list:
    environment = {name: value for name, value in os.environ.items() if name not in (NAME, *OTHERS)}
    done = subprocess.run(
        [sys.executable, "-c", BODY + body],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": "src"} | variables,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_has_it_before_torch_and_passes_it_on(name):
    assert entry(ENTRIES[name]) == ["PASSIVE", "PASSIVE", {NAME: "PASSIVE"}]


def test_what_the_user_set_stays():
    assert entry(ENTRIES["foredraft"], OMP_WAIT_POLICY="ACTIVE") == ["ACTIVE", "ACTIVE", {}]
    assert entry(ENTRIES["foredraft"], GOMP_SPINCOUNT="5") == [None, "None", {}]


def test_nothing_is_set_for_somebody_who_has_imported_torch(monkeypatch):
    for name in (NAME, *OTHERS):
        monkeypatch.delenv(name, raising=False)
    wait_passively()
    assert NAME not in os.environ
    assert (chosen_here(), described()) == ({}, "")
    monkeypatch.setenv(NAME, "ACTIVE")
    assert described() == "OMP_WAIT_POLICY=ACTIVE"


def test_an_engine_in_an_environment_of_its_own_chooses_itself(monkeypatch):
    monkeypatch.setenv(NAME, "PASSIVE")
    assert launch.environment({})[NAME] == "PASSIVE"  # the user's
    monkeypatch.setitem(thread_waiting._set, "by_us", True)
    assert NAME not in launch.environment({})
