"""HTTP client of an OpenAI-compatible server: connection, error classes, retries with back-off."""

from __future__ import annotations

import asyncio
import math
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from queue import Empty, Queue
from typing import Any, TypeVar, cast
from urllib.parse import SplitResult, urljoin, urlsplit

from decode.errors import UserError
from distill.utils.progress import say

MAX_BYTES = 32 << 20  # limit of a response
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0  # seconds between attempts; doubled after each
T = TypeVar("T")

BUSY = (408, 425, 429, 502, 503, 504)  # status codes of a server that is overloaded or restarting


class RefusedError(Exception):
    """A permanent refusal: retrying does not help.

    Args:
        status: status of the response.
        reason: the server's reason.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def check_redirect(url: str, location: str, option: str, base: str = "") -> None:
    """Reject a redirect to another origin, which would receive the key and the prompts.

    Args:
        url: url of the request.
        location: header of the response.
        option: name of the option with the server's url.
        base: path at the end of that option's value.

    Raises:
        UserError: scheme, host or port differ, or the location is no address.
    """
    try:
        here, there = urlsplit(url), urlsplit(urljoin(url, location))
        elsewhere = _origin(here) != _origin(there)
    except ValueError as error:
        raise UserError(f"{option}: the server redirects to an invalid address ({error})") from None
    if elsewhere:
        origin = f"{there.scheme}://{there.netloc.rpartition('@')[2]}"
        shown = f"{here.scheme}://{here.netloc.rpartition('@')[2]}"
        raise UserError(
            f"{shown}: redirects to {origin}, another origin, which would receive key and prompts; if "
            f"that is the server, give {option}={origin}{base}"
        )


def _origin(url: SplitResult) -> tuple[str, str | None, int | None]:
    """Scheme, host and port, with the default port of the scheme."""
    return url.scheme, url.hostname, url.port or {"http": 80, "https": 443}.get(url.scheme)


@dataclass(frozen=True, slots=True)
class Server:
    """Connection options of a server.

    Args:
        url: base url, up to /v1.
        model: name on the server.
        concurrency: number of parallel requests.
        timeout: seconds for a complete answer.
        retries: retries of a request that fails on the server.
        patience: seconds to wait for an unreachable or failing server.
        api_key_env: environment variable with the key; the key itself is not stored.
        group: prefix of these options in messages.
        stored: whether answers are stored as they arrive.
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
        """Yield a client for one event loop."""
        library = openai()
        limit = library.Timeout(self.timeout, connect=min(self.timeout, 10.0))

        async def look(response: Any) -> None:  # called before a redirect is followed
            if response.has_redirect_location:
                url, base = str(response.request.url), urlsplit(self.url).path
                check_redirect(url, response.headers["location"], f"{self.group}url", base)
            # The limit applies to compressed bytes, and a megabyte may decompress to a gigabyte.
            if (coding := response.headers.get("content-encoding", "identity")) != "identity":
                raise UserError(f"{self}: answers with unrequested {coding} encoding; turn it off there")
            response.stream = limited(response.stream, str(self))

        web = library.DefaultAsyncHttpxClient(
            headers={"Accept-Encoding": "identity"},
            event_hooks={"response": [look]},
        )
        # The library's retries are off: it limits attempts, `RetryPolicy` limits time.
        async with library.AsyncOpenAI(
            base_url=self.url, api_key=self.key or "none", timeout=limit, max_retries=0, http_client=web
        ) as client:
            yield client

    @property
    def key(self) -> str:
        """The API key; empty if there is none."""
        return os.environ.get(self.api_key_env, "")

    @asynccontextmanager
    async def understood(self, first: bool, sure: bool) -> AsyncIterator[None]:
        """Translate the library's errors into transient and permanent errors.

        Args:
            first: no answer so far, so an unreachable server means a wrong url.
            sure: the server has the model; a server without it may fail instead of refusing.

        Raises:
            TransientError: a retry may succeed.
            RefusedError: a retry will not succeed.
            UserError: there is no server.
        """
        library = openai()
        try:
            async with asyncio.timeout(self.timeout):  # the library's timeout applies per read
                yield
        except (library.APITimeoutError, TimeoutError):
            raise TransientError(f"no answer within {self.group}timeout={self.timeout:g} s", True) from None
        except library.APIConnectionError as error:
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            reason = self.clean(str(error.__cause__ or error)) or "connection lost"
            if first:
                raise UserError(f"{self}: no server answers there ({reason})") from None
            raise TransientError(reason) from None
        except library.APIStatusError as error:
            status, reason = error.status_code, self._reason(error)
            if status in BUSY:
                wait = retry_after(error.response.headers.get("retry-after"))
                raise TransientError(reason, wait=wait) from None
            if status >= 500 and sure:
                raise TransientError(reason, True) from None
            raise RefusedError(status, reason) from None

    def _reason(self, error: Any) -> str:
        """The server's error message."""
        body = error.body if isinstance(error.body, dict) else {}
        text = body.get("message") or body.get("detail") or body.get("error") or error.body or ""
        return f"{error.status_code}: {self.clean(str(text))}".rstrip(": ")

    def clean(self, text: str) -> str:
        """Text as one line of at most 300 characters, without the key."""
        text = " ".join(text.replace(self.key, "***").split() if self.key else text.split())
        return text if len(text) <= 300 else text[:300] + "..."


