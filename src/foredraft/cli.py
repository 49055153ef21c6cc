"""The command `foredraft <command> [option=value ...]`; options are in conf/."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from distill.cli.main import main as configured
from distill.cli.main import one_line_errors
from distill.utils.imports import import_uncollected
from distill.utils.launcher import started_by_rank_0
from distill.utils.paths import CONF, ROOT


class Command(NamedTuple):
    """A subcommand; its function is imported when it runs, so that `--help` is fast.

    Attributes:
        about: one line of help.
        function: "module:function" in distill.
        config: name of its configuration in conf/; empty: the function reads sys.argv itself.
        options: class in distill.options.commands that the configuration becomes; empty: the function is
            called with the configuration and a run's folder.
    """

    about: str
    function: str
    config: str = ""
    options: str = ""


COMMANDS = {
    "train": Command("train and score a drafter", "main:run", "config"),
    "make": Command(
        "time, train, export: a drafter with a serving command", "commands.making.make:make", "make"
    ),
    "generate": Command(
        "answer a prompt with a drafter", "commands.generate:answer", "generate", "GenerateOptions"
    ),
    "score": Command(
        "score a checkpoint again", "commands.score:score", "score_checkpoint", "ScoreCommandOptions"
    ),
    "export": Command(
        "write a checkpoint for vLLM, SGLang or the Hub", "export:export", "export", "ExportCommandOptions"
    ),
    "compare": Command("compare runs in a table and a page", "commands.compare:main"),
    "report": Command("write a run's report.html again", "commands.report:main"),
    "follow": Command("train on as the target is trained", "commands.follow:main"),
    "plan": Command("estimate a large run, before any or from a small one", "commands.plan:main"),
    "advise": Command(
        "find how much to draft on this machine", "commands.advise:advise", "advise", "AdviseOptions"
    ),
    "limit": Command(
        "bound what a drafter can reach on a target", "commands.limit:limits", "limit", "LimitOptions"
    ),
    "rollout": Command(
        "answer prompts without training",
        "commands.rollout:roll_out",
        "rollout_alone",
        "RolloutCommandOptions",
    ),
    "inspect": Command(
        "look at a target: what its files say, and what is read of them",
        "commands.inspect_target:inspect",
        "inspect",
        "InspectTargetOptions",
    ),
    "inspect-data": Command(
        "look at rollouts", "commands.inspect_data:inspect", "inspect_data", "InspectOptions"
    ),
    "verify-served": Command(
        "check a served drafter", "serving.verify:command", "verify_served", "VerifyOptions"
    ),
    "passport": Command(
        "write what was measured of a checkpoint, on one page",
        "commands.passport:passport",
        "passport",
        "PassportOptions",
    ),
    "watch": Command(
        "say when a served drafter accepts less than scored", "serving.watch:command", "watch", "WatchOptions"
    ),
}
# Other options where an engine is named: `foredraft advise engine=vllm ...`
IN_ENGINES = {
    "advise": Command(
        "find how much to draft in an engine",
        "commands.advise_engine:advise",
        "advise_engine",
        "AdviseEngineOptions",
    )
}


def main() -> None:
    """Run the subcommand; an unknown one prints one line and exits with code 2."""
    if started_by_rank_0():
        run("train", sys.argv[1:])  # Lightning starts the other ranks with only the options
        return
    word, *arguments = sys.argv[1:] or ["--help"]
    if word in ("-h", "--help", "--version"):
        with one_line_errors():
            print(usage() if word != "--version" else f"foredraft {version('foredraft')}")
    elif word in COMMANDS:
        run(word, arguments)
    else:
        close = difflib.get_close_matches(word, COMMANDS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        print(f"error: foredraft {word}: {hint}choose one of {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)


def command_of(word: str, arguments: Sequence[str]) -> Command:
    """The command of a word of COMMANDS, which may depend on its options."""
    in_engine = any(argument.startswith("engine=") for argument in arguments)
    return IN_ENGINES[word] if in_engine and word in IN_ENGINES else COMMANDS[word]


def run(word: str, arguments: Sequence[str]) -> None:
    """Run one of COMMANDS with these arguments."""
    command = command_of(word, arguments)
    sys.argv = [sys.argv[0], *arguments]

    def call(*args: Any) -> Any:
        module, _, function = command.function.partition(":")
        return getattr(import_uncollected(f"distill.{module}"), function)(*args)

    def without_folder(cfg: DictConfig, folder: Path) -> float:
        del folder  # only training makes a run folder
        read = import_uncollected("distill.config.read")  # imports torch, for which `--help` does not wait
        options = import_uncollected("distill.options.commands")
        return call(read.checked_options(getattr(options, command.options), cfg))

    if command.config:
        configured(without_folder if command.options else call, CONF, command.config)
    else:
        with one_line_errors():
            call()


def usage() -> str:
    """Subcommands with a line of help each."""
    width = max(map(len, COMMANDS))
    lines = [f"  {word:{width}}  {command.about}" for word, command in COMMANDS.items()]
    start = ROOT / "docs" / "start.md"
    more = f"foredraft <command> --help lists its options; {start} goes step by step."
    return "\n".join(["usage: foredraft <command> [option=value ...]", "", *lines, "", more])


if __name__ == "__main__":
    main()
