"""Time an engine with and without drafts, in turns on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from decode.errors import UserError
from decode.evaluation.estimates import MIN_SAMPLES, central_interval, ratio, resampled_sums
from distill.engine_costs.costs import EngineCosts, TimedLength
from distill.utils.progress import bar

WARM_UP = 8  # tokens answered before timing
REPEATS = 5  # timed passes of each number of tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What an engine counted while it answered.

    Attributes:
        rounds: rounds of a request, summed; the pass over a prompt is none.
        tokens: new tokens without the first of each answer, summed.
        drafted: drafted tokens, summed.
        seconds: from the first token of each answer to its last, summed.
        prompt_tokens: tokens of the prompts, summed.
        prompt_seconds: from the start of each request to its first token, summed.
    """

    rounds: float
    tokens: float
    drafted: float
    seconds: float
    prompt_tokens: float
    prompt_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What every started server is told.

    Attributes:
        command: serves target and drafter, as an export prints it; empty where no drafter's file is served.
        context: most tokens of prompt, answer and draft.
        batch: most requests at the same time.
        folder: of the logs.
        sampler: temperature and filters.
        threads: of the CPU; 0: as many as it takes.
    """

    command: str
    context: int
    batch: int
    folder: Path
    sampler: dict[str, float]
    threads: int


class Decoder(Protocol):
    """A loaded target, with or without a drafter."""

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> Counted:
        """Answer token ids side by side, each with exactly so many new tokens: no end token ends one."""
        ...

    def pass_seconds(self, prompt: Sequence[int], tokens: int) -> float:
        """Seconds of one pass over so many new tokens after a prompt."""
        ...


class TimedEngine(Protocol):
    """An engine that decodes a target plainly and with a drafter.

    Attributes:
        name: name and version, once a decoder has run.
    """

    name: str

    def plain(self) -> AbstractContextManager[Decoder]:
        """Start it without a drafter."""
        ...

    def drafting(self, length: int) -> AbstractContextManager[Decoder]:
        """Start it with drafts of `length` tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything that was timed.

    Attributes:
        engine: name and version.
        passes: number of tokens -> seconds of a pass of plain decoding over them.
        costs: by batch size.
    """

    engine: str
    passes: dict[int, float]
    costs: tuple[EngineCosts, ...]


Pairs = dict[int, list[tuple[Counted, Counted]]]  # batch size -> plain and drafted, in turns


def measure(
    engine: TimedEngine,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    batch_sizes: Sequence[int],
    passes: Sequence[int],
    tokens: int,
) -> Measured:
    """Time passes, plain rounds and rounds with drafts.

    Args:
        engine: the engine.
        prompts: token ids; repeated where a batch is larger.
        lengths: draft lengths.
        batch_sizes: numbers of requests that run side by side.
        passes: numbers of tokens of a pass.
        tokens: new tokens of each answer.

    Raises:
        UserError: the engine does not start, fails, or drafts nothing.
    """
    by_length: dict[int, Pairs] = {}
    steps = len(lengths) * len(batch_sizes) + 1
    with bar(steps, f"timing {engine.name}", "lengths", leave=False) as moving, engine.plain() as plain:
        plain.answer(prompts[:1], WARM_UP)
        seconds = {n: _pass(plain, prompts[0], n) for n in passes}
        moving.update(1)
        for length in lengths:
            by_length[length] = {}
            with engine.drafting(length) as drafted:
                drafted.answer(prompts[:1], WARM_UP)
                for batch in batch_sizes:
                    groups = _groups(prompts, batch)
                    by_length[length][batch] = [_pair(plain, drafted, group, tokens) for group in groups]
                    moving.update(1)
    return Measured(
        engine=engine.name,
        passes=seconds,
        costs=tuple(_costs(batch, {k: by_length[k][batch] for k in lengths}) for batch in batch_sizes),
    )


def _groups(prompts: Sequence[Sequence[int]], batch: int) -> list[list[Sequence[int]]]:
    """Prompts by batches that are full."""
    starts = range(0, len(prompts), batch)
    return [[prompts[(start + i) % len(prompts)] for i in range(batch)] for start in starts]


def _pair(
    plain: Decoder, drafted: Decoder, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[Counted, Counted]:
    pair = plain.answer(prompts, tokens), drafted.answer(prompts, tokens)
    if not pair[1].drafted:
        raise UserError("engine: answered and drafted nothing; its log says more")
    return pair


def _pass(plain: Decoder, prompt: Sequence[int], tokens: int) -> float:
    prompt = list(prompt) * -(-tokens // len(prompt))  # at least as long
    return float(np.median([plain.pass_seconds(prompt, tokens) for _ in range(REPEATS)]))


def _costs(batch: int, pairs: dict[int, list[tuple[Counted, Counted]]]) -> EngineCosts:
    """Costs of one batch size; a length's ratio to plain rounds is the median over its pairs."""
    plains = [plain for some in pairs.values() for plain, _ in some]
    pace = float(np.median([one.seconds / one.rounds for one in plains]))
    return EngineCosts(
        batch_size=batch,
        plain=pace,
        lengths=tuple(_timed(length, some, pace) for length, some in sorted(pairs.items())),
        prefill=float(np.median([one.prompt_seconds / one.prompt_tokens for one in plains])),
        drafted_prefill=float(
            np.median([d.prompt_seconds / d.prompt_tokens for some in pairs.values() for _, d in some])
        ),
    )


def _timed(length: int, pairs: Sequence[tuple[Counted, Counted]], pace: float) -> TimedLength:
    ratios = [(d.seconds / d.rounds) / (p.seconds / p.rounds) for p, d in pairs]
    rounds = sum(d.rounds for _, d in pairs)
    counts = np.array([(d.tokens, d.rounds, d.seconds, p.tokens, p.seconds) for p, d in pairs])

    def tau(sums: np.ndarray) -> np.ndarray:
        return ratio(sums[:, 0], sums[:, 1])

    def speedup(sums: np.ndarray) -> np.ndarray:
        return ratio(sums[:, 0] * sums[:, 4], sums[:, 2] * sums[:, 3])

    whole = counts.sum(0, keepdims=True)
    drawn = resampled_sums(list(counts.T)) if len(pairs) >= MIN_SAMPLES else None
    return TimedLength(
        length=length,
        drafted=sum(d.drafted for _, d in pairs) / rounds,
        seconds=pace * float(np.median(ratios)),
        tau=float(tau(whole)[0]),
        measured=float(speedup(whole)[0]),
        tau_interval=None if drawn is None else central_interval(tau(drawn)),
        measured_interval=None if drawn is None else central_interval(speedup(drawn)),
    )
