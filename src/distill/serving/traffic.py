"""Read an engine's counters while it answers held-out prompts, or while it serves other traffic."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from decode.errors import UserError
from decode.evaluation.scorecard import Scorecard
from decode.model.load import file_ends
from distill.config.build import PromptReader
from distill.engines.base import Answer, Request, SamplingParams
from distill.engines.http import Server
from distill.engines.openai import OpenAIEngine
from distill.options.answers import TargetOptions
from distill.options.commands import VerifyOptions
from distill.prompts.prompt import ids_digest
from distill.prompts.templates import clock
from distill.serving.endpoint import Endpoint, Model
from distill.serving.metrics import Reading, difference
from distill.utils.paths import bundled
from distill.utils.progress import say

MORE = "prompts.heldout=<file> gives more"
READ_INTERVAL, MAX_READS = 0.5, 10  # seconds between reads of counters that lag behind, and number of reads


class Traffic(NamedTuple):
    """Counters of the measured traffic.

    Attributes:
        reading: counters of this traffic only.
        histograms: accepted tokens by answer, if the engine reports them.
        prompts: number of prompts sent.
        digest: `ids_digest` of the prompts sent; "" if none were.
        available: number of held-out prompts that there are.
        answer_tokens: tokens of the answers; None: other users' traffic.
        description: description of the traffic, for messages.
        answers: answers to the prompts that were sent.
        seconds: seconds until the last answer arrived.
    """

    reading: Reading
    histograms: Sequence[Sequence[int]]
    prompts: int
    answer_tokens: int | None
    description: str
    answers: Sequence[Answer] = ()
    seconds: float = 0.0
    digest: str = ""
    available: int = 0


def measure(
    options: VerifyOptions,
    card: Scorecard,
    endpoint: Endpoint,
    first: Reading,
    models: Sequence[Model],
    temperature: float,
) -> Traffic:
    """Read the counters before and after some traffic; with `since_start`, read them once.

    Raises:
        UserError: no duration is given, the server fails or restarts, or the metrics are of another engine.
    """
    where = f"{endpoint.url}/metrics"
    if options.since_start:
        return Traffic(first, (), 0, None, "all traffic since the start")
    if not options.send:
        if not options.seconds:
            raise UserError("send=false: give seconds=<how long to watch the traffic>, or since_start=true")
        time.sleep(options.seconds)
        reading = difference(first, endpoint.reading(options.model), where)
        return Traffic(reading, (), 0, None, f"{options.seconds:g} s of traffic")
    engine, requests, available = _prepare(options, card, first, models)
    params = SamplingParams(
        {"temperature": temperature, "top_k": options.score.top_k, "top_p": options.score.top_p},
        card.conditions.max_new_tokens,
        _stop_tokens(engine, options.target, card),
    )
    say(f"sending {len(requests)} held-out prompts to {endpoint.url} at T={temperature:g}")
    return send(endpoint, engine, requests, params, options.model)._replace(available=available)


def send(
    endpoint: Endpoint,
    engine: OpenAIEngine,
    requests: Sequence[Request],
    params: SamplingParams,
    model: str | None = None,
) -> Traffic:
    """Send requests to the engine, and read its counters before and after.

    Raises:
        UserError: the server fails or restarts, or the metrics are of another engine.
    """
    where, begun = f"{endpoint.url}/metrics", len(engine.rounds)
    before, started = endpoint.reading(model), time.perf_counter()
    answers = engine(requests, params)
    seconds = time.perf_counter() - started
    after = _settled_reading(endpoint, model)
    answer_tokens = sum(len(answer.tokens) for answer in answers)
    reading = difference(before, after, where)
    if reading.tokens < answer_tokens / 2:
        raise UserError(
            f"{where}: counts {reading.tokens:.0f} new tokens, and {answer_tokens} were answered: these "
            "metrics are not of the engine that answers (a proxy, replicas); use the engine's own address"
        )
    return Traffic(
        reading,
        engine.rounds[begun:],
        len(answers),
        answer_tokens,
        f"{len(answers)} held-out prompts, {answer_tokens} tokens answered",
        answers,
        seconds,
        ids_digest([request.tokens for request in requests]),
    )


def _prepare(
    options: VerifyOptions, card: Scorecard, first: Reading, models: Sequence[Model]
) -> tuple[OpenAIEngine, list[Request], int]:
    """The engine, its requests, and the number of held-out prompts.

    Requests are the replayed prompts, or the decoded ones if none was replayed.
    """
    if options.score.min_p or options.score.repetition_penalty != 1:
        raise UserError("score.min_p, score.repetition_penalty: not sent to servers; use send=false")
    replay = card.compared.replay
    count = options.count or (replay.prompts if replay else card.conditions.prompts)
    score = replace(options.score, prompts=sys.maxsize, replay_prompts=0)  # all, to count them
    target = replace(options.target, path=options.target.path or card.checkpoint.target)
    moment = clock.moment_of_checkpoint(Path(options.checkpoint))
    chat, _, held = PromptReader(target, options.prompts, score).read(moment)
    if options.count and count > len(held):
        say(f"count={count}: there are {len(held)} held-out prompts, and all of them are sent; {MORE}")
    available, held = len(held), held[:count]
    requests = [Request(p.id, 0, chat.encode(p.messages, p.tools), tuple(p.messages), p.tools) for p in held]
    name = options.model or first.model or (models[0].id if models else card.checkpoint.target)
    limits = (options.concurrency, options.timeout, options.retries, options.patience, options.api_key_env)
    server = Server(f"{Endpoint(options.url, 0, '').url}/v1", name, *limits, group="", stored=False)
    extra = {"return_spec_tokens_details": True} if first.engine == "sglang" else {}
    return OpenAIEngine(server, chat, card.conditions.seed, None, extra), requests, available


def _stop_tokens(engine: OpenAIEngine, target: TargetOptions, card: Scorecard) -> list[int]:
    name = str(bundled(target.path or card.checkpoint.target))
    files = file_ends(name, target.revision, target.trust_remote_code)
    if not (ends := engine.chat.ends(files, len(engine.chat.tokenizer)).ids):
        raise UserError("target: neither its files nor its tokenizer name an end token; use send=false")
    return ends


def _settled_reading(endpoint: Endpoint, model: str | None) -> Reading:
    """Read the counters until they stop changing: engines update them after answering."""
    last = endpoint.reading(model)
    for _ in range(MAX_READS):
        time.sleep(READ_INTERVAL)
        now = endpoint.reading(model)
        if now == last:
            break
        last = now
    return last
