"""Prompts, the turns that the target answers, and the held-out split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

INSTRUCTING = ("system", "developer")  # roles without an answer
Message = dict[str, Any]  # role, content, and optional keys of chat templates: tool_calls, name, ...


@dataclass(slots=True)
class Prompt:
    """A conversation for the target to continue.

    Attributes:
        id: id in stores and reports.
        packed: messages and tools as UTF-8 JSON, see `pack`; objects would take several times the memory.
        category: category in tables.
        weight: weight of its rows in the loss.
        file: source file; may be empty.
        line: line in that file, from 1.
        reference: for held-out prompts, the first answer in the record, for judges.
    """

    id: str
    packed: bytes
    category: str = ""
    weight: float = 1.0
    file: str = ""
    line: int = 0
    reference: str = ""
    _content: int | None = field(default=None, init=False, repr=False, compare=False)
    _question: int | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, name: str, messages: Sequence[Message], tools: Sequence[dict] = (), **more: Any) -> Self:
        """Build a prompt from messages and tools; `more` are other attributes."""
        return cls(name, pack(messages, tools), **more)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Messages for the chat template, parsed on every access.

        The target answers every message of a user or tool that has no answer; existing answers are context.
        """
        return tuple(json.loads(self.packed)[0])

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """Schemas of functions that the target may call, parsed on every access."""
        return tuple(json.loads(self.packed)[1])

    @property
    def content_hash(self) -> int:
        """Hash of messages and tools, independent of `question_hash`."""
        if self._content is None:
            self._content = hash64([self.messages, self.tools])
        return self._content

    @property
    def question_hash(self) -> int:
        """Hash of the question, for the held-out split."""
        if self._question is None:
            self._question = hash64(question(self))
        return self._question


def pack(messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> bytes:
    """Encode messages and tools as UTF-8 JSON.

    Raises:
        TypeError: a value that JSON cannot represent.
        ValueError: a number that is not finite, or text that UTF-8 cannot encode.
    """
    return json.dumps([messages, tools], ensure_ascii=False, allow_nan=False).encode()


def turns(messages: Sequence[Message]) -> list[int]:
    """Number of messages before each answer of the target."""
    places = []
    for i, message in enumerate(messages, 1):
        answered = i < len(messages) and messages[i]["role"] not in ("user", *INSTRUCTING)
        if message["role"] in ("user", "tool") and not answered:
            places.append(i)
    return places


def unanswered(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages without a final answer."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return messages


def answered(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages, with `text` as every answer of the target."""
    messages, places = unanswered(messages), set(turns(unanswered(messages)))
    whole: list[Message] = []
    for i, message in enumerate(messages, 1):
        whole += [message, {"role": "assistant", "content": text}] if i in places else [message]
    return whole


def opening(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages up to the first answer of the target, without a final answer."""
    messages = unanswered(messages)
    return tuple(messages[: turns(messages)[0]])


def question(prompt: Prompt) -> list[Message]:
    """Messages that identify a question in the held-out split: instructions and first user message."""
    messages = [m for m in prompt.messages if m["role"] != "assistant"]
    first = next((i for i, m in enumerate(messages, 1) if m["role"] not in INSTRUCTING), len(messages))
    return messages[:first]


def split(prompts: Sequence[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Split into training and held-out prompts, by hash of the question, so equal questions stay together.

    Held-out prompts are shuffled by hash, so that the first few are a fair sample even of a sorted file.
    """
    held = sorted((p for p in prompts if p.question_hash < share * 2**64), key=lambda p: p.question_hash)
    return [p for p in prompts if p.question_hash >= share * 2**64], held


def held_out(train: Sequence[Prompt], held: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Drop held-out questions from `train`, and shuffle held-out prompts like `split`."""
    shuffled = sorted(held, key=lambda p: p.question_hash)
    questions = {p.question_hash for p in held}
    return [p for p in train if p.question_hash not in questions], shuffled


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Hash of the prompts' content as one JSON list, independent of file and line."""
    digest = hashlib.sha256(b"[")
    for number, p in enumerate(prompts):
        text = json.dumps([p.id, p.messages, p.category, p.weight, p.tools])
        digest.update((", " * bool(number) + text).encode())
    digest.update(b"]")
    return digest.hexdigest()[:16]


def ids_digest(prompts: Sequence[Sequence[int]]) -> str:
    """Hash of the token ids of prompts, in order."""
    text = json.dumps([list(ids) for ids in prompts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash64(value: Any) -> int:
    """64-bit hash of a JSON value."""
    digest = hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
