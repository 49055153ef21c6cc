"""A process: how its threads wait, memory that it keeps, and JSON files of a run, whole or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from workbench import ROOT

from decode.errors import UserError
from distill.engines import launch
from distill.utils import cpu_threads, thread_spinning
from distill.utils.atomic_files import read_json, write_json
from distill.utils.thread_spinning import CHOSEN, COUNTS, NAMES, chosen_here, described, spin_briefly

# What a process has after the import, and one that it starts has when the body of a command runs.
BODY = """
import json, os, subprocess, sys
import foredraft
first = os.environ.get("GOMP_SPINCOUNT")  # what a notebook has
import foredraft.cli as cli
from distill.utils.thread_spinning import chosen_here
def configured(*given):
    assert "torch" not in sys.modules
    child = [sys.executable, "-c", "import os; print(os.environ.get('GOMP_SPINCOUNT'))"]
    said = subprocess.run(child, capture_output=True, text=True).stdout.strip()
    print(json.dumps([first, said, chosen_here()]))
cli.configured = configured
"""
COMMAND = "sys.argv = ['foredraft', 'train']; cli.main()"
SCRIPT = "import runpy; sys.argv = ['train.py']; runpy.run_path('train.py', run_name='__main__')"


@pytest.mark.parametrize(
    ("entry", "variables", "found"),
    [
        (COMMAND, {}, ["10000", "10000", CHOSEN]),
        (SCRIPT, {}, ["10000", "10000", CHOSEN]),
        (COMMAND, {"GOMP_SPINCOUNT": "5"}, ["5", "5", {}]),
        (COMMAND, {"OMP_WAIT_POLICY": "PASSIVE"}, [None, "None", {}]),
    ],
)
def test_commands_spin_briefly_unless_the_user_set_something(entry, variables, found):
    plain = {name: value for name, value in os.environ.items() if name not in NAMES}
    place = {"cwd": ROOT, "env": plain | {"PYTHONPATH": "src"} | variables}
    done = subprocess.run([sys.executable, "-c", BODY + entry], capture_output=True, text=True, **place)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == found


def test_nothing_is_set_after_torch_was_imported(monkeypatch):
    for name in (*NAMES, *COUNTS):
        monkeypatch.delenv(name, raising=False)
    spin_briefly()
    assert not CHOSEN.keys() & os.environ.keys()
    assert (chosen_here(), described()) == ({}, "")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert described() == "OMP_WAIT_POLICY=ACTIVE"


def test_engine_with_its_own_environment_chooses_itself(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert launch.environment({})["GOMP_SPINCOUNT"] == "5"  # the user's
    monkeypatch.setitem(thread_spinning._set, "by_us", True)
    assert "GOMP_SPINCOUNT" not in launch.environment({})


@pytest.fixture
def counted(monkeypatch):
    """Counts of an earlier call are forgotten, and torch's number of threads is restored."""
    before = torch.get_num_threads()
    for name in COUNTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu_threads, "_counted", {})
    monkeypatch.setattr(cpu_threads, "EVERY", 0.0)
    monkeypatch.setattr(cpu_threads.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


def test_run_uses_the_cores_that_other_programs_leave(counted, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cpu_threads, "STAT", tmp_path / "stat")
    seen = []
    for running in (1, 3, 6, 30, 1):  # the caller among them
        (tmp_path / "stat").write_text(f"cpu 1 2 3\nprocs_running {running}\nprocs_blocked 9\n")
        cpu_threads.fit_threads()
        seen.append(torch.get_num_threads())
    assert seen == [6, 6, 3, 1, 6]
    assert capsys.readouterr().out.count("threads: 3 of 6, because other programs are busy") == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "6")  # the user's choice
    (tmp_path / "stat").write_text("procs_running 30\n")
    cpu_threads.fit_threads()
    assert torch.get_num_threads() == 6


@pytest.mark.parametrize("content", [None, "cpu 1 2 3\n"])
def test_threads_stay_where_the_system_does_not_count(content, counted, monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_threads, "STAT", tmp_path / "stat")
    if content:
        (tmp_path / "stat").write_text(content)
    cpu_threads.fit_threads()
    assert torch.get_num_threads() == 6


@pytest.mark.skipif(not cpu_threads.STAT.is_file(), reason="the system does not count running threads")
def test_busy_processes_are_counted():
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        time.sleep(0.3)
        assert cpu_threads.busy_others() >= 3
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


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
