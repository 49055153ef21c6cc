"""Answers from an OpenAI-compatible server: vLLM, SGLang, `transformers serve`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from decode.errors import UserError
from distill.engines.base import Answer, Ended, Request, SamplingParams
from distill.engines.hidden_states import HiddenStates
from distill.engines.http import RefusedError, RetryPolicy, Server, TransientError
from distill.engines.openai_protocol import (
    DIALECTS,
    Dialect,
    Fields,
    Reply,
    body,
    read_reply,
    same_prompt,
    to_answer,
)
from distill.prompts.chat_template import Chat
from distill.utils.progress import bar, say

UNREADABLE = (400, 422)  # status codes for unknown fields
NAMED = 8  # maximum number of models in a message


class OpenAIEngine:
    """The target behind a server.

    Args:
        server: connection options.
        chat: the target's template and tokenizer, for servers that return text.
        seed: seed of the sampling, for servers that use it.
        context: maximum tokens of the target, or None.
        extra: additional fields of every request.
        states: keeps the files with the hidden states of answers.

    Attributes:
        rounds: per answer, the number of rounds that accepted 0, 1, ... draft tokens, if reported.

    Raises:
        UserError: the package openai is missing, the url does not answer, or the key is refused.
    """

    begins = False

    def __init__(
        self,
        server: Server,
        chat: Chat,
        seed: int,
        context: int | None,
        extra: Fields | None = None,
        states: HiddenStates | None = None,
    ) -> None:
        self.server, self.chat, self.seed, self.extra = server, chat, seed, extra or {}
        self.states = states
        self.rounds: list[list[int]] = []
        self.retry = RetryPolicy(str(server), server.patience, server.retries, server.group, server.stored)
        self.dialect: Dialect | None = None
        self.lost: Counter[str] = Counter()
        self.warned = self.cut = self.useful = False
        self.models: dict[str, int | None] = {}
        self.models = asyncio.run(self._look())
        room = self.models.get(server.model)
        self.context = min((c for c in (room, context) if c), default=None)

    def __call__(
        self, requests: Sequence[Request], params: SamplingParams, ended: Ended | None = None
    ) -> list[Answer]:
        """Return one answer per request; empty if the server returned nothing usable."""
        if not requests:
            return []
        own = bar(len(requests), "answers", "answers", leave=False) if ended is None else None
        with own or nullcontext(), self.states.asking(self.retry) if self.states else nullcontext():
            count = ended or (lambda n: own.update(int(n) - own.n) if own else None)
            return asyncio.run(self._answer_all(requests, params, count))

    async def _look(self) -> dict[str, int | None]:
        """List the server's models with their context length."""

        async def look() -> dict[str, int | None]:
            # `transformers serve` fails to list models on a machine without a Hub cache.
            async with self.server.understood(True, False):
                raw = await client.models.with_raw_response.list()
                try:
                    listed = raw.http_response.json()["data"]
                    return {str(m["id"]): _length(m.get("max_model_len")) for m in listed}
                except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
                    raise RefusedError(404, "no list of models") from None

        async with self.server.client() as client:
            try:
                return await self.retry(look)
            except RefusedError as refusal:
                if refusal.status in (401, 403):
                    raise UserError(self._line(refusal, "")) from None
                return {}  # not every server lists models; the first request decides

    async def _answer_all(
        self, requests: Sequence[Request], params: SamplingParams, ended: Ended
    ) -> list[Answer]:
        answers: dict[int, Answer] = {}
        slots = asyncio.Semaphore(self.server.concurrency)

        async def answer(i: int) -> None:
            async with slots:
                answers[i] = await self._answer(client, requests[i], params)
            ended(len(answers))

        async with self.server.client() as client:
            if self.dialect is None:
                self.dialect = await self._settle(client, requests[0], params)
            try:
                async with asyncio.TaskGroup() as tasks:
                    for i in range(len(requests)):
                        tasks.create_task(answer(i))
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None
        self._report(list(answers.values()))
        return [answers[i] for i in range(len(requests))]

    async def _settle(self, client: Any, request: Request, params: SamplingParams) -> Dialect:
        """Find the dialect that the server accepts, by a request of one token."""
        refused = ""
        for dialect in DIALECTS:
            try:
                reply = await self.retry(lambda fields=dialect: self._ask(client, request, params, fields, 1))
            except RefusedError as refusal:
                if refusal.status not in UNREADABLE or dialect is DIALECTS[-1]:
                    raise UserError(self._line(refusal, request.id)) from None
                refused = refused or f" ({refusal})"
            else:
                await self._keep(reply)
                if reply.ids is None:
                    say(f"{self.server}: returns no token ids{refused}; its texts are tokenized again")
                return dialect
        raise AssertionError("the last dialect neither answered nor raised")

    async def _answer(self, client: Any, request: Request, params: SamplingParams) -> Answer:
        dialect = self.dialect
        assert dialect, "the dialect is not yet known"
        longest = params.max_new_tokens
        if self.context:
            longest = min(longest, self.context - len(request.tokens))
        try:
            reply = await self.retry(lambda: self._ask(client, request, params, dialect, longest))
        except RefusedError as refusal:
            raise UserError(self._line(refusal, request.id)) from None
        if not self.warned and not same_prompt(reply, request):
            self.warned = True
            read = _length(reply.prompt_length) if reply.prompt is None else len(reply.prompt)
            say(
                f"{self.server}: it reads prompt {request.id} as {read} tokens, where the target's "
                f"chat template gives {len(request.tokens)}, or others; is it the same model?"
            )
        if reply.rounds is not None:
            self.rounds.append(reply.rounds)
        await self._keep(reply)
        answer = to_answer(reply, request, params, self.chat)
        if isinstance(answer, str):
            self.lost[answer] += 1
            return Answer([], False, False)
        if len(answer.tokens) <= longest:
            return answer
        # The start of a longer sample is a valid sample of the requested length.
        if reply.ids and not self.cut:
            self.cut = True
            say(f"{self.server}: returns more tokens than max_tokens={longest}; answers are cut there")
        return Answer(answer.tokens[:longest], False, answer.exact)

    async def _keep(self, reply: Reply) -> None:
        """Keep the file with the hidden states of an answer, if there is one."""
        if reply.states and self.states:
            await asyncio.to_thread(self.states.keep, reply.states)

    async def _ask(
        self,
        client: Any,
        request: Request,
        params: SamplingParams,
        dialect: Dialect,
        longest: int,
    ) -> Reply:
        fields = body(request, params, dialect, self.chat, self.seed)
        fields["extra_body"] = fields["extra_body"] | self.extra
        kind = client.chat.completions if "messages" in fields else client.completions
        sure = self.dialect is not None or self.server.model in self.models
        async with self.server.understood(self.dialect is None, sure):
            raw = await kind.with_raw_response.create(model=self.server.model, max_tokens=longest, **fields)
            try:
                return read_reply(raw.http_response.text)
            except ValueError as error:
                what = self.server.clean(str(error))
                raise TransientError(f"a reply that makes no sense ({what})", True) from None

    def _line(self, refusal: RefusedError, request: str) -> str:
        """Error message of a refusal, one line."""
        server, names = self.server, sorted(map(self.server.clean, self.models))
        if refusal.status in (401, 403):
            what = "refuses the key" if server.key else "wants a key"
            return f"{server}: {what} in {server.api_key_env} ({refusal})"
        if refusal.status == 404 or (self.dialect is None and server.model not in self.models):
            listed = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
            has = f"it lists {listed}" if names else "it lists none; does the url end in /v1?"
            return (
                f"{server.group}model={server.model}: {server.url} does not answer with it ({refusal}); {has}"
            )
        return f"{server}: refuses request {request} ({refusal})"

    def _report(self, answers: list[Answer]) -> None:
        """Report unusable answers; raise if there has been no usable one so far."""
        if not self.lost:
            self.useful = True
            return
        why = ", ".join(f"{count} {reason}" for reason, count in self.lost.items())
        self.useful = self.useful or any(answer.tokens for answer in answers)
        if not self.useful:
            raise UserError(f"{self.server}: no answer can be used: {why}")
        say(f"{self.server}: answers omitted: {why}")
        self.lost.clear()


def _length(value: Any) -> int | None:
    """A length that a server reports; None if it is invalid."""
    return value if type(value) is int and value > 0 else None
