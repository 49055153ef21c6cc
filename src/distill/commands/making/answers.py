"""How many prompts to answer, from the speed of a sample."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from distill.commands.rollout import roll_out
from distill.config.build import PromptReader
from distill.options.commands import AcceleratorOptions, RolloutCommandOptions
from distill.options.run import TrainOptions

SAMPLE = 32  # answers that are timed


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Number of prompts for a time.

    Attributes:
        limit: prompts.limit; None: all of them.
        answers: that the training prompts get.
        seconds: that they take.
        each: seconds of an answer in the sample.
    """

    limit: int | None
    answers: int
    seconds: float
    each: float


def fit_prompts(options: TrainOptions, seconds: float, folder: Path, clock: Callable[[], float]) -> Prompts:
    """Answer a sample of the prompts, and find how many can be answered in a time.

    Args:
        options: of the training run.
        seconds: for the answers.
        folder: for the sample, which is removed.
        clock: seconds.

    Raises:
        UserError: see `roll_out`.
    """
    _, train, _ = PromptReader.of_run(options).read()
    before, sample = clock(), folder / "sample"
    roll_out(_sample(options, min(SAMPLE, len(train)), sample))
    each = (clock() - before) / max(1, min(SAMPLE, len(train)))
    shutil.rmtree(sample, ignore_errors=True)
    number = _most(options, len(train), seconds / each)
    answers = number * options.rollout.answers_each(number) + options.prompts.self
    limit = None
    if number < len(train):
        limit = _with_held_out(options, number)
    return Prompts(limit=limit, answers=answers, seconds=answers * each, each=each)


def roll_out_all(options: TrainOptions) -> None:
    """Answer the prompts of a training run, into the store that it looks for.

    Raises:
        UserError: see `roll_out`.
    """
    roll_out(_rollout(options, Path(options.output_dir) / "rollouts"))


def _most(options: TrainOptions, prompts: int, answers: float) -> int:
    """The most prompts whose answers are no more than this number; at least one."""
    room = answers - options.prompts.self
    fitting = [n for n in range(1, prompts + 1) if n * options.rollout.answers_each(n) <= room]
    return max(fitting, default=1)


def _sample(options: TrainOptions, prompts: int, stores: Path) -> RolloutCommandOptions:
    limited = replace(options.prompts, limit=_with_held_out(options, prompts), self=0)
    rollout = replace(options.rollout, samples=1, store=None)
    return replace(_rollout(options, stores), prompts=limited, rollout=rollout)


def _with_held_out(options: TrainOptions, prompts: int) -> int:
    """The limit that leaves about so many prompts for training."""
    share = 0.0 if options.prompts.heldout else options.prompts.heldout_share
    return max(1, round(prompts / (1 - share)))


def _rollout(options: TrainOptions, stores: Path) -> RolloutCommandOptions:
    return RolloutCommandOptions(
        target=options.target,
        prompts=options.prompts,
        rollout=options.rollout,
        decode=options.decode,
        seed=options.seed,
        trainer=AcceleratorOptions(accelerator=options.trainer.accelerator),
        stores=str(stores),
        max_tokens=options.max_tokens,
    )
