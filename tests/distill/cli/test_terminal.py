"""What a terminal shows, and a log does not: bars, lines above them, the table of a run."""

import io
import os
import pty
import re
import sys
import time
from contextlib import suppress

import pytest
from rich.console import Console
from workbench import CONF, fork

from decode.errors import UserError
from distill.cli.main import main
from distill.report import terminal as summary
from distill.utils import progress
from distill.utils.progress import bar, say

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(body, columns: int = 80, **environment: str) -> str:
    """Everything that `body` writes where stdout and stderr are a terminal."""
    parent, child = pty.openpty()

    def run() -> int:
        for name in ("CI", "NO_COLOR", "COLUMNS"):
            os.environ.pop(name, None)
        os.environ.update({"TERM": "xterm", "COLUMNS": str(columns)} | environment)
        os.dup2(child, 1)
        os.dup2(child, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        progress.switch["on"] = True
        body()
        sys.stdout.flush()
        return 0

    assert fork(run) == 0
    os.close(child)
    written = b""
    with suppress(OSError), os.fdopen(parent, "rb", buffering=0) as terminal:
        while part := terminal.read(65536):
            written += part
    return written.decode().replace("\r\n", "\n")


def work() -> None:
    with bar(4, "training", "steps") as outer:
        outer.update(1, "loss 2.000, 1,000 tokens/s")
        time.sleep(0.2)
        with bar(2, "scoring step 1", "batches", leave=False) as inner:
            inner.update()
        say("step 1/4  [loss] 2.0")
        outer.update(3)


def test_bars_show_count_note_and_rate_and_disappear():
    written = on_terminal(work)
    plain = CONTROL.sub("", written)
    for text in ("1/4 steps", "loss 2.000, 1,000 tokens/s", "scoring step 1", "step 1/4  [loss] 2.0\n"):
        assert text in plain
    assert plain.rstrip().endswith("training: 4/4 steps in 0:00")
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l"), "the cursor is hidden"


def test_narrow_terminal_shows_a_percentage():
    lines = CONTROL.sub("", on_terminal(work, columns=40)).replace("\r", "\n").splitlines()
    assert any(re.match(r"training 25% <\d", line) for line in lines)
    assert all(len(line) <= 40 for line in lines)


def test_only_lines_are_printed_without_a_terminal_and_in_ci(capfd):
    work()
    assert capfd.readouterr() == ("step 1/4  [loss] 2.0\n", "")
    for environment in {"CI": "true"}, {"TERM": "dumb"}:
        assert on_terminal(work, **environment) == "step 1/4  [loss] 2.0\n"


def test_error_is_one_plain_line_below_the_bars():
    def fail() -> None:
        def job(cfg, folder):
            with bar(3, "training", "steps") as shown:
                shown.update()
                raise UserError("wrong; mend it")

        sys.argv = ["x", "prompt=hi", "hydra.run.dir=."]
        with suppress(SystemExit):
            main(job, CONF, "generate")

    assert on_terminal(fail).partition("error: ")[2] == "wrong; mend it\n"


def test_forked_child_draws_no_bar():
    def body() -> None:
        with bar(2, "training", "steps") as shown:
            shown.update()
            child = os.fork()
            if not child:
                say("from the child")
                shown.update()
                os._exit(0)
            os.waitpid(child, 0)

    written = CONTROL.sub("", on_terminal(body))
    assert "from the child" in written
    assert "2/2 steps" not in written.partition("from the child")[2]


CELLS = (
    "step=800 tau=2.87 95_%=2.80..2.95 tau_decoded=3.00 s_1=0.75 s_2=0.59 s_3=0.43 s_4=0.27 s_5=- "
    "speedup=1.03x draft=32% verify=64% other=4% audit=pass"
)
ROW = dict(cell.replace("_%", " %").split("=") for cell in CELLS.split())


@pytest.mark.parametrize("width", [40, 80, 120])
def test_drawn_table_fits_and_has_the_same_cells(width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(summary.fitted(list(ROW), [list(ROW.values())], width))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    names, cells = ([cell.strip() for cell in re.split(r"[┃│]", line)[1:-1]] for line in (lines[1], lines[3]))
    shown = dict(zip(names, cells, strict=True))
    assert shown.items() <= ROW.items()
    assert {"step", "tau", "speedup", "audit"} <= shown.keys()
    assert width < 120 or shown == ROW
