"""Where prompts come from, and how a conversation becomes token ids."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from distill.provenance import digest

ROLES = ("system", "user", "assistant", "tool")


class Prompt(NamedTuple):
    """A conversation the target is to continue."""

    id: str
    messages: tuple[dict[str, str], ...]


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


class Chat:
    """A tokenizer's chat template, or plain text where there is none.

    Args:
        tokenizer: of the target.
        template: `chat` renders with the tokenizer's template, `none` joins the messages' text.

    Raises:
        UserError: `chat` asked of a tokenizer without a template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str = "chat") -> None:
        if template not in ("chat", "none"):
            raise UserError(f"prompts.template={template}: choose chat or none")
        if template == "chat" and not tokenizer.chat_template:
            raise UserError(
                "target: its tokenizer has no chat template; base models need prompts.template=none"
            )
        self.tokenizer, self.template = tokenizer, template

    def fingerprint(self) -> str:
        """Tells this vocabulary and template from another's."""
        vocabulary = json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        return digest(vocabulary + str(self.tokenizer.chat_template))

    def encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids up to where the target's answer begins; an answer that ends them is left out."""
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if self.template == "none":
            return self.tokenizer.encode("\n".join(m["content"] for m in messages))
        return self._render(messages, add_generation_prompt=True)["input_ids"]

    def encode_answered(self, messages: Sequence[dict[str, str]]) -> tuple[list[int], list[int]]:
        """Token ids of a whole conversation, and 1 where the assistant wrote them.

        The mask is the template's `{% generation %}` blocks; where it has none, what rendering
        without the last answer lacks.

        Raises:
            UserError: the mask came out all 0 or all 1, or the answer does not extend its prompt.
        """
        if messages[-1]["role"] != "assistant":
            raise UserError("rollout=given: the last message of every record must be the answer")
        if self.template == "none":
            head = self.encode(messages)
            # On its own, lest a token spans the border.
            answer = self.tokenizer.encode("\n" + messages[-1]["content"], add_special_tokens=False)
            ids, mask = head + answer, [0] * len(head) + [1] * len(answer)
        elif re.search(r"\{%-?\s*generation", str(self.tokenizer.chat_template)):
            out = self._render(messages, return_assistant_tokens_mask=True)
            ids, mask = out["input_ids"], out["assistant_masks"]
        else:
            head, ids = self.encode(messages), self._render(messages)["input_ids"]
            if ids[: len(head)] != head:
                raise UserError(
                    "target: its chat template renders an answer differently from its prompt, so no "
                    "loss mask can be read off it; add {% generation %} marks to the template"
                )
            mask = [0] * len(head) + [1] * (len(ids) - len(head))
        if len(set(mask)) < 2:
            raise UserError(
                f"target: the chat template's loss mask is all {mask[0] if mask else 0}; "
                "nothing (or everything) would be trained on"
            )
        return [int(i) for i in ids], [int(m) for m in mask]

    def user_turn(self) -> tuple[list[int], list[int]]:
        """Ids before a user's text and ids after it, up to where the answer begins."""
        if self.template == "none":
            start: Any = self.tokenizer.bos_token_id
            return ([] if start is None else [start]), []
        marker = "\u2407"
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
        )
        before, _, after = str(text).partition(marker)
        encode = self.tokenizer.encode
        return encode(before, add_special_tokens=False), encode(after, add_special_tokens=False)

    def _render(self, messages: Sequence[dict[str, str]], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=True, return_dict=True, **options
            )
        except TemplateError as error:  # templates may refuse roles, or their order
            start = messages[0]["content"][:60]
            raise UserError(f"target: its chat template refuses the prompt {start!r}: {error}") from None
