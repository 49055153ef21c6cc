"""Write the chosen checkpoint in the shipped formats, with commands that draft as many tokens as pay."""

from __future__ import annotations

import shlex
from pathlib import Path

from distill import export
from distill.commands.making.record import MakeRecord
from distill.config.build import TargetSource
from distill.engine_costs import in_llama_cpp, in_vllm
from distill.options.run import TrainOptions
from distill.scoring.compare import scorecard
from drafters.checkpoint import passport
from drafters.checkpoint.folder import read_config, target_origin
from drafters.export.formats import GGUF, NATIVE
from drafters.export.llama_cpp import file as gguf_file

TARGET = "-m"  # flag of llama-server
COMMANDS = {"vllm": "vllm serve", GGUF: "llama-server"}  # beginnings of commands that say how much is drafted
CARD = "README.md"


def ship(checkpoint: Path, options: TrainOptions, record: MakeRecord, folder: Path) -> None:
    """Write passport and formats; adds the commands to the record.

    Args:
        checkpoint: scored folder.
        options: of the training run; `export` names the formats.
        record: has the draft lengths.
        folder: of the run.

    Raises:
        UserError: see `export.write` and `export.push`.
    """
    config = read_config(checkpoint)
    passport.write(checkpoint, scorecard(checkpoint), config["drafter"], target_origin(checkpoint))
    target = TargetSource(options.target).load(decodes=False)
    push_to = options.export.push_to
    for to in options.export.programs:
        out = folder / "export" / f"{checkpoint.name}-{to}"
        if not out.is_dir():
            command = export.write(checkpoint, target, to, out, push_to, options.export)
            if to == GGUF and command:
                command = _of_file(command, gguf_file.target_file(options.export.target_gguf, target))
            if to in record.engines:
                _set_length(out / CARD, to, record.engines[to].length)
            record.commands[to] = command
            record.write()
        if push_to:
            export.push(out, push_to, options.export.private, options.export.dry_run)
    for to, command in record.commands.items():
        if to in record.engines:
            record.commands[to] = with_length(to, command, record.engines[to].length)


def with_length(to: str, command: str, length: int) -> str:
    """A serving command whose drafts have `length` tokens.

    Args:
        to: format.
        command: as the export gives it.
        length: tokens of a draft; 0: the command stays as it is.
    """
    if not (length and command):
        return command
    if to == "vllm":
        return in_vllm.with_length(command, length)
    if to == GGUF:
        return in_llama_cpp.with_length(command, length)
    return f"{command} decode=chain decode.depth={length}" if to == NATIVE else command


def _set_length(card: Path, to: str, length: int) -> None:
    """Give the serving command of a model card the length that pays; 0: the card stays as it is."""
    start = COMMANDS.get(to)
    if start and length:
        lines = card.read_text().splitlines(keepends=True)
        commands = {line for line in lines if line.startswith(f"    {start} ")}
        lines = [f"    {with_length(to, one.strip(), length)}\n" if one in commands else one for one in lines]
        card.write_text("".join(lines))


def _of_file(command: str, file: Path) -> str:
    """A `llama-server` command with the target's file."""
    words = shlex.split(command)
    words[words.index(TARGET) + 1] = str(file)
    return shlex.join(words)
