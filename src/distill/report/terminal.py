"""The end of a run: one table, where everything is, and what to try next."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from decode.errors import UserError
from distill.report.tables import by_setting, by_step, headline, table
from distill.utils.progress import first_rank, lively, say
from distill.utils.run_folder import REPORT, best, cards
from drafters.export import formats as programs

# Dropped in this order where a terminal is too narrow for all; the report and score.json have them.
OPTIONAL = ("other", "verify", "draft", "s_5", "s_4", "s_3", "s_2", "s_1", "batch", "replay", "T")


def show(folder: Path) -> None:
    """The run's table: drawn on a terminal, as plain text elsewhere; the numbers are the same."""
    found = cards(folder)
    if not (first_rank() and found and lively() and sys.stdout.isatty()):
        say(table(folder))
        return
    console, last = Console(highlight=False, markup=False, emoji=False), found[-1]
    console.print(Text(headline(last)), style="dim")
    console.print(drawn(*by_step(found), width=console.width))
    if len(last["rows"]) > 1:
        console.print(drawn(*by_setting(last), width=console.width))


def drawn(head: Sequence[str], lines: Sequence[Sequence[str]], width: int) -> Table:
    """A table of as many columns as there is room for."""
    kept = list(range(len(head)))
    for name in OPTIONAL:
        needed = sum(3 + max(len(row[i]) for row in [head, *lines]) for i in kept) + 1
        if needed > width and name in head:
            kept.remove(head.index(name))
    made = Table()
    for i in kept:
        made.add_column(
            head[i], justify="left" if head[i] == "decode" else "right", no_wrap=head[i] != "decode"
        )
    for line in lines:
        made.add_row(*(_cell(line[i]) for i in kept))
    return made


def _cell(text: str) -> Text:
    return Text(text, style={"pass": "green", "FAIL": "bold red"}.get(text, ""))


def places(folder: Path) -> None:
    """Say where what was made is, and which commands go on from there."""
    checkpoint = best(folder) and folder / "checkpoints" / "best"
    if checkpoint is None:
        return
    kind = cards(folder)[-1]["drafter"]
    where = {"run": folder, "report": folder / REPORT, "best": checkpoint}
    say("\nwritten:\n" + "\n".join(f"  {name}: {path}" for name, path in where.items() if path.exists()))
    given = f"checkpoint={checkpoint}"  # which knows target and prompts
    commands = [
        ["foredraft", "score", given, "score.prompts=100"],
        ["foredraft", "generate", given, "prompt=How do I use grep?"],
        ["foredraft", "advise", given],
        ["foredraft", "export", given, f"to={_program(kind)}"],
    ]
    say("try next:\n" + "\n".join(f"  {shlex.join(words)}" for words in commands) + "\n")


def _program(kind: str) -> str:
    """One that can load the drafter."""
    try:
        programs.check(kind, "vllm")
    except UserError:
        return "native"
    return "vllm"
