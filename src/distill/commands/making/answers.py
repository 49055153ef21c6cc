"""How many prompts to answer, from the speed of a sample."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from distill.commands.making.speed import AnswerSpeed, measure
from distill.commands.rollout import read_work, roll_out
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
        seconds: that they are expected to take.
        speed: what was measured.
    """

    limit: int | None
    answers: int
    seconds: float
    speed: AnswerSpeed


def fit_prompts(options: TrainOptions, seconds: float, folder: Path, clock: Callable[[], float]) -> Prompts:
    """Answer a sample of the prompts, and find how many can be answered in a time.

    Args:
        options: of the training run.
        seconds: for the answers, loading of the target included.
        folder: for the sample, which is removed.
        clock: seconds.

    Raises:
        UserError: see `roll_out`.
    """
    _, train, _ = PromptReader.of_run(options).read()
    before, sample = clock(), folder / "sample"
    sampled = _sample(options, min(SAMPLE, len(train)), sample)
    speed = measure(sampled, read_work(sampled), before, clock)
    shutil.rmtree(sample, ignore_errors=True)
    number = _most(options, len(train), seconds, speed)
    limit = None
    if number < len(train):
        limit = _with_held_out(options, number)
    answers = _answers(options, number)
    return Prompts(limit=limit, answers=answers, seconds=_seconds(options, number, speed), speed=speed)


def roll_out_all(options: TrainOptions) -> None:
    """Answer the prompts of a training run, into the store that it looks for.

    Raises:
        UserError: see `roll_out`.
    """
    roll_out(_rollout(options, Path(options.output_dir) / "rollouts"))


def _most(options: TrainOptions, prompts: int, seconds: float, speed: AnswerSpeed) -> int:
    """The most prompts that are answered in this time; at least one."""
    fitting = [n for n in range(1, prompts + 1) if _seconds(options, n, speed) <= seconds]
    return max(fitting, default=1)


def _answers(options: TrainOptions, prompts: int) -> int:
    return prompts * options.rollout.answers_each(prompts) + options.prompts.self


def _seconds(options: TrainOptions, prompts: int, speed: AnswerSpeed) -> float:
    """The forecast for so many prompts."""
    rollout = options.rollout
    shard = rollout.shard_size * rollout.answers_each(prompts)
    return speed.seconds(_answers(options, prompts), shard, rollout.batch_size)


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
