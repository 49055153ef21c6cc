"""Rounds timed in llama.cpp's server, by the timings of its answers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, build_opener

from decode.errors import UserError
from distill.engine_costs.measure import Counted, ServerOptions
from distill.engines.launch import NO_PROXY, Running
from distill.engines.llama_cpp import LlamaCpp

TIMEOUT = 600.0  # seconds of a request
TARGET, LENGTH = "-m", "--spec-draft-n-max"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving(ServerOptions):
    """How llama.cpp's server is started.

    Attributes:
        installation: the installation.
        target: its GGUF file.
    """

    installation: LlamaCpp
    target: Path


def with_length(command: str, length: int) -> str:
    """A `llama-server` command whose drafts have `length` tokens."""
    words = shlex.split(command)
    words[words.index(LENGTH) + 1] = str(length)
    return shlex.join(words)


class LlamaCppRounds:
    """A `TimedEngine`: one server of the target without a drafter, and one for each draft length.

    Args:
        serving: how to start them.
    """

    def __init__(self, serving: Serving) -> None:
        self.serving, self.name = serving, f"llama.cpp {serving.installation.build()}"

    @contextmanager
    def plain(self) -> Iterator[LlamaCppDecoder]:
        """Start the target without a drafter."""
        with started(self.serving, [], "plain") as decoder:
            yield decoder

    @contextmanager
    def drafting(self, length: int) -> Iterator[LlamaCppDecoder]:
        """Start the target with drafts of `length` tokens, however unsure the drafter is."""
        _, *words = shlex.split(with_length(self.serving.command, length))
        at = words.index(TARGET)
        threads = ["-td", str(self.serving.threads)] if self.serving.threads else []
        words = [*words[:at], *words[at + 2 :], "--spec-draft-p-min", "0", *threads]
        with started(self.serving, words, f"draft-{length}") as decoder:
            yield decoder


@contextmanager
def started(serving: Serving, words: Sequence[str], name: str) -> Iterator[LlamaCppDecoder]:
    """Start a server of the target.

    Args:
        serving: how; its command is not read.
        words: more arguments of `llama-server`.
        name: of its log.

    Raises:
        UserError: see `launch.serve`.
    """
    size = ["-np", str(serving.batch), "-c", str(serving.context * serving.batch)]
    threads = ["-t", str(serving.threads)] if serving.threads else []
    log = serving.folder / f"llama-cpp-{name}.log"
    with serving.installation.serve(serving.target, log, *size, *threads, *words) as running:
        yield LlamaCppDecoder(running, serving.sampler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of a server.

    Attributes:
        tokens: new tokens, the end token included.
        timings: as llama.cpp counts them; without `draft_n` where it drafted nothing.
    """

    tokens: list[int]
    timings: dict[str, Any]


class LlamaCppDecoder:
    """A running server.

    Args:
        running: the server.
        sampler: temperature and filters.
    """

    def __init__(self, running: Running, sampler: dict[str, float]) -> None:
        self.running, self.sampler = running, sampler

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> Counted:
        """See `Decoder.answer`."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            timings = list(pool.map(lambda prompt: self._timings(prompt, tokens), prompts))
        accepted = sum(one.get("draft_n_accepted", 0) for one in timings)
        after_first = len(prompts) * (tokens - 1)
        return Counted(
            rounds=after_first - accepted,
            tokens=after_first,
            drafted=sum(one.get("draft_n", 0) for one in timings),
            seconds=sum(one["predicted_ms"] for one in timings) / 1e3,
            prompt_tokens=sum(one["prompt_n"] for one in timings),
            prompt_seconds=sum(one["prompt_ms"] for one in timings) / 1e3,
        )

    def pass_seconds(self, prompt: Sequence[int], tokens: int) -> float:
        """See `Decoder.pass_seconds`; the last of its tokens gets logits."""
        self._timings(prompt, 1, cached=True)
        timings = self._timings([*prompt, *prompt[:tokens]], 1, cached=True)
        # The token that was answered may be the first of the new ones.
        return timings["prompt_ms"] / 1e3 * tokens / timings["prompt_n"]

    def complete(
        self, prompt: Sequence[int], tokens: int, *, ends: bool = False, cached: bool = False
    ) -> Answer:
        """Answer one prompt.

        Args:
            prompt: token ids.
            tokens: most new tokens.
            ends: end at an end token of the file; otherwise there are exactly so many tokens.
            cached: keep what the last answer's prompt has in common with this one.

        Raises:
            UserError: the server fails, refuses, or answers another number of tokens.
        """
        asked = {"prompt": list(prompt), "n_predict": tokens, "ignore_eos": not ends, "cache_prompt": cached}
        asked |= {"return_tokens": True, "seed": 0, **self.sampler}
        said = self._ask(asked)
        count = len(said["tokens"])
        if count > tokens or (count < tokens and not ends):
            raise UserError(f"{self.running.url}: answered {count} tokens, not {tokens}")
        return Answer(tokens=said["tokens"], timings=said["timings"])

    def _timings(self, prompt: Sequence[int], tokens: int, cached: bool = False) -> dict[str, Any]:
        """Timings of one answer of exactly so many tokens."""
        return self.complete(prompt, tokens, cached=cached).timings

    def _ask(self, content: dict[str, Any]) -> dict[str, Any]:
        """The server's answer.

        Raises:
            UserError: the server fails or refuses.
        """
        where, headers = f"{self.running.url}/completion", {"Content-Type": "application/json"}
        request = Request(where, json.dumps(content).encode(), headers)
        try:
            with build_opener(NO_PROXY).open(request, timeout=TIMEOUT) as response:
                return json.load(response)
        except HTTPError as error:
            reason = error.read(500).decode("utf-8", "replace")
            raise UserError(f"{where}: {error.code}: {reason}") from None
        except (HTTPException, OSError, ValueError) as error:
            raise UserError(f"{where}: {error}") from None
