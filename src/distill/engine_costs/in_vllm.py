"""Rounds timed in vLLM, by the counters of its own metrics."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from decode.errors import UserError
from distill.engine_costs.measure import Counted, ServerOptions
from distill.engines.base import Request, SamplingParams
from distill.engines.http import Server
from distill.engines.openai import OpenAIEngine
from distill.engines.vllm import VLLM
from distill.prompts.chat_template import Chat
from distill.serving.endpoint import Endpoint
from distill.serving.metrics import Reading, difference

FLAG = "--speculative-config"
TIMEOUT = 600.0  # seconds of a request
POLL, LAG = 0.02, 10.0  # seconds between reads of counters that lag behind the answers, and until an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving(ServerOptions):
    """How vLLM is started.

    Attributes:
        installation: the installation.
        dtype: of the target's weights.
        on_cpu: do not compile, which takes minutes on a CPU.
        chat: tokenizer of the requests.
    """

    installation: VLLM
    dtype: str
    on_cpu: bool
    chat: Chat


class VLLMRounds:
    """A `TimedEngine`: one server of the target without a drafter, and one for each draft length.

    Args:
        serving: how to start them.
    """

    def __init__(self, serving: Serving) -> None:
        self.serving, self.name = serving, "vllm"

    @contextmanager
    def plain(self) -> Iterator[VLLMDecoder]:
        """Start the target without a drafter."""
        with self._serve(with_length(self.serving.command, 0), "plain") as decoder:
            self.name = f"vllm {decoder.endpoint.version()}".strip()
            yield decoder

    @contextmanager
    def drafting(self, length: int) -> Iterator[VLLMDecoder]:
        """Start the target with drafts of `length` tokens."""
        with self._serve(with_length(self.serving.command, length), f"draft-{length}") as decoder:
            yield decoder

    @contextmanager
    def _serve(self, command: str, name: str) -> Iterator[VLLMDecoder]:
        serving = self.serving
        arguments = [
            *("--dtype", serving.dtype, "--no-enable-prefix-caching"),
            *("--max-model-len", str(serving.context), "--max-num-seqs", str(serving.batch)),
            *(["--enforce-eager"] if serving.on_cpu else []),
        ]
        log = serving.folder / f"vllm-{name}.log"
        threads = {"OMP_NUM_THREADS": str(serving.threads)} if serving.threads else {}
        with serving.installation.serve(command, log, *arguments, variables=threads) as running:
            yield VLLMDecoder(running.url, serving)


def with_length(command: str, length: int) -> str:
    """A `vllm serve` command whose drafts have `length` tokens; 0: the same without a drafter."""
    words = shlex.split(command)
    at = words.index(FLAG)
    config = json.loads(words[at + 1]) | {"num_speculative_tokens": length}
    words[at : at + 2] = [FLAG, json.dumps(config)] if length else []
    return shlex.join(words)


def _unseen(done: float) -> None:
    """No progress of single answers."""
    del done


class VLLMDecoder:
    """A running server.

    Args:
        url: of the server.
        serving: its options.
    """

    def __init__(self, url: str, serving: Serving) -> None:
        self.endpoint = Endpoint(url, TIMEOUT, "")
        self.sampler = serving.sampler
        model = next((listed.id for listed in self.endpoint.models()), "")
        server = Server(f"{url}/v1", model, serving.batch, TIMEOUT, 0, 0.0, "", group="engine_", stored=False)
        chat = Chat(serving.chat.tokenizer, "none")  # requests contain rendered prompts
        self.client = OpenAIEngine(server, chat, 0, None, {"ignore_eos": True})

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> Counted:
        """See `Decoder.answer`."""
        before = self.endpoint.reading()
        requests = [Request(str(i), 0, list(prompt)) for i, prompt in enumerate(prompts)]
        answers = self.client(requests, SamplingParams(self.sampler, tokens, []), _unseen)
        if any(len(answer.tokens) != tokens for answer in answers):
            raise UserError(f"{self.endpoint.url}: answered with other than {tokens} tokens")
        counted = self._settled(before, len(prompts))
        missing = counted.decode_seconds is None or counted.prefill_seconds is None
        if missing or not (counted.decode_seconds or tokens == 1):
            raise UserError(f"{self.endpoint.url}/metrics: has no times of requests; vLLM 0.30 or newer has")
        after_first = float(len(prompts) * (tokens - 1))
        return Counted(
            rounds=counted.rounds or after_first,
            tokens=after_first,
            drafted=counted.drafted or 0.0,
            seconds=counted.decode_seconds or 0.0,
            prompt_tokens=counted.prompt_tokens or 0.0,
            prompt_seconds=counted.prefill_seconds or 0.0,
        )

    def pass_seconds(self, prompt: Sequence[int], tokens: int) -> float:
        """A prompt of so many tokens, which the server reads in one pass."""
        return self.answer([prompt[:tokens]], 1).prompt_seconds

    def _settled(self, before: Reading, requests: int) -> Reading:
        """Counters of what was answered since `before`, once all requests are in them."""
        until = time.monotonic() + LAG
        while True:
            grown = difference(before, self.endpoint.reading(), f"{self.endpoint.url}/metrics")
            if grown.requests >= requests:
                return grown
            if time.monotonic() > until:
                raise UserError(
                    f"{self.endpoint.url}/metrics: counts {grown.requests:.0f} of {requests} answers"
                )
            time.sleep(POLL)