def limited(stream: Any, name: str) -> Any:
    """Wrap the body of a response, limited to MAX_BYTES.

    Args:
        stream: an unread `AsyncByteStream` of httpx or httpx2 (depends on openai's version).
        name: name of the server in messages.

    Raises:
        UserError: when more is read.
    """
    base: Any = type(stream)

    class Limited(base):
        def __init__(self) -> None:
            pass

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for chunk in stream:
                size += len(chunk)
                if size > MAX_BYTES:
                    raise UserError(f"{name}: a response of more than {MAX_BYTES >> 20} MB; not an answer")
                yield chunk

        async def aclose(self) -> None:
            await stream.aclose()

    return Limited()


def within(seconds: float, work: Callable[[], T]) -> T:
    """Run `work` in another thread with a time limit, and return its result.

    Raises:
        TimeoutError: it takes longer; the thread is abandoned.
        Exception: raised by `work`.
    """
    done: Queue[tuple[T | None, BaseException | None]] = Queue()

    def body() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:  # raised in the waiting thread
            done.put((None, error))

    threading.Thread(target=body, daemon=True).start()
    try:
        result, error = done.get(timeout=seconds)
    except Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return cast(T, result)


def openai() -> Any:
    """Import the client library, an optional dependency.

    Raises:
        UserError: it is not installed.
    """
    try:
        import openai as library
    except ImportError:
        raise UserError(
            "asking a server: the package openai is missing; pip install 'foredraft[serving]'"
        ) from None
    return library


class TransientError(Exception):
    """A failure that a retry may fix.

    Args:
        reason: one line.
        broken: the server failed; otherwise it was unreachable or busy.
        wait: seconds of its Retry-After header.
    """

    def __init__(self, reason: str, broken: bool = False, wait: float | None = None) -> None:
        super().__init__(reason)
        self.broken, self.wait = broken, wait


class RetryPolicy:
    """Retries with back-off, shared by all requests to one server.

    Args:
        name: name of the server in messages.
        seconds: time limit from the first failure of a request.
        retries: retries of a request that fails on the server.
        group: prefix of these options in messages.
        stored: whether answers so far are stored.
    """

    def __init__(
        self, name: str, seconds: float, retries: int, group: str = "rollout.", stored: bool = True
    ) -> None:
        self.name, self.seconds, self.retries = name, seconds, retries
        self.group, self.stored = group, stored
        self.answered = float("-inf")  # time of the newest answer
        self.waiting = False
        self.failures = 0  # failures of all requests after which late or partial answers are possible

    async def __call__(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `ask`, retried.

        Raises:
            UserError: it kept failing.
        """
        since, failures, broken = 0.0, 0, 0
        while True:
            try:
                result = await ask()
            except TransientError as failure:
                now = time.monotonic()
                since = since if failures else now
                failures, broken = failures + 1, broken + failure.broken
                self.failures += failure.broken
                left = since + self.seconds - now
                requested = failure.wait or 0.0
                if left <= 0 or requested > left or broken > self.retries:
                    raise UserError(self._given_up(failure, failures, broken)) from None
                self._announce(failure, failures, since)
                # Jitter, so that requests do not retry all at once.
                pause = min(FIRST_PAUSE * 2.0 ** min(failures - 1, 30), LONGEST_PAUSE) * random.uniform(
                    0.5, 1.0
                )
                await asyncio.sleep(requested * random.uniform(1.0, 1.1) if requested else min(pause, left))
            else:
                if self.waiting:
                    say(f"{self.name}: answers again")
                self.answered, self.waiting = time.monotonic(), False
                return result

    def _announce(self, failure: TransientError, failures: int, since: float) -> None:
        """Print once that requests wait, if the server has answered nothing since the first failure."""
        if failures > 1 and not self.waiting and self.answered < since:
            self.waiting = True
            say(f"{self.name}: {failure}; retrying for up to {self.seconds:g} s")

    def _given_up(self, failure: TransientError, failures: int, broken: int) -> str:
        if broken > self.retries:
            which = f"{self.group}retries={self.retries}"
        else:
            which = f"{self.group}patience={self.seconds:g}"
        requested = f", and asks to wait {failure.wait:g} s" if failure.wait else ""
        line = f"{self.name}: {failure}{requested}; given up after {failures} attempts ({which})"
        stored_note = "; what was answered in whole shards is kept, and the same command continues from there"
        return line + stored_note * self.stored


def retry_after(value: str | None) -> float | None:
    """Seconds in a Retry-After header (RFC 9110, 10.2.3): a number or a date."""
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
