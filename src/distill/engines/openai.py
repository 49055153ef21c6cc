"""Answers from an OpenAI-compatible server: vLLM, SGLang, `transformers serve`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from decode.errors import UserError
from distill.engines.base import Answer, Law, Request
from distill.engines.http import PassingError, Patience, RefusedError, Server
from distill.engines.openai_protocol import (
    DIALECTS,
    Fields,
    Reply,
    body,
    read_reply,
    same_prompt,
    to_answer,
)
from distill.prompts.chat_template import Chat
from distill.utils.progress import bar, say

UNREADABLE = (400, 422)  # what servers say to fields that they do not know
NAMED = 8  # models of a server that a line names


class OpenAIEngine:
    """The target, as a server has it.

    Args:
        server: is asked.
        chat: the target's own, for what a server gives as text.
        seed: of all draws, for servers that heed it.
        context: tokens that the target has room for, or None.
        extra: fields for every request, of servers that are known to have them.

    Attributes:
        rounds: of every answer whose server said so, how many of its rounds kept 0, 1, ... drafted tokens.

    Raises:
        UserError: the package openai is missing, nobody answers at the url, or not with this key.
    """

    begins = False

    def __init__(
        self, server: Server, chat: Chat, seed: int, context: int | None, extra: Fields | None = None
    ) -> None:
        self.server, self.chat, self.seed, self.extra = server, chat, seed, extra or {}
        self.rounds: list[list[int]] = []
        self.patience = Patience(str(server), server.patience, server.retries, server.group, server.stored)
        self.dialect: Callable[[Law], Fields] | None = None
        self.lost: Counter[str] = Counter()
        self.warned = self.useful = False
        self.models: dict[str, int | None] = {}
        self.models = asyncio.run(self._look())
        room = self.models.get(server.model)
        self.context = min((c for c in (room, context) if c), default=None)

    def __call__(self, requests: Sequence[Request], law: Law) -> list[Answer]:
        """One answer for each request; an empty one where the server gave none that can be used."""
        return asyncio.run(self._answer_all(requests, law)) if requests else []

    async def _look(self) -> dict[str, int | None]:
        """Names of the models that the server lists, and the room of each."""

        async def look() -> dict[str, int | None]:
            # `transformers serve` fails at it where the machine has no cache of the Hub.
            async with self.server.understood(True, False):
                raw = await client.models.with_raw_response.list()
                try:
                    return {m["id"]: m.get("max_model_len") for m in raw.http_response.json()["data"]}
                except (AttributeError, KeyError, TypeError, ValueError):
                    raise RefusedError(404, "no list of models") from None

        async with self.server.client() as client:
            try:
                return await self.patience(look)
            except RefusedError as refusal:
                if refusal.status in (401, 403):
                    raise UserError(self._line(refusal, "")) from None
                return {}  # not every server has a list; the first request will tell

    async def _answer_all(self, requests: Sequence[Request], law: Law) -> list[Answer]:
        answers: dict[int, Answer] = {}
        slots = asyncio.Semaphore(self.server.concurrency)

        async def answer(place: int) -> None:
            async with slots:
                answers[place] = await self._answer(client, requests[place], law)
            shown.update()

        with bar(len(requests), "answers", "answers", leave=False) as shown:
            async with self.server.client() as client:
                if self.dialect is None:
                    self.dialect = await self._settle(client, requests[0], law)
                try:
                    async with asyncio.TaskGroup() as tasks:
                        for place in range(len(requests)):
                            tasks.create_task(answer(place))
                except BaseExceptionGroup as failed:
                    raise failed.exceptions[0] from None
        self._report(list(answers.values()))
        return [answers[place] for place in range(len(requests))]

    async def _settle(self, client: Any, request: Request, law: Law) -> Callable[[Law], Fields]:
        """Which of the dialects the server reads: found with one token, before the work."""
        refused = ""
        for dialect in DIALECTS:
            try:
                reply = await self.patience(lambda fields=dialect: self._ask(client, request, law, fields, 1))
            except RefusedError as refusal:
                if refusal.status not in UNREADABLE or dialect is DIALECTS[-1]:
                    raise UserError(self._line(refusal, request.id)) from None
                refused = refused or f" ({refusal})"
            else:
                if reply.ids is None:
                    say(f"{self.server}: gives no token ids{refused}; its texts are encoded again")
                return dialect
        raise AssertionError("the last dialect neither answered nor raised")

    async def _answer(self, client: Any, request: Request, law: Law) -> Answer:
        dialect = self.dialect
        assert dialect, "asked before it was known how"
        longest = law.max_new_tokens
        if self.context:
            longest = min(longest, self.context - len(request.tokens))
        try:
            reply = await self.patience(lambda: self._ask(client, request, law, dialect, longest))
        except RefusedError as refusal:
            raise UserError(self._line(refusal, request.id)) from None
        if not self.warned and not same_prompt(reply, request):
            self.warned = True
            say(
                f"{self.server}: it reads prompt {request.id} as {_length(reply)} tokens, where the target's "
                f"chat template gives {len(request.tokens)}, or others; is it the same model?"
            )
        if reply.rounds is not None:
            self.rounds.append(reply.rounds)
        answer = to_answer(reply, request, law, self.chat)
        if isinstance(answer, str):
            self.lost[answer] += 1
            return Answer([], False, False)
        return answer

    async def _ask(
        self, client: Any, request: Request, law: Law, dialect: Callable[[Law], Fields], longest: int
    ) -> Reply:
        fields = body(request, law, dialect, self.chat, self.seed)
        fields["extra_body"] = fields["extra_body"] | self.extra
        kind = client.chat.completions if "messages" in fields else client.completions
        sure = self.dialect is not None or self.server.model in self.models
        async with self.server.understood(self.dialect is None, sure):
            raw = await kind.with_raw_response.create(model=self.server.model, max_tokens=longest, **fields)
            try:
                return read_reply(raw.http_response.text)
            except ValueError as error:
                what = self.server.clean(str(error))
                raise PassingError(f"a reply that makes no sense ({what})", True) from None

    def _line(self, refusal: RefusedError, request: str) -> str:
        """A refusal as the one line that is shown."""
        server, names = self.server, sorted(self.models)
        if refusal.status in (401, 403):
            what = "refuses the key" if server.key else "wants a key"
            return f"{server}: {what} in {server.api_key_env} ({refusal})"
        if refusal.status == 404 or (self.dialect is None and server.model not in names):
            listed = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
            has = f"it lists {listed}" if names else "it lists none; does the url end in /v1?"
            return (
                f"{server.group}model={server.model}: {server.url} does not answer with it ({refusal}); {has}"
            )
        return f"{server}: refuses request {request} ({refusal})"

    def _report(self, answers: list[Answer]) -> None:
        """What was lost is said; where it was everything so far, there is nothing to go on with."""
        if not self.lost:
            self.useful = True
            return
        why = ", ".join(f"{count} {reason}" for reason, count in self.lost.items())
        self.useful = self.useful or any(answer.tokens for answer in answers)
        if not self.useful:
            raise UserError(f"{self.server}: no answer can be used: {why}")
        say(f"{self.server}: answers left out: {why}")
        self.lost.clear()


def _length(reply: Reply) -> int | None:
    return reply.prompt_length if reply.prompt is None else len(reply.prompt)
