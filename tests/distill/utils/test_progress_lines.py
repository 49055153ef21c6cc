"""Progress without a terminal: lines in a log, in every phase, with rate and time left."""

import ast
import logging
import re
import sys
import time

import pytest
from workbench import ROOT, Bench, foredraft

from decode.errors import UserError
from decode.model.load import load_target
from distill.datastore.build import make_datastore
from distill.utils import progress
from distill.utils.progress import bar
from distill.utils.progress_lines import SECONDS, VARIABLE, Lines, State, duration, every


@pytest.fixture
def lines(monkeypatch):
    """All lines: with an interval of no seconds, each update writes one."""
    monkeypatch.setattr(progress, "_lines", Lines())  # without bars that other tests left open
    monkeypatch.setenv(VARIABLE, "0")
    monkeypatch.setitem(progress.switch, "on", True)


def test_each_phase_of_a_run_and_its_commands_writes_lines(tmp_path, lines, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bench = Bench(tmp_path)
    capfd.readouterr()  # transformers draws a bar there
    done = bench.train("taps=memory", "export.to=vllm").succeeded()
    checkpoint = f"checkpoint={done.folder / 'checkpoints' / 'best'}"
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("say it again " * 50)
    make_datastore(str(texts), load_target(str(bench.target)))
    size = ["score.prompts=2", "score.max_new_tokens=4", "repeats=1", "batch_sizes=[1]", "chains=2"]
    size += ["trees=[]"]
    advised = foredraft("advise", checkpoint, *size, f"out={tmp_path / 'advice.json'}").succeeded()
    log = done.err + capfd.readouterr().err + advised.err
    for phase in (
        r"prompts 12/12, [\d.,]+ a second",
        r"loading target \S+, since",
        r"rollouts [1-9]\d*/12 answers, .* a second",
        r"held-out answers at T=0: 4/4 answers, ",
        r"taps 12/12 rows, ",
        r"training 3/6 steps, .* left, loss \d",
        r"scoring step 3: [1-9]\d*/\d+ batches, ",
        r"checkpoint 3, since",
        r"report\.html, since",
        r"export to \S+, since",
        r"datastore: reading \d+ tokens",
        r"datastore: sorting \d+/\d+ tokens",
        r"replaying \S+ T=0: \S+ answers, ",
        r"timing \S+ T=0: \S+ rounds, ",
    ):
        assert re.search(f"^{phase}", log, re.MULTILINE), f"{phase}\n{log}"
    assert not re.search(r"[\r\x1b]", log + done.out + advised.out)
    assert not re.search(r"^(training|rollouts|taps) \d+/", done.out, re.MULTILINE)


def test_nothing_is_written_before_it_is_time_and_where_progress_is_off(capfd, monkeypatch, lines):
    monkeypatch.setitem(progress.switch, "on", False)
    with bar(4, "training", "steps") as shown:
        shown.update()
    monkeypatch.setitem(progress.switch, "on", True)
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(progress._lines, "_last", time.monotonic())
    with bar(4, "training", "steps") as shown:
        shown.update()
    assert capfd.readouterr() == ("", "")


def test_task_that_does_not_move_is_written_too(capfd, monkeypatch, lines):
    monkeypatch.setenv(VARIABLE, "0.01")
    with bar(1, "loading target x", "", leave=False):
        written = ""
        while written.count("loading target x, since") < 2:
            time.sleep(0.05)
            written += capfd.readouterr().err


def test_line_goes_to_a_handler_that_takes_it_and_is_not_printed_twice(capfd, caplog, lines):
    with caplog.at_level(logging.INFO, "foredraft"), bar(4, "training", "steps") as shown:
        shown.update(note="loss 2.0")
    assert [record.name for record in caplog.records] == ["foredraft"] * 2
    assert re.fullmatch(r"training 1/4 steps, .* left, loss 2\.0", caplog.messages[-1])
    assert capfd.readouterr().err == ""
    with bar(4, "training", "steps"):  # a handler that hears warnings alone is none
        assert "training 0/4 steps" in capfd.readouterr().err


def test_secrets_and_control_characters_are_not_written(capfd, lines):
    with bar(1, "loading target https://me:secret@host/\x1b[2J", "", leave=False):
        pass
    written = capfd.readouterr().err
    assert "secret@" not in written
    assert "\x1b" not in written


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (State("rollouts", 412, 1200, "answers", 100, 100.0, 100.0, ""), "3.1 a second, 4 min left"),
        (State("taps", 3, 9, "rows", 1, 10.0, 4.0, "x"), "2.0 s each, 30 s left, x"),
        (State("reading", 7000, 0, "tokens", 0, 1.0, 1.0, ""), "7,000.0 a second"),
    ],
)
def test_line_has_rate_and_time_left(state, line):
    assert state.line().partition(", ")[2] == line


def test_time_of_a_task_inside_another_is_no_time_of_its_steps():
    with bar(4, "training", "steps", leave=False) as outer:
        outer.update()
        with bar(1, "scoring step 1", "batches", leave=False):
            time.sleep(0.2)
        state = outer.state()
        assert state.seconds - state.worked == pytest.approx(outer.paused, abs=0.01)
        assert 0.2 <= outer.paused <= outer.state().seconds


def test_durations_are_words():
    assert [duration(s) for s in (0.26, 9.96, 119.4, 119.5, 3599, 7800)] == [
        *("0.3 s", "10 s", "119 s", "2 min", "1 h 0 min", "2 h 10 min")
    ]


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_interval_that_is_no_number_is_refused(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UserError, match=f"{VARIABLE}={text}: give the seconds"):
        every()
    monkeypatch.setenv(VARIABLE, "")
    assert every() == SECONDS


def test_notebook_gets_lines_on_its_stream(monkeypatch, lines):
    class Stream:  # of an IPython kernel: no file descriptor, no terminal
        def __init__(self):
            self.text = ""

        def isatty(self):
            return False

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stderr", stream := Stream())
    with bar(4, "training", "steps") as shown:
        shown.update(2)
    assert re.match(r"training 0/4 steps\ntraining 2/4 steps, .*\n$", stream.text)


# Who may draw: the module with the bars. Others ask it, or a log has control characters.
BARS = {"tqdm", "rich.progress", "rich.live", "rich.status", "alive_progress", "progressbar"}


def drawers(tree: ast.AST) -> set[str]:
    """Modules with bars that a module imports."""
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {name for name in names for bars in BARS if name == bars or name.startswith(f"{bars}.")}
    return found


def test_only_one_module_draws_bars():
    paths = (ROOT / "src").rglob("*.py")
    found = {
        path.relative_to(ROOT / "src").as_posix(): drawers(ast.parse(path.read_text())) for path in paths
    }
    assert [path for path, names in found.items() if names] == ["distill/utils/progress.py"]
    assert drawers(ast.parse("from rich import progress\nimport tqdm.auto")) == {"rich.progress", "tqdm.auto"}
