"""A process: how its threads wait, memory that it keeps, and JSON files of a run, whole or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from workbench import ROOT

from decode.errors import UserError
from distill.engines import launch
from distill.utils import thread_waiting
from distill.utils.atomic_files import read_json, write_json
from distill.utils.thread_waiting import CHOSEN, NAMES, chosen_here, described, wait_passively

# What a process has after the import, and one that it starts has when the body of a command runs.
BODY = """
import json, os, subprocess, sys
import foredraft
first = os.environ.get("OMP_WAIT_POLICY")  # what a notebook has
import foredraft.cli as cli
from distill.utils.thread_waiting import chosen_here
def configured(*given):
    assert "torch" not in sys.modules
    child = [sys.executable, "-c", "import os; print(os.environ.get('OMP_WAIT_POLICY'))"]
    said = subprocess.run(child, capture_output=True, text=True).stdout.strip()
    print(json.dumps([first, said, chosen_here()]))
cli.configured = configured
"""
COMMAND = "sys.argv = ['foredraft', 'train']; cli.main()"
SCRIPT = "import runpy; sys.argv = ['train.py']; runpy.run_path('train.py', run_name='__main__')"


@pytest.mark.parametrize(
    ("entry", "variables", "found"),
    [
        (COMMAND, {}, ["PASSIVE", "PASSIVE", CHOSEN]),
        (SCRIPT, {}, ["PASSIVE", "PASSIVE", CHOSEN]),
        (COMMAND, {"OMP_WAIT_POLICY": "ACTIVE"}, ["ACTIVE", "ACTIVE", {}]),
        (COMMAND, {"GOMP_SPINCOUNT": "5"}, [None, "None", {}]),
    ],
)
def test_commands_wait_passively_unless_the_user_set_something(entry, variables, found):
    plain = {name: value for name, value in os.environ.items() if name not in NAMES}
    place = {"cwd": ROOT, "env": plain | {"PYTHONPATH": "src"} | variables}
    done = subprocess.run([sys.executable, "-c", BODY + entry], capture_output=True, text=True, **place)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == found


def test_nothing_is_set_after_torch_was_imported(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    wait_passively()
    assert not CHOSEN.keys() & os.environ.keys()
    assert (chosen_here(), described()) == ({}, "")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert described() == "OMP_WAIT_POLICY=ACTIVE"


def test_engine_with_its_own_environment_chooses_itself(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert launch.environment({})["OMP_WAIT_POLICY"] == "PASSIVE"  # the user's
    monkeypatch.setitem(thread_waiting._set, "by_us", True)
    assert "OMP_WAIT_POLICY" not in launch.environment({})


FAULTS = """
import resource, torch
from distill.utils.heap import keep_freed_memory
kept = keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        block = torch.ones(2**20)  # 4 MiB, 1024 pages
        del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(kept, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_block_is_used_again():
    out = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout
    kept, faults = out.split()
    assert kept == "False" or int(faults) < 1024  # fewer than those of one block in fifty


DAMAGED = ["", "{", '{"a": 1', "[1]", '"text"', "3", "null", "\x00", "[" * 100_000, "{}", '{"a": "1"}']


@pytest.mark.parametrize("data", [*map(str.encode, DAMAGED), b"\xff\xfe{}"])
def test_damaged_file_is_named_in_a_line(data, tmp_path):
    path = tmp_path / "a.json"
    assert read_json(path, "remove it", a=int) is None
    write_json(path, {"a": 1})
    assert read_json(path, "remove it", a=int) == {"a": 1}
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"^{path}: damaged \(.*; remove it$"):
        read_json(path, "remove it", a=int)
