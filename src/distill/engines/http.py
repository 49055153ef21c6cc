"""An OpenAI-compatible server: how it is reached, what its failures mean, and retries with back-off."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import SplitResult, urljoin, urlsplit

from decode.errors import UserError
from distill.utils.progress import say

FIRST, LONGEST = 0.5, 10.0  # seconds between attempts, which double from the first to the longest
T = TypeVar("T")

BUSY = (408, 425, 429, 502, 503, 504)  # over soon, and nothing is wrong with the server


class RefusedError(Exception):
    """What asking again does not mend.

    Args:
        status: of the response.
        reason: the server's.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def check_redirect(url: str, location: str, option: str, base: str = "") -> None:
    """Refuse to be sent to another origin, which would be given the key and the prompts.

    Args:
        url: that was asked for.
        location: where the answer says it is.
        option: that names the server.
        base: path that the option's value ends with.

    Raises:
        UserError: scheme, host or port is another one.
    """
    here, there = urlsplit(url), urlsplit(urljoin(url, location))
    if _origin(here) != _origin(there):
        origin = f"{there.scheme}://{there.netloc.rpartition('@')[2]}"
        shown = f"{here.scheme}://{here.netloc.rpartition('@')[2]}"
        raise UserError(
            f"{shown}: sends on to {origin}, another origin, which would be given key and prompts; where "
            f"that is the server, give {option}={origin}{base}"
        )


def _origin(url: SplitResult) -> tuple[str, str | None, int | None]:
    """Scheme, host and port, by whatever port the scheme has where none is named."""
    return url.scheme, url.hostname, url.port or {"http": 80, "https": 443}.get(url.scheme)


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is, and how it is asked.

    Args:
        url: of its interface, up to /v1.
        model: as the server calls it.
        concurrency: requests in flight.
        timeout: seconds for one answer.
        retries: of a request that the server fails at.
        patience: seconds that a server is waited for which is away, or has failed.
        api_key_env: name of the environment variable with the key; the key itself is kept nowhere.
        group: before the names of these options, where a line names one.
        stored: its answers are kept as they come.
    """

    url: str
    model: str
    concurrency: int
    timeout: float
    retries: int
    patience: float
    api_key_env: str
    group: str = "rollout."
    stored: bool = True

    def __str__(self) -> str:
        return f"{self.group}url={self.url}"

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Any]:
        """A client for one event loop."""
        library = openai()
        limit = library.Timeout(self.timeout, connect=min(self.timeout, 10.0))

        async def look(response: Any) -> None:  # of every answer, before a redirect is followed
            if response.has_redirect_location:
                url, base = str(response.request.url), urlsplit(self.url).path
                check_redirect(url, response.headers["location"], f"{self.group}url", base)

        web = library.DefaultAsyncHttpxClient(event_hooks={"response": [look]})
        # It would ask again by itself, but for a number of times and not for a time.
        async with library.AsyncOpenAI(
            base_url=self.url, api_key=self.key or "none", timeout=limit, max_retries=0, http_client=web
        ) as client:
            yield client

    @property
    def key(self) -> str:
        """The key; empty where there is none."""
        return os.environ.get(self.api_key_env, "")

    @asynccontextmanager
    async def understood(self, first: bool, sure: bool) -> AsyncIterator[None]:
        """Sort failures into those that pass and those that do not.

        Args:
            first: nothing was answered yet, so that a server that is away may never have been there.
            sure: it has the model. One that has not may well fail instead of refusing.

        Raises:
            PassingError: the same request may be answered next time.
            RefusedError: it will not be.
            UserError: nobody is there.
        """
        library = openai()
        try:
            yield
        except library.APITimeoutError:
            raise PassingError(f"no answer within {self.group}timeout={self.timeout:g} s", True) from None
        except library.APIConnectionError as error:
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            reason = self.clean(str(error.__cause__ or error)) or "connection lost"
            if first:
                raise UserError(f"{self}: nobody answers there ({reason})") from None
            raise PassingError(reason) from None
        except library.APIStatusError as error:
            status, reason = error.status_code, self._reason(error)
            if status in BUSY:
                wait = retry_after(error.response.headers.get("retry-after"))
                raise PassingError(reason, wait=wait) from None
            if status >= 500 and sure:
                raise PassingError(reason, True) from None
            raise RefusedError(status, reason) from None

    def _reason(self, error: Any) -> str:
        """What the server says was wrong."""
        said = error.body if isinstance(error.body, dict) else {}
        text = said.get("message") or said.get("detail") or said.get("error") or error.body or ""
        return f"{error.status_code}: {self.clean(str(text))}".rstrip(": ")

    def clean(self, text: str) -> str:
        """A line of it, without the key."""
        text = " ".join(text.replace(self.key, "***").split() if self.key else text.split())
        return text if len(text) <= 300 else text[:300] + "..."


def openai() -> Any:
    """The client library, which only those need who ask a server.

    Raises:
        UserError: it is not there.
    """
    try:
        import openai as library
    except ImportError:
        raise UserError(
            "asking a server: the package openai is missing; pip install -e '.[serving]'"
        ) from None
    return library


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
