"""What an engine counts while it answers: the held-out prompts that are sent to it, or whatever it serves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from decode.errors import UserError
from decode.evaluation.scorecard import Scorecard
from distill.config.build import read_inputs
from distill.engines.base import Request, SamplingParams
from distill.engines.http import Server
from distill.engines.openai import OpenAIEngine
from distill.options import VerifyOptions
from distill.serving.endpoint import Endpoint, Model
from distill.serving.metrics import Reading, since
from distill.utils.progress import say

PAUSE, LOOKS = 0.5, 10  # seconds between looks at counters that may not have caught up yet, and how many


class Counted(NamedTuple):
    """What was read, and how it came about.

    Attributes:
        reading: of what counts.
        histograms: of the answers, where the engine gives them.
        prompts: that were sent.
        written: tokens of the answers; None: of somebody else's traffic.
        how: for people.
    """

    reading: Reading
    histograms: Sequence[Sequence[int]]
    prompts: int
    written: int | None
    how: str


def count(
    options: VerifyOptions,
    card: Scorecard,
    endpoint: Endpoint,
    first: Reading,
    models: Sequence[Model],
    temperature: float,
) -> Counted:
    """Look twice, with traffic in between; or once, with `since_start`.

    Args:
        options: of the command.
        card: the scorecard, whose prompts and lengths are sent.
        endpoint: of the engine.
        first: the reading that there is.
        models: that it serves.
        temperature: to ask for.

    Raises:
        UserError: nothing to watch, a server that fails, one that is started anew, or metrics of another.
    """
    where = f"{endpoint.url}/metrics"
    if options.since_start:
        return Counted(first, (), 0, None, "all that was served since the start")
    if not options.send:
        if not options.seconds:
            raise UserError("send=false: give seconds=<how long to watch the traffic>, or since_start=true")
        time.sleep(options.seconds)
        reading = since(first, endpoint.reading(options.model), where)
        return Counted(reading, (), 0, None, f"{options.seconds:g} s of whatever was served")
    engine, requests = _ready(options, card, first, models)
    law = SamplingParams(
        {"temperature": temperature, "top_k": options.score.top_k, "top_p": options.score.top_p},
        card.conditions.max_new_tokens,
        _ends(engine),
    )
    say(f"sending {len(requests)} held-out prompts to {endpoint.url} at T={temperature:g}")
    before = endpoint.reading(options.model)
    answers = engine(requests, law)
    after = _settled(endpoint, options.model)
    written = sum(len(answer.tokens) for answer in answers)
    reading = since(before, after, where)
    if reading.tokens < written / 2:
        raise UserError(
            f"{where}: counts {reading.tokens:.0f} new tokens, and {written} were answered: these metrics "
            "are not of the engine that answers (a proxy, several replicas); give the engine's own address"
        )
    return Counted(
        reading,
        engine.rounds,
        len(answers),
        written,
        f"{len(answers)} held-out prompts, {written} tokens answered",
    )


def _ready(
    options: VerifyOptions, card: Scorecard, first: Reading, models: Sequence[Model]
) -> tuple[OpenAIEngine, list[Request]]:
    """Who asks, and what: the prompts that were replayed, or decoded where none was."""
    if options.score.min_p or options.score.repetition_penalty != 1:
        raise UserError("score.min_p, score.repetition_penalty: servers are asked without; use send=false")
    replay = card.headline.replay
    count = options.count or (replay.prompts if replay else card.conditions.prompts)
    score = replace(options.score, prompts=count, replay_prompts=0)
    target = replace(options.target, path=options.target.path or card.checkpoint.target)
    chat, _, held = read_inputs(target, options.prompts, score)
    requests = [Request(p.id, 0, chat.encode(p.messages, p.tools), tuple(p.messages), p.tools) for p in held]
    name = options.model or first.model or (models[0].id if models else card.checkpoint.target)
    limits = (options.concurrency, options.timeout, options.retries, options.patience, options.api_key_env)
    server = Server(f"{Endpoint(options.url, 0, '').url}/v1", name, *limits, group="", stored=False)
    extra = {"return_spec_tokens_details": True} if first.engine == "sglang" else {}
    return OpenAIEngine(server, chat, card.conditions.seed, None, extra), requests


def _ends(engine: OpenAIEngine) -> list[int]:
    end = engine.chat.tokenizer.eos_token_id
    if not isinstance(end, int):
        raise UserError("target: its tokenizer names no end token, by which answers end; use send=false")
    return [end]


def _settled(endpoint: Endpoint, model: str | None) -> Reading:
    """The counters once they stand still: engines write them after they have answered."""
    last = endpoint.reading(model)
    for _ in range(LOOKS):
        time.sleep(PAUSE)
        now = endpoint.reading(model)
        if now == last:
            break
        last = now
    return last
