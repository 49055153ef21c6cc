"""The share of a server's requests that gains from drafting, from a log of their lengths.

Each line of the log is a JSON object:

    {"prompt_tokens": 812, "completion_tokens": 96, "start": 1764430000.2, "end": 1764430004.9}

`usage` of OpenAI's protocol may hold both counts. `start` and `end` (seconds, or ISO 8601) give the number of
requests that ran at the same time; `concurrency` states it. Without either, it is 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from decode.errors import UserError
from distill.engine_costs.costs import PAYS, EngineCosts


class LoggedRequest(NamedTuple):
    """Lengths in tokens of a request, and how many ran at the same time, itself included, in the mean."""

    prompt: int
    answer: int
    concurrency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficForecast:
    """What a server with drafts of one length would do with the logged requests.

    Attributes:
        length: draft length with the least time in all; 0: plain decoding.
        requests: number of requests.
        gaining: share of requests whose time falls by a factor of `PAYS` or more.
        losing: share of requests whose time grows.
        speedup: time of all requests, plain over drafted, prompts included.
        beyond: requests whose concurrency exceeds the largest timed batch; they cost as much as it.
    """

    length: int
    requests: int
    gaining: float
    losing: float
    speedup: float
    beyond: int


def read_log(path: Path) -> list[LoggedRequest]:
    """Read a log.

    Raises:
        UserError: no file, an unreadable line, times of only some requests, or no request with an answer.
    """
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"traffic={path}: {error}") from None
    found = [_read(line, f"traffic={path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError(f"traffic={path}: has no requests")
    timed = [one for one in found if one[3] is not None]
    if timed and len(timed) < len(found):
        raise UserError(
            f"traffic={path}: {len(found) - len(timed)} of {len(found)} lines have no start and end"
        )
    running = _concurrency([one[3] for one in found if one[3]]) if timed else [one[2] for one in found]
    return [LoggedRequest(one[0], one[1], count) for one, count in zip(found, running, strict=True)]


Line = tuple[int, int, float, tuple[float, float] | None]  # prompt, answer, concurrency, start and end


def _read(line: str, where: str) -> Line:
    try:
        values: Any = json.loads(line)
        counts = values | (values.get("usage") or {})
        prompt, answer = (int(counts[name]) for name in ("prompt_tokens", "completion_tokens"))
        concurrency = float(values.get("concurrency", 1.0))
        span = None
        if "start" in values or "end" in values:
            span = _seconds(values["start"]), _seconds(values["end"])
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise UserError(
            f"{where}: not a request ({str(error)[:80]}); write "
            '{"prompt_tokens": 812, "completion_tokens": 96}, and start and end or concurrency'
        ) from None
    numbers = [prompt, answer, concurrency, *(span or ())]
    if not all(map(math.isfinite, numbers)) or prompt < 1 or answer < 1 or concurrency < 1:
        raise UserError(f"{where}: lengths and concurrency must be 1 or more")
    if span and span[0] > span[1]:
        raise UserError(f"{where}: ends before it starts")
    return prompt, answer, concurrency, span


def _seconds(value: Any) -> float:
    return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else float(value)


def _concurrency(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Number of requests that run, in the mean over each request's time, itself included."""
    starts, ends = np.array(spans).T
    at = np.unique(np.concatenate([starts, ends]))  # moments at which the number changes
    running = np.searchsorted(np.sort(starts), at, side="right")
    running -= np.searchsorted(np.sort(ends), at, side="right")
    area = np.concatenate(
        [[0.0], np.cumsum(running[:-1] * np.diff(at))]
    )  # request seconds before each moment
    first, last = np.searchsorted(at, starts), np.searchsorted(at, ends)
    lasting = np.maximum(ends - starts, np.finfo(float).tiny)
    return np.maximum((area[last] - area[first]) / lasting, 1.0).tolist()


def forecast(
    log: Sequence[LoggedRequest], costs: Sequence[EngineCosts], survival: Sequence[float]
) -> TrafficForecast:
    """Predict the time of every request, with and without drafts, linear in the batch size.

    Args:
        log: the requests.
        costs: one for each timed batch size.
        survival: P(at least j drafted tokens are accepted), j from 1.
    """
    costs = sorted(costs, key=lambda one: one.batch_size)
    sizes = [one.batch_size for one in costs]
    prompts, answers, running = (np.array(column, float) for column in zip(*log, strict=True))
    plain = prompts * np.interp(running, sizes, [one.prefill for one in costs])
    plain += (answers - 1) * np.interp(running, sizes, [one.plain for one in costs])

    def drafted(length: int) -> np.ndarray:
        if not length:
            return plain
        seconds = prompts * np.interp(running, sizes, [one.drafted_prefill for one in costs])
        rounds = np.interp(running, sizes, [one.round_seconds(length) for one in costs])
        return seconds + (answers - 1) / (1 + sum(survival[:length])) * rounds

    length = min(costs[0].choices(survival), key=lambda k: (drafted(k).sum(), k))
    gain = plain / drafted(length)
    return TrafficForecast(
        length=length,
        requests=len(log),
        gaining=float((gain >= PAYS).mean()),
        losing=float((gain < 1).mean()),
        speedup=float(plain.sum() / drafted(length).sum()),
        beyond=int((running > sizes[-1]).sum()),
    )
