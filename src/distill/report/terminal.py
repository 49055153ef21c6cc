"""End of a run: table of scores, paths of the written files, and next commands."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from decode.evaluation.scorecard import Scorecard, read_scorecard
from decode.hardware import hardware
from decode.kernels.half_products import HALF
from decode.model.compiled_forward import missing_compiler
from distill.report.bottleneck import bottleneck
from distill.scoring.run_scorecards import scorecards
from distill.scoring.tables import (
    INTERVAL,
    LEVEL_NAMES,
    best_card,
    by_setting,
    by_step,
    deeper,
    headline,
    table,
)
from distill.utils.atomic_files import read_json
from distill.utils.progress import bars_visible, first_rank, say
from distill.utils.run_folder import REPORT, best
from distill.utils.run_record import read_options
from drafters.export.formats import NATIVE
from drafters.export.layout import FILES

# Dropped in this order if the terminal is too narrow; the report and score.json contain them.
OPTIONAL = ("other", "verify", "draft", *reversed(LEVEL_NAMES), "batch", "tau_decoded", INTERVAL, "T")


def show(folder: Path) -> None:
    """Print the run's table: a rich table on a terminal, plain text elsewhere."""
    by_checkpoint = scorecards(folder)
    cards = list(by_checkpoint.values())
    if not (first_rank() and cards and bars_visible() and sys.stdout.isatty()):
        say(table(folder))
        _print_bottleneck(folder, by_checkpoint)
        return
    console = Console(highlight=False, markup=False, emoji=False)
    top = best_card(folder, by_checkpoint)
    console.print(Text(f"headline of step {top.checkpoint.step}: {headline(top)}"))
    console.print(fitted(*by_step(cards), width=console.width))
    if len(top.rows) > 1:
        console.print(fitted(*by_setting(top), width=console.width))
    if note := deeper(top):
        say(note)
    _print_bottleneck(folder, by_checkpoint)


def _print_bottleneck(folder: Path, cards: Mapping[int, Scorecard]) -> None:
    """Print one line about the best checkpoint."""
    checkpoint = best(folder)
    card = cards.get(int(checkpoint.name)) if checkpoint else None
    if card and (line := bottleneck(card)):
        say(line)


def fitted(head: Sequence[str], lines: Sequence[Sequence[str]], width: int) -> Table:
    """Build a rich table with as many columns as fit."""
    columns = list(range(len(head)))
    for name in OPTIONAL:
        total = sum(3 + max(len(row[i]) for row in [head, *lines]) for i in columns) + 1
        if total > width and name in head:
            columns.remove(head.index(name))
    rendered = Table()
    for i in columns:
        rendered.add_column(
            head[i], justify="left" if head[i] == "decode" else "right", no_wrap=head[i] != "decode"
        )
    for line in lines:
        rendered.add_row(*(_cell(line[i]) for i in columns))
    return rendered


def _cell(text: str) -> Text:
    return Text(text, style={"pass": "green", "FAIL": "bold red"}.get(text, ""))


def places(folder: Path) -> None:
    """Print the paths of the run's files, and next commands."""
    checkpoint = best(folder) and folder / "checkpoints" / "best"
    if checkpoint is None:
        return
    paths = {"run": folder, "report": folder / REPORT, "best": checkpoint}
    say("\nwritten:\n" + "\n".join(f"  {name}: {path}" for name, path in paths.items() if path.exists()))
    argument = f"checkpoint={checkpoint}"  # commands read target and prompts from its run
    commands = [
        ["foredraft", "score", argument, "score.prompts=100"],
        ["foredraft", "generate", argument, f"prompt={_example(folder)}"],
        ["foredraft", "advise", argument],
        ["foredraft", "export", argument, f"to={_program(checkpoint)}"],
    ]
    card = read_scorecard(checkpoint / "score.json") if (checkpoint / "score.json").exists() else None
    if card and _compiles(card):
        commands.insert(1, ["foredraft", "score", argument, "target.compile=true", "target.capture=true"])
    if card and card.conditions.elsewhere:  # an engine decodes the target
        commands = [[*commands[0], "decode=chain"], commands[-1]]
    say("try next:\n" + "\n".join(f"  {shlex.join(words)}" for words in commands) + "\n")


def _compiles(card: Scorecard) -> bool:
    """Whether compiled rounds may be faster on this machine than what was scored; in fp32 they are not."""
    timing, known, cpu = card.compared.timing, card.conditions, torch.device("cpu")
    if timing is None or timing.passes != "uncompiled" or getattr(torch, known.dtype) not in HALF:
        return False
    return known.hardware == hardware(cpu) and not missing_compiler(cpu)


def _example(folder: Path) -> str:
    """Example prompt for the run's target; without a chat template, a text to continue."""
    options = read_options(folder)
    template = options.values.get("prompts", {}).get("template") if options else None
    return "Once upon a time" if template == "none" else "How do I use grep?"


def _program(checkpoint: Path) -> str:
    """Name of a program that can serve the drafter, as recorded in the checkpoint."""
    config = read_json(checkpoint / FILES[0], "score the checkpoint of another step") or {}
    return next(iter(config.get("exports", [])), NATIVE)
