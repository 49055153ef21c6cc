"""Prompts, the turns that the target answers, and the held-out split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from distill.utils.provenance import digest

Message = dict[str, Any]  # role, content, and what chat templates read besides: tool_calls, name, ...


class Prompt(NamedTuple):
    """A conversation for the target to continue.

    Attributes:
        id: in stores and reports.
        messages: for the chat template. The target answers every message of a user or tool that has no
            answer; answers in between are context.
        category: for tables by category.
        weight: of its rows in the loss.
        tools: schemas of functions that the target may call, for the chat template.
        file: from which it was read; empty if none.
        line: in that file, from 1.
    """

    id: str
    messages: tuple[Message, ...]
    category: str = ""
    weight: float = 1.0
    tools: tuple[dict[str, Any], ...] = ()
    file: str = ""
    line: int = 0


def turns(messages: Sequence[Message]) -> list[int]:
    """For each answer of the target, the number of messages before it."""
    places = []
    for i, message in enumerate(messages, 1):
        answered = i < len(messages) and messages[i]["role"] not in ("user", "system")
        if message["role"] in ("user", "tool") and not answered:
            places.append(i)
    return places


def unanswered(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages without a final answer."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return messages


def opening(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages up to the first one that the target answers, without a final answer."""
    messages = unanswered(messages)
    return tuple(messages[: turns(messages)[0]])


def question(prompt: Prompt) -> list[Message]:
    """System messages and the first user message, which identify a question in the held-out split."""
    messages = [m for m in prompt.messages if m["role"] != "assistant"]
    first = next((i for i, m in enumerate(messages, 1) if m["role"] != "system"), len(messages))
    return messages[:first]


def split(prompts: Sequence[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Train and held-out part, by hash of the question: conversations with the same question stay together.

    Held-out prompts are shuffled by hash, so that the first few are a fair sample even of a file that is
    sorted by category.
    """
    sides = [(p, hash64(question(p))) for p in prompts]
    held = sorted((pair for pair in sides if pair[1] < share * 2**64), key=lambda pair: pair[1])
    return [p for p, side in sides if side >= share * 2**64], [p for p, _ in held]


def held_out(train: Sequence[Prompt], held: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Drop held-out questions from `train`, and shuffle the held-out prompts as `split` does."""
    shuffled = sorted(held, key=lambda p: hash64(question(p)))
    questions = {hash64(question(p)) for p in held}
    return [p for p in train if hash64(question(p)) not in questions], shuffled


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Hash of the prompts' content, independent of file and line."""
    return digest(json.dumps([[p.id, p.messages, p.category, p.weight, p.tools] for p in prompts]))


def hash64(value: Any) -> int:
    """64-bit hash of a JSON value."""
    digest = hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
