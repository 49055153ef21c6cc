"""Where prompts come from, and which of them are held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from decode.errors import UserError

ROLES = ("system", "user", "assistant", "tool")


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
    """

    id: str
    messages: tuple[Message, ...]
    category: str = ""
    weight: float = 1.0
    tools: tuple[dict[str, Any], ...] = ()


def turns(messages: Sequence[Message]) -> list[int]:
    """Where the target is to answer: how many messages stand before each answer."""
    places = []
    for i, message in enumerate(messages, 1):
        answered = i < len(messages) and messages[i]["role"] not in ("user", "system")
        if message["role"] in ("user", "tool") and not answered:
            places.append(i)
    return places


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a JSONL file of `{"id", "messages"}` or Spec-Bench `{"question_id", "turns"}` records.

    Of `turns` the first is asked. `id` may be missing; it is then the line number.

    Raises:
        UserError: no such file, no prompts, or a malformed line (with file and line number).
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"prompts={path}: no such file; give a JSONL file or one of conf/prompts")
    prompts = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                prompts.append(parse_prompt(line, f"{path}:{number}", str(number)))
    if not prompts:
        raise UserError(f"{path}: no prompts in it; give one JSON record a line")
    return prompts


def parse_prompt(line: bytes, where: str, default_id: str) -> Prompt:
    """Read one record; `where` begins what is said of a malformed one.

    Raises:
        UserError: what is wrong with it.
    """
    try:
        record = json.loads(line.decode("utf-8-sig"))  # a byte order mark is no part of the text
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected an object, got {type(record).__name__}")
    messages = record.get("messages")
    if messages is None and isinstance(record.get("turns"), list) and record["turns"]:
        messages = [{"role": "user", "content": record["turns"][0]}]
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: needs a non-empty list 'messages' (or 'turns')")
    for message in messages:
        fine = isinstance(message, dict) and message.get("role") in ROLES
        if not fine or not _is_text(message.get("content")):
            raise UserError(f"{where}: each message needs a role of {', '.join(ROLES)} and a text 'content'")
    if all(message["role"] == "assistant" for message in messages):
        raise UserError(f"{where}: only the assistant speaks in it; there is nothing to answer")
    names = (record.get("id"), record.get("question_id"), default_id)
    name = next(str(name) for name in names if name is not None)
    return Prompt(name, tuple({"role": m["role"], "content": m["content"]} for m in messages))


def _is_text(value: Any) -> bool:
    # JSON can spell half a surrogate pair, which no tokenizer reads.
    return isinstance(value, str) and value != "" and not any("\ud800" <= c <= "\udfff" for c in value)


def split(prompts: Sequence[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Train and held-out part, by hash of the text: a prompt always falls on the same side.

    The held-out ones are mixed, so that any first few of them are a fair sample of a file sorted
    by category.
    """
    held = sorted((p for p in prompts if _hash(p) < share * 2**64), key=_hash)
    return [p for p in prompts if _hash(p) >= share * 2**64], held


def held_out(train: Sequence[Prompt], held: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Drop from `train` what is held out, and mix the held-out prompts as `split` does."""
    asked = {json.dumps(p.messages) for p in held}
    mixed = sorted(held, key=_hash)
    return [p for p in train if json.dumps(p.messages) not in asked], mixed


def _hash(prompt: Prompt) -> int:
    digest = hashlib.blake2b(json.dumps(prompt.messages).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
