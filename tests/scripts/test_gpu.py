"""The queue of GPU measurements: what runs again, what fails, its page, and the folder to take along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from workbench import CONF, ROOT

import gpu
from distill.config.compose import compose
from distill.utils import provenance
from gpu_queue import pack as packing
from gpu_queue import runner
from gpu_queue.pack import SCRIPT, pack
from gpu_queue.page import page
from gpu_queue.requirements import lacking
from gpu_queue.results import Conditions, Result, path_of, read, state
from gpu_queue.runner import run
from gpu_queue.step import LIMIT, OUT, Step
from gpu_queue.steps import steps
from gpu_queue.wheels import wheel_of

HERE = Conditions("abc", "a card", tiny=False)
SOURCES = [str(ROOT / part) for part in ("src", "scripts/lab")]


@pytest.fixture
def step(tmp_path):
    """Makes steps that note their runs, then do what they are given."""

    def make(name, then="", minutes=0.1):
        log = tmp_path / "log"
        code = "from pathlib import Path; import os, sys, time\n"
        code += f"with open({str(log)!r}, 'a') as log: log.write('{name} ')\n"
        code += then or "Path(sys.argv[1]).write_text('{\"value\": 7}')"
        return Step(name, "group", f"what {name} shows", minutes, ("-c", code, OUT))

    make.ran = lambda: (tmp_path / "log").read_text().split()
    return make


# -- what runs ------------------------------------------------------------------------------------


def test_a_result_of_this_commit_and_card_is_not_measured_again(step, tmp_path):
    listed, out = [step("one"), step("two")], tmp_path / "out"
    assert run(listed[:1], out, HERE, None)["measured"] == 1
    assert run(listed, out, HERE, None) == {"measured": 1, "failed": 0, "left out": 0, "done before": 1}
    assert step.ran() == ["one", "two"]
    result = read(path_of("one", out))
    assert (result.measured, result.failed, result.commit, result.hardware) == (
        {"value": 7},
        "",
        "abc",
        "a card",
    )
    others = [{"commit": "abd"}, {"hardware": "another"}, {"tiny": True}]
    assert [state(listed[0], out, replace(HERE, **other)) for other in others] == ["missing"] * 3
    assert state(listed[0], out, replace(HERE, hardware="")) == "done", "any card, where none is"
    changed = replace(HERE, commit="abc-dirty")
    run(listed[:1], out, changed, None)
    assert state(listed[0], out, changed) == "missing", "the changes may be others"
    assert run(listed[:1], out, HERE, None, again=True)["measured"] == 1


def test_a_step_that_failed_is_named_and_comes_last(step, tmp_path):
    out = tmp_path / "out"
    broken = step("broken", "Path(sys.argv[1]).write_text('{\"half\": 1}'); sys.exit('no memory')")
    silent = step("silent", "pass")
    counts = run([broken, silent], out, HERE, None)
    assert counts == {"measured": 0, "failed": 2, "left out": 0, "done before": 0}
    assert read(path_of("broken", out)).failed == "exit code 1: no memory"
    assert read(path_of("broken", out)).measured == {"half": 1}
    assert read(path_of("silent", out)).failed.startswith("it wrote no result")
    run([broken, step("next")], out, HERE, None)
    assert step.ran() == ["broken", "silent", "next", "broken"]


def test_a_step_that_takes_too_long_is_stopped(step, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "LIMIT", 0.02)
    assert run([step("slow", "time.sleep(60)", minutes=0.01)], tmp_path, HERE, None)["failed"] == 1
    assert read(path_of("slow", tmp_path)).failed == "stopped after 1 s"


def test_what_does_not_fit_is_left_out_and_shorter_steps_run(step, tmp_path, capsys):
    counts = run([step("long", minutes=3.0), step("short", minutes=0.5)], tmp_path, HERE, minutes=1.0)
    assert counts == {"measured": 1, "failed": 0, "left out": 1, "done before": 0}
    assert step.ran() == ["short"]
    assert "long: left out; of about 3 minutes 1.0 are left" in capsys.readouterr().out


def _queue(listed: list[Step], out: Path) -> subprocess.Popen:
    """The queue in a process of its own."""
    code = "import sys; from pathlib import Path; from gpu_queue.runner import run, Step; "
    code += "from gpu_queue.results import Conditions; import json; "
    code += "listed = [Step(*s) for s in json.loads(sys.argv[1])]; "
    code += f"run(listed, Path(sys.argv[2]), Conditions(*{list(vars(HERE).values())}), None)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(SOURCES)}
    return subprocess.Popen([sys.executable, "-c", code, json.dumps(listed), str(out)], env=environment)


def test_after_a_kill_the_rest_is_measured(step, tmp_path):
    """The second step kills the queue that runs it, the first time."""
    out = tmp_path / "out"
    kill = f"first = Path({str(tmp_path / 'killed')!r})\n"
    kill += "if not first.exists(): first.touch(); os.kill(os.getppid(), 9); time.sleep(9)\n"
    kill += "Path(sys.argv[1]).write_text('{}')"
    listed = [step("one"), step("two", kill), step("three")]
    assert _queue(listed, out).wait(60) == -9
    assert [path.name for path in out.iterdir()] == ["one.json"]
    assert run(listed, out, HERE, None) == {"measured": 2, "failed": 0, "left out": 0, "done before": 1}
    assert step.ran() == ["one", "two", "two", "three"]


@pytest.mark.proof
def test_a_queue_that_is_ended_ends_its_step(step, tmp_path):
    note = tmp_path / "pid"
    slow = step("slow", f"Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(60)")
    queue = _queue([slow], tmp_path / "out")
    while not (note.exists() and note.read_text()):
        time.sleep(0.05)
        assert queue.poll() is None
    queue.terminate()
    assert queue.wait(30) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)
    assert not list((tmp_path / "out").glob("*.json"))


# -- the command line -----------------------------------------------------------------------------


@pytest.fixture
def queue(step, tmp_path, monkeypatch):
    """Runs the command with three steps, in this process."""
    listed = [step("one"), step("two", "sys.exit('no memory')"), step("three")._replace(group="other")]
    monkeypatch.setattr(gpu, "steps", lambda: listed)
    monkeypatch.setattr(gpu, "commit", lambda: "abc")
    return lambda *words: gpu.main([*words, "--out", str(tmp_path / "out")])


def test_list_says_what_is_done_and_why_a_step_failed(queue, capsys):
    assert queue("run", "--tiny", "group") == 1
    assert capsys.readouterr().out.endswith("1 measured, 1 failed, 0 left out, 0 done before\n")
    assert queue("list", "--tiny") == 0
    one, two, three, last = capsys.readouterr().out.splitlines()
    assert one.startswith("done")
    assert two.endswith("two: what two shows (exit code 1: no memory)")
    assert three.startswith("missing")
    assert last == "1 done, 2 to run in about 0.2 min"
    assert queue("run", "--tiny", "three") == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list", "four"], "four: no such step or group"),
        pytest.param(
            ["run"],
            "no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure"),
        ),
        (["page"], "has no results"),
    ],
)
def test_a_mistake_is_one_line(queue, capsys, words, said):
    assert queue(*words) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1


def test_a_damaged_result_is_refused(queue, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "one.json").write_text('{"step": "one"}')
    assert queue("list") == 2
    assert "no result of a step (no measured); remove it" in capsys.readouterr().err


def test_the_page_has_every_result_with_its_commit_and_card(queue, tmp_path, capsys):
    queue("run", "--tiny")
    assert queue("page") == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "commit abc, at a tiny size" in text
    assert [line for line in text.splitlines() if line.startswith("### ")] == [
        "### one",
        "### two",
        "### three",
    ]
    assert "- value: 7" in text
    assert "FAILED: exit code 1: no memory" in text


def test_synthetic_speeds_are_marked_on_the_page():
    parts = dict.fromkeys(
        ("round_ms", "draft_ms", "verify_over_plain", "host_ms", "reads", "speedup", "tau"), 1.0
    )
    row = {"decode": "plain", "passes": "captured", "tokens_per_second": 50.0, "draft_share": 0.25, **parts}
    row |= {"operations": 355.0, "kernels": None, "kernels_ms": None}
    drafted = row | {"decode": "chain-3", "synthetic": [0.5], "differ": 1, "strayed": 0}
    card = {"what": "rounds", "rows": [row, drafted], "like": "a/b", "drafter": "Eagle", "dtype": "bfloat16"}
    card |= {"temperature": 0.0, "bound_ms": 4.0, "copy_bytes": 4e12, "prompts": 2}
    result = Result("r", "decoding", "what", [], "abc", "card", False, "2", 1.0, "", card)
    text = page([result])
    assert "| chain-3 SYNTHETIC |" in text
    assert "SYNTHETIC: drafts are accepted at the rates [0.5]" in text
    assert "a plain round takes 5.00 times that" in text


# -- the steps ------------------------------------------------------------------------------------


def test_steps_are_in_order_of_value_and_none_is_too_long():
    names = [step.name for step in steps()]
    assert len(set(names)) == len(names)
    assert list(dict.fromkeys(step.group for step in steps())) == [
        "tests",
        "decoding",
        "training",
        "context",
        "field",
    ]
    assert all(0 < step.minutes <= LIMIT for step in steps())
    assert all(OUT in "".join(step.words) for step in steps())


SHOWN = [step for step in steps() if step.group != "field" or step.name in ("field-eagle", "field-hf_dllm")]


@pytest.mark.parametrize("tiny", [False, True], ids=["whole", "tiny"])
@pytest.mark.parametrize("shown", SHOWN, ids=lambda step: step.name)
def test_the_command_of_a_step_composes(shown, tiny):
    script, name, *words = shown.command("result.json", tiny)
    assert (ROOT / script).exists()
    assert compose(words, CONF, f"lab/{name}").out == "result.json"


# -- a folder for a machine without a network -----------------------------------------------------


@pytest.fixture
def clean(monkeypatch):
    """A commit without changes, and few wheels."""
    monkeypatch.setattr(packing, "commit", lambda: "0123abc")
    return lambda folder, **more: pack(folder, carried=("omegaconf", "antlr4-python3-runtime"), **more)


@pytest.mark.proof
def test_a_packed_folder_lists_and_measures_with_its_own_sources(clean, tmp_path):
    folder, out = tmp_path / "packed", tmp_path / "out"
    size = clean(folder)
    assert size == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= packing.MOST
    assert not (folder / "docs").exists()
    environment = os.environ | {"PYTHONPATH": str(folder / "src")}

    def gpu_py(*words):
        command = [sys.executable, "scripts/gpu.py", *words, "--out", str(out), "--tiny", "rounds-smollm2"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert gpu_py("list").startswith("missing")
    gpu_py("run")
    result = read(out / "rounds-smollm2.json")
    assert (result.commit, result.measured["commit"]) == ("0123abc", "0123abc")
    assert [bool(row.get("synthetic")) for row in result.measured["rows"]] == [False, True, True]


def test_a_folder_that_is_too_large_is_refused_and_removed(clean, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "MOST", 2**20)
    with pytest.raises(ValueError, match=r"pack: \d+\.\d MiB, more than 1 \(data 2\d\.\d, ") as raised:
        clean(tmp_path / "packed")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "packed").exists()


def test_what_cannot_be_packed_is_refused(clean, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for folder, more, said in (
        (tmp_path / "full", {}, "is not an empty folder"),
        (tmp_path / "new", {"files": [tmp_path / "none.whl"]}, "is no wheel file"),
        (tmp_path / "new", {"also": ["no-such-package"]}, "no-such-package: is not installed"),
        (tmp_path / "new", {"also": ["tokenizers"]}, "tokenizers: has compiled code"),
    ):
        with pytest.raises(ValueError, match=said):
            clean(folder, **more)
    monkeypatch.setattr(packing, "commit", lambda: "abc-dirty")
    with pytest.raises(ValueError, match="commit them first"):
        clean(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_given_wheel_replaces_the_one_that_would_be_made(clean, tmp_path):
    given = tmp_path / "omegaconf-9.9-py3-none-any.whl"
    given.write_bytes(b"")
    clean(tmp_path / "packed", files=[given])
    wheels = [path.name.split("-")[:2] for path in sorted((tmp_path / "packed" / "wheels").iterdir())]
    assert wheels[1] == ["omegaconf", "9.9"]
    assert wheels[0][0] == "antlr4_python3_runtime"


def test_the_environment_is_made_of_the_wheels_without_an_index(tmp_path):
    """It runs the command with the packages of the wheels and the folder's sources."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel_of("omegaconf", wheels)
    (tmp_path / SCRIPT).write_text(packing.ENVIRONMENT)
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["omegaconf>=2", "no-such-package"]\n'
    )
    environment = os.environ | {"PYTHON": sys.executable, "PIP_INDEX_URL": "http://127.0.0.1:9"}
    environment["PYTHONPATH"] = str(ROOT / "scripts" / "lab")
    for said in ("no-such-package: is missing, foredraft requires it\n", ""):  # installed once
        command = [
            "sh",
            str(tmp_path / SCRIPT),
            sys.executable,
            "-c",
            "import omegaconf; print(omegaconf.__file__)",
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{tmp_path}/.packages/omegaconf/")
        assert done.stderr == said


def test_an_environment_that_lacks_something_is_told_what():
    assert lacking(["pytest>=1", "no-such-package>=2; python_version > '3'"]) == [
        "no-such-package: is missing, foredraft requires it"
    ]
    assert lacking(["no-such-package; extra == 'dev'"]) == []
    (line,) = lacking(["packaging>=9999"])
    assert line.endswith("foredraft requires >=9999")


def test_a_copy_without_history_knows_its_commit(tmp_path, monkeypatch):
    (tmp_path / provenance.PACKED).write_text("0123abc\n")
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.commit() == "0123abc"
