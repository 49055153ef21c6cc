"""An OpenAI-compatible server: how it is reached, and what its failures mean."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

from decode.errors import UserError
from distill.engines.retry import PassingError, retry_after

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


def check_redirect(url: str, location: str, option: str) -> None:
    """Refuse to be sent to another origin, which would be given the key and the prompts.

    Args:
        url: that was asked for.
        location: where the answer says it is.
        option: that names the server.

    Raises:
        UserError: scheme, host or port is another one.
    """
    here, there = urlsplit(url), urlsplit(urljoin(url, location))
    if (here.scheme, here.netloc) != (there.scheme, there.netloc):
        origin = f"{there.scheme}://{there.netloc.rpartition('@')[2]}"
        raise UserError(
            f"{url}: sends on to {origin}, another origin, which would be given key and prompts; where that "
            f"is the server, give {option}={origin}"
        )


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
            if location := response.headers.get("location"):
                check_redirect(str(response.request.url), location, f"{self.group}url")

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
