"""Asking a server again, as long as there is hope: exponential back-off with jitter, and an end to it."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from typing import TypeVar

from decode.errors import UserError
from distill.utils.progress import say

FIRST, LONGEST = 0.5, 10.0  # seconds between attempts, which double from the first to the longest
T = TypeVar("T")


class PassingError(Exception):
    """A failure that may be over the next time.

    Args:
        reason: as a line for people.
        broken: the server was there, and failed; else it was away, or busy.
        wait: seconds that it asked to be left alone for.
    """

    def __init__(self, reason: str, broken: bool = False, wait: float | None = None) -> None:
        super().__init__(reason)
        self.broken, self.wait = broken, wait


class Patience:
    """How long failures of one server are borne; shared by all requests to it.

    Args:
        name: of the server, in what is said of it.
        seconds: from the first failure of a request to giving up.
        retries: of a request that the server was there for, and failed.
        group: before the names of these options, where a line names one.
        stored: what was answered is not lost when it is given up.
    """

    def __init__(
        self, name: str, seconds: float, retries: int, group: str = "rollout.", stored: bool = True
    ) -> None:
        self.name, self.seconds, self.retries = name, seconds, retries
        self.group, self.stored = group, stored
        self.answered = float("-inf")  # when anything was
        self.waiting = False

    async def __call__(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` gives in the end.

        Raises:
            UserError: it went on failing.
        """
        since, failures, broken = 0.0, 0, 0
        while True:
            try:
                result = await ask()
            except PassingError as failure:
                now = time.monotonic()
                since = since if failures else now
                failures, broken = failures + 1, broken + failure.broken
                left = since + self.seconds - now
                asked = failure.wait or 0.0
                if left <= 0 or asked > left or broken > self.retries:
                    raise UserError(self._given_up(failure, failures, broken)) from None
                self._tell(failure, failures, since)
                # A part is left to chance, lest all come back at the same moment.
                pause = min(FIRST * 2.0 ** min(failures - 1, 30), LONGEST) * random.uniform(0.5, 1.0)
                await asyncio.sleep(asked * random.uniform(1.0, 1.1) if asked else min(pause, left))
            else:
                if self.waiting:
                    say(f"{self.name}: answers again")
                self.answered, self.waiting = time.monotonic(), False
                return result

    def _tell(self, failure: PassingError, failures: int, since: float) -> None:
        """Say that it is waited for, once, if nobody was answered since this request first failed."""
        if failures > 1 and not self.waiting and self.answered < since:
            self.waiting = True
            say(f"{self.name}: {failure}; waiting up to {self.seconds:g} s for it")

    def _given_up(self, failure: PassingError, failures: int, broken: int) -> str:
        if broken > self.retries:
            which = f"{self.group}retries={self.retries}"
        else:
            which = f"{self.group}patience={self.seconds:g}"
        asked = f", and asks to wait {failure.wait:g} s" if failure.wait else ""
        line = f"{self.name}: {failure}{asked}; given up after {failures} attempts ({which})"
        kept = "; what was answered in whole shards is kept, and the same command goes on from there"
        return line + kept * self.stored


def retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header (RFC 9110, 10.2.3) asks for: a number, or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None
