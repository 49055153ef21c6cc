"""Train a drafter from Python, as the command `foredraft train` does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from decode.errors import UserError
from decode.evaluation.scorecard import Scorecard, read_scorecard
from distill.cli.main import run_here
from distill.config.run_prompts import quoted
from distill.main import run
from distill.prompts.records.messages import conversation
from distill.text_generation import Messages, Model
from distill.utils.atomic_files import put
from distill.utils.paths import CONF
from distill.utils.run_folder import best as best_of

PROGRAM = Path(__file__).with_name("__main__.py")


@dataclass(frozen=True)
class TrainedRun:
    """A finished run.

    Attributes:
        folder: of the run, with `report.html`.
        best: checkpoint with the highest tau, for `load_drafter`; None if nothing was saved.
        scorecard: of that checkpoint; None without scoring.
    """

    folder: Path
    best: Path | None
    scorecard: Scorecard | None = field(repr=False)


def train(
    *options: str,
    target: str | PathLike[str] | None = None,
    prompts: str | PathLike[str] | Sequence[str | Messages] | None = None,
    drafter: str | Mapping[str, Any] | None = None,
    objective: str | Mapping[str, Any] | None = None,
    experiment: str | None = None,
    max_steps: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    output_dir: str | PathLike[str] | None = None,
    **settings: Any,
) -> TrainedRun:
    """Train a drafter and score its checkpoints, as `foredraft train` with the same options does.

    A run that was interrupted is continued by the same call. What is not given has the command's default.

    Args:
        options: of `foredraft train --help`, as in "drafter.depth=3".
        target: the model that is to be sped up: a folder, a GGUF file, a Hub id, or a name of conf/target.
        prompts: a file, a Hub dataset, a name of conf/prompts, or a list of texts and conversations.
        drafter: a name, as in "eagle"; `foredraft train --help` lists them. Or a mapping of its options, as
            in {"name": "eagle", "depth": 3}; without a name, of the default one.
        objective: what training minimises, as in "kl"; or a mapping, as for `drafter`.
        experiment: several settings under one name, as in "quick".
        max_steps: optimizer steps.
        batch_size: rows of one micro-batch.
        seed: of rollouts, initial weights, batch order and scores.
        output_dir: the run goes to a folder in it.
        **settings: other options by their first name, as in resume="never"; a mapping gives those inside,
            as in rollout={"max_new_tokens": 64}.

    Returns:
        Folder of the run, its best checkpoint, and that one's scorecard.

    Raises:
        UserError: invalid options, before any work starts; leaves no files.
        FollowUpError: the run is whole, and a step after it failed, such as an export.
    """
    named = {
        "experiment": experiment,
        "target": _name("target", target),
        "drafter": _name("drafter", drafter),
        "objective": _name("objective", objective),
        "prompts": prompts if _is_name(prompts) else _file(prompts, Path(output_dir or "outputs")),
        "trainer.max_steps": max_steps,
        "batch_size": batch_size,
        "seed": seed,
        "output_dir": output_dir,
    }
    overrides = [line for name, value in named.items() if value is not None for line in _chosen(name, value)]
    for option in options:
        if not isinstance(option, str):
            raise UserError(
                f"train: give options as texts, as in 'trainer.max_steps=100', not {type(option).__name__}"
            )
    overrides += [line for name, value in settings.items() for line in _lines(name, value)]
    folder = run_here(run, [*overrides, *options], str(PROGRAM), CONF)
    best = best_of(folder)
    card = best / "score.json" if best else None
    return TrainedRun(folder, best, read_scorecard(card) if card and card.is_file() else None)


def _is_name(value: Any) -> bool:
    return value is None or isinstance(value, str | PathLike)


def _name(option: str, value: Any) -> Any:
    if isinstance(value, Model | PreTrainedModel):
        raise UserError(f"train: {option}: give the model's folder or Hub id; the run loads it")
    if isinstance(value, Mapping) and option != "target":
        return value
    if callable(value):
        raise UserError(
            f"train: {option}: give its name; what you wrote yourself gets one from an entry point of your "
            f"package, in the group foredraft.{option}s"
        )
    if not _is_name(value):
        example = {"target": "'data/pocket' or a folder", "drafter": "'eagle'"}.get(option, "'kl'")
        raise UserError(f"train: {option}: give a name, as in {example}, not {type(value).__name__}")
    return value


def _file(prompts: Any, root: Path) -> Path:
    """A file of prompts that were given as a list, named by its content."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise UserError(
            f"train: prompts: give a file, a Hub dataset or a list of texts, not {type(prompts).__name__}"
        )
    records = [{"messages": list(conversation(prompt))} for prompt in prompts]
    if not records:
        raise UserError("train: prompts: the list is empty")
    text = "".join(json.dumps(record) + "\n" for record in records)
    path = root / "prompts" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    put(path, text)
    return path


def _chosen(option: str, value: Any) -> list[str]:
    """Overrides of a choice: its name, or a mapping with it and its options."""
    if not isinstance(value, Mapping):
        return _lines(option, value)
    name = [f"{option}={_scalar(option, value['name'])}"] if "name" in value else []
    return name + _lines(option, {key: inner for key, inner in value.items() if key != "name"})


def _lines(name: str, value: Any) -> list[str]:
    """Overrides of an option; a mapping has one for each of its values."""
    if isinstance(value, Mapping):
        return [line for key, inner in value.items() for line in _lines(f"{name}.{key}", inner)]
    return [f"{name}={_scalar(name, value)}"]


def _scalar(name: str, value: Any) -> str:
    """A value as it is written on a command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        items = [quoted(item) if isinstance(item, str) else _scalar(name, item) for item in value]
        return f"[{','.join(items)}]"
    if not isinstance(value, str | PathLike | int | float):
        raise UserError(f"train: {name}={value!r}: give a text, a number, a list or a mapping"[:200])
    return str(value)
