"""What a prompt is, where the target answers it, and which prompts are held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from distill.utils.provenance import digest

Message = dict[str, Any]  # role, content, and what chat templates read besides: tool_calls, name, ...


class Prompt(NamedTuple):
    """A conversation the target is to continue.

    Attributes:
        id: names it in stores and reports.
        messages: as a chat template reads them. The target answers wherever a user's or a tool's
            message has no answer behind it; answers that are given, in between, are context.
        category: for tables by category.
        weight: what its rows count in the loss.
        tools: schemas of the functions that the target may call, for the chat template.
        file: that it was read from; empty where it was not.
        line: in that file, from 1 on.
    """

    id: str
    messages: tuple[Message, ...]
    category: str = ""
    weight: float = 1.0
    tools: tuple[dict[str, Any], ...] = ()
    file: str = ""
    line: int = 0


def turns(messages: Sequence[Message]) -> list[int]:
    """Where the target is to answer: how many messages stand before each answer."""
    places = []
    for i, message in enumerate(messages, 1):
        answered = i < len(messages) and messages[i]["role"] not in ("user", "system")
        if message["role"] in ("user", "tool") and not answered:
            places.append(i)
    return places


def unanswered(messages: Sequence[Message]) -> Sequence[Message]:
    """Without the answer that ends them, where there is one."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return messages


def opening(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Up to the first place where the target is to answer, an answer given at the end left out."""
    asked = unanswered(messages)
    return tuple(asked[: turns(asked)[0]])


def question(prompt: Prompt) -> list[Message]:
    """What makes it the same question as another: system texts and what the user says first."""
    asked = [m for m in prompt.messages if m["role"] != "assistant"]
    first = next((i for i, m in enumerate(asked, 1) if m["role"] != "system"), len(asked))
    return asked[:first]


def split(prompts: Sequence[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Train and held-out part, by hash of the question: it falls on the same side, however it goes on.

    The held-out ones are mixed, so that any first few of them are a fair sample of a file sorted
    by category.
    """
    sides = [(p, hash64(question(p))) for p in prompts]
    held = sorted((pair for pair in sides if pair[1] < share * 2**64), key=lambda pair: pair[1])
    return [p for p, side in sides if side >= share * 2**64], [p for p, _ in held]


def held_out(train: Sequence[Prompt], held: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Drop from `train` every question that is held out, and mix the held-out prompts as `split` does."""
    mixed = sorted(held, key=lambda p: hash64(question(p)))
    asked = {hash64(question(p)) for p in held}
    return [p for p in train if hash64(question(p)) not in asked], mixed


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Hash of what the prompts say, wherever they were read."""
    return digest(json.dumps([[p.id, p.messages, p.category, p.weight, p.tools] for p in prompts]))


def hash64(value: Any) -> int:
    """Of what JSON can hold, from 0 to 2**64 - 1."""
    digest = hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
