"""The time that answers take: measured round by round in a sample, and forecast for full batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from distill.commands.rollout import Work, answer
from distill.engines.base import Answer, Ended, Engine, Request, SamplingParams
from distill.engines.engine_target import EngineTarget
from distill.options.commands import RolloutCommandOptions
from distill.prompts.prompt import Prompt
from distill.rollouts.build import in_process
from distill.rollouts.writer import Writer

SMALL = 8  # answers of the first batch
WARM = 4  # tokens of the answers before those that are timed: the first pass prepares the weights


@dataclass(frozen=True, kw_only=True)
class AnswerSpeed:
    """What answers cost, measured in a sample.

    A batch takes `prompt` for each answer, and for each of its rounds `step` and `row` for each answer that
    has not ended.

    Attributes:
        answers: in the sample.
        start: seconds to read the prompts, load the target and start what answers.
        prompt: seconds to read a prompt.
        step: seconds of a round, for any number of answers.
        row: seconds of an answer in a round.
        rounds: of an answer, on average; 0 where only whole answers were timed, and `prompt` has their time.
        longest: rounds of the longest answer.
    """

    answers: int
    start: float
    prompt: float
    step: float = 0.0
    row: float = 0.0
    rounds: float = 0.0
    longest: float = 0.0

    def seconds(self, answers: int, shard: int, batch: int) -> float:
        """Forecast for a number of answers, start included.

        Args:
            answers: to be made.
            shard: answers of a shard, which are made together.
            batch: answers that are decoded at a time; others join as these end.
        """
        whole, rest = divmod(answers, max(1, shard))
        return self.start + whole * self._shard(max(1, shard), batch) + self._shard(rest, batch)

    def said(self, batch: int) -> str:
        """The time of an answer in a full batch."""
        return f"{self._shard(batch, batch) / batch:.3g} s an answer, {batch} at a time"

    def _shard(self, answers: int, batch: int) -> float:
        if not answers:
            return 0.0
        full = max(0.0, answers / batch - 1) * self.rounds  # rounds in which answers wait
        return answers * (self.prompt + self.row * self.rounds) + self.step * (full + self.longest)


@dataclass(frozen=True)
class _Call:
    """One batch: seconds of its prefill and of each round, and tokens of its answers."""

    times: list[float]
    lengths: list[int]


class _Timed:
    """An engine whose rounds are timed.

    Args:
        engine: decodes in this process.
        clock: seconds.

    Attributes:
        calls: batches so far.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self.engine, self.clock = engine, clock
        self.context, self.begins = engine.context, engine.begins
        self.calls: list[_Call] = []

    def __call__(
        self, requests: Sequence[Request], params: SamplingParams, ended: Ended | None = None
    ) -> list[Answer]:
        """See `Engine`."""
        del ended
        marks = [self.clock()]
        answers = self.engine(requests, params, lambda _: marks.append(self.clock()))
        times = [after - before for before, after in pairwise(marks)]
        self.calls.append(_Call(times, [len(one.tokens) for one in answers]))
        return answers


def measure(
    options: RolloutCommandOptions, work: Work, begun: float, clock: Callable[[], float]
) -> AnswerSpeed:
    """Answer the prompts of a sample, and time it.

    Args:
        options: of the sample.
        work: from `read_work`.
        begun: time of the clock before `read_work`.
        clock: seconds.

    Raises:
        UserError: see `roll_out`.
    """
    prompts, plan = work.inputs.train, work.plan
    if options.rollout.engine != "hf" or isinstance(work.target, EngineTarget):
        before, started = clock(), work.target.starting_seconds
        answer(options, work)
        started = work.target.starting_seconds - started
        each = (clock() - before - started) / len(prompts)
        return AnswerSpeed(answers=len(prompts), start=before - begun + started, prompt=each)
    engine = in_process(options, work.target, work.chat, plan, options.rollout.drafter)
    Writer(engine, work.chat, replace(plan, max_new_tokens=min(WARM, plan.max_new_tokens)))(0, prompts[:1], 0)
    timed, start = _Timed(engine, clock), clock() - begun
    write = Writer(timed, work.chat, plan)
    for batch in _batches(prompts, plan.batch_size):
        write(0, batch, 0)
    return _fitted(timed.calls, len(prompts), start)


def _batches(prompts: list[Prompt], most: int) -> Iterator[list[Prompt]]:
    """A small batch and larger ones, since costs of a round and of a row differ only between sizes.

    No batch is larger than `most`, so no answer joins another batch.
    """
    small = min(SMALL, most, len(prompts))
    yield prompts[:small]
    for first in range(small, len(prompts), most):
        yield prompts[first : first + most]


def _fitted(calls: Sequence[_Call], answers: int, start: float) -> AnswerSpeed:
    """The costs that explain the rounds of a sample best."""
    prefills = sum(call.times[0] for call in calls)
    running, times, rounds, longest = [], [], [], 0.0
    for call in calls:
        # A round settles more than one token of an answer where a drafter helps.
        most = max(call.lengths) - 1
        share = (len(call.times) - 1) / most if most > 0 else 0.0
        lengths = np.array([(length - 1) * share for length in call.lengths])
        for number, seconds in enumerate(call.times[1:]):
            running.append((1.0, float((lengths > number).sum())))
            times.append(seconds)
        rounds += lengths.tolist()
        longest = max(longest, float(lengths.max()))
    step, row = _costs(np.array(running), np.array(times)) if times else (0.0, 0.0)
    each = sum(rounds) / answers
    return AnswerSpeed(
        answers=answers,
        start=start,
        prompt=prefills / answers,
        step=step,
        row=row,
        rounds=each,
        longest=longest,
    )


def _costs(running: np.ndarray, times: np.ndarray) -> tuple[float, float]:
    """Seconds of a round and of a row in it, neither below 0, by least squares."""
    step, row = np.linalg.lstsq(running, times, rcond=None)[0].tolist()
    if step < 0 or row < 0:  # one of them explains all of the time
        rows = running[:, 1].sum()
        return (0.0, float(times.sum() / rows)) if step < 0 and rows else (float(times.mean()), 0.0)
    return step, row
