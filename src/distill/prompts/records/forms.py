"""Parse a record of a file or dataset, in any of the common formats, into a Prompt.

A record is one JSON object. The first key of `FORMS` in it determines its format: OpenAI's `messages`, a
request's `body`, MT-Bench's `turns`, ShareGPT's `conversations`, Alpaca's `instruction` (and `input`, Dolly's
`context`), or a plain `prompt`, `question` (SQuAD's with its `context`), `query`, `text` or `input` with an
answer under one of `ANSWERS`. docs/data.md has examples.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from decode.errors import UserError
from distill.prompts.prompt import INSTRUCTING, Prompt, pack, turns, unanswered
from distill.prompts.records.fields import Fields, JsonReader, is_empty, parse_json, without_null
from distill.prompts.records.messages import REASONING, role_of, to_messages, uses_tools

# The first of these keys that a record has determines its format.
LISTS = ("messages", "turns", "conversations", "conversation")
TEXTS = ("instruction", "prompt", "question", "query", "text", "input")
REQUESTS = ("body", "params")  # keys of requests in batch files: OpenAI's, Anthropic's
FORMS = ("messages", *REQUESTS, *LISTS[1:], *TEXTS)
# Additional fields of a form's question, in the order of rendering.
ASKED = {"instruction": ("instruction", "input", "context"), "question": ("context", "question")}
ANSWERS = ("answer", "response", "output", "completion", "answers")
SYSTEMS = ("system", "system_prompt")
CONTENT = (*FORMS, *ANSWERS, *SYSTEMS, "context", "history", *REASONING)
IDS = ("id", "question_id", "task_id", "prompt_id", "custom_id")
WEIGHTS = ("weight", "reward")
FIELDS = (*CONTENT, *IDS, *WEIGHTS, "category", "tools", "functions")  # all keys that are read
PRINTED = re.compile(r"\s*\[\s*\{'(role|from|content|value)'\s*:")
ANSWERED = ("/completions", "/responses", "/messages")  # paths of requests that have an answer
Tools = tuple[dict[str, Any], ...]


def parse_prompt(line: bytes, where: str, default_id: str) -> Prompt:
    """Parse one line of JSON; `where` is the prefix of error messages.

    Raises:
        UserError: malformed record.
    """
    try:
        return to_prompt(parse(line), default_id)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def parse(line: bytes) -> Any:
    """Parse a line as JSON.

    Raises:
        UserError: not UTF-8, not JSON, or a duplicate key.
    """
    reader = JsonReader()
    try:
        value = reader.read(line.decode("utf-8-sig"))  # skips a byte order mark
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError):  # very long numbers, very deep nesting
        raise UserError("not JSON (numbers too long, or nested too deep)") from None
    if reader.fault:
        raise UserError(reader.fault)
    return value


def to_prompt(
    record: Any,
    default_id: str,
    answers: str = "keep",
    columns: Mapping[str, str] | None = None,
    *,
    columnar: bool = False,
    unread: set[str] | None = None,
) -> Prompt:
    """Convert a parsed record to a Prompt.

    Args:
        record: record; FIELDS of it are used.
        default_id: id of records without one.
        answers: `keep` the record's answers, or `drop` those without tool calls, so that the target
            writes its own.
        columns: field -> its name or path (`body.messages`) in the record. If one of them is a format of
            FORMS, other content fields are ignored.
        columnar: the record is a row of a table, with nulls for absent keys.
        unread: output set of unread fields with a value.

    Raises:
        UserError: malformed record.
    """
    if not isinstance(record, dict):
        raise UserError(f"expected an object, got {type(record).__name__}")
    unread = set() if unread is None else unread
    columns = columns or {}
    fields = _rename_columns(record, columns)
    name, category = _string_field(fields, IDS) or default_id, _string_field(fields, ("category",))
    weight = _weight(fields)
    raw, tools = _conversation(fields, unread, columnar)
    if answers == "drop" and not tools and not any(map(uses_tools, raw)):
        raw = [m for m in raw if role_of(m) != "assistant"]
    messages = to_messages(raw, unread, columnar)
    if not turns(unanswered(messages)):
        no_user = messages and all(m["role"] == "assistant" for m in messages)
        reason = "only the assistant speaks in it" if no_user else "the last message is no user's or tool's"
        raise UserError(f"{reason}; there is nothing to answer")
    unread |= _unread(record, fields, columns)
    try:  # columns can hold dates or bytes, and any text lone surrogates
        (name + category).encode()
        return Prompt(name, pack(messages, tools), category, weight)
    except (TypeError, ValueError, RecursionError):
        raise UserError("an id, category or tool cannot be encoded as UTF-8 JSON") from None


def _rename_columns(record: dict[str, Any], columns: Mapping[str, str]) -> Fields:
    names_content = any(field in FORMS for field in columns)
    rest = {k: v for k, v in record.items() if not (names_content and k in CONTENT)}
    return Fields(rest | {field: _column(record, column) for field, column in columns.items()})


def _column(record: dict[str, Any], column: str) -> Any:
    """Value of a column, or of a path into one (`body.messages`)."""
    value: Any = record
    for name in [column] if column in record else column.split("."):
        value = parse_json(value)
        if not isinstance(value, dict) or name not in value:
            raise UserError(f"no column {column!r}; it has {', '.join(map(str, record)) or 'none'}")
        value = value[name]
    return value


def _unread(record: dict[str, Any], fields: Fields, columns: Mapping[str, str]) -> set[str]:
    """Unread fields of a record that have a value, under the record's own names."""
    unread = fields.unread()
    read = {column for field, column in columns.items() if field not in unread}
    paths = {column for column in columns.values() if column not in record}
    tops = {column.partition(".")[0] for column in paths} | set(columns.values())
    hidden = {k for k in record.keys() - tops if k in columns or k not in fields.values}
    named = {columns.get(name, name) for name in unread} | {k for k in hidden if not is_empty(record[k])}
    for top, _, rest in (column.partition(".") for column in paths):
        named |= Fields(parse_json(record[top]), ignored=(rest.partition(".")[0],)).unread(f"{top}.")
    return named - read - {column.partition(".")[0] for column in paths}


def _conversation(
    fields: Fields, unread: set[str], columnar: bool, request: bool = False
) -> tuple[list[Any], Tools]:
    """Messages of a record of any format, not validated, and its tools."""
    form = _form(fields, request)
    if form in REQUESTS:
        if isinstance(fields.values.get("method"), str):
            fields.raw("method")  # POST
        if (address := fields.get("url")) and not str(address).rstrip("/").endswith(ANSWERED):
            raise UserError(
                f"'url' is {address}, a path without an answer; give requests to {' or '.join(ANSWERED)}"
            )
        inner = Fields(parse_json(fields.raw(form)))
        conversation = _conversation(inner, unread, columnar, request=True)
        unread |= inner.unread(f"{form}.")
        return conversation
    content = parse_json(fields.raw(form)) if form in LISTS else fields.raw(form)
    if form in LISTS and (not isinstance(content, list) or not content):
        raise UserError(
            "needs a non-empty list 'messages' (or 'turns', 'conversations'), or a text 'instruction', "
            f"'prompt', 'question' or 'text'; it has {', '.join(map(str, fields.values)) or 'no field'}; "
            "prompts.columns={prompt: ...} names the field of the question"
        )
    if form in LISTS:
        messages = [_user(v) if form == "turns" and not isinstance(v, dict) else v for v in content]
    else:
        messages = _asked(fields, form, content)
    systems = (*SYSTEMS, "instructions") if request else SYSTEMS
    first = messages[0] if role_of(messages[0]) in INSTRUCTING else None
    if first is None and (name := fields.first(systems)):
        messages.insert(0, {"role": "system", "content": fields.raw(name)})
    return messages, _tools(fields, columnar)


def _form(fields: Fields, request: bool) -> str:
    names = [name for name in FORMS if not is_empty(fields.values.get(name))]
    for name in names:
        if name in REQUESTS:  # other records use these keys differently
            value = parse_json(fields.values[name])
            if not request and isinstance(value, dict) and any(form in value for form in FORMS):
                return name
        elif name not in LISTS[1:] or isinstance(parse_json(fields.values[name]), list):  # or a number
            return name
    given = [name for name in FORMS if name not in REQUESTS and fields.values.get(name) is not None]
    return (given or ["messages"])[0]


def _user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _asked(fields: Fields, form: str, content: Any) -> list[Any]:
    """Messages of a record with one question, and earlier turns."""
    messages: list[Any] = []
    for asked, answer in _pairs(fields):
        messages += [_user(asked), {"role": "assistant", "content": answer}]
    if (given := _messages_in(content)) is not None:
        messages += given
    else:
        texts = {name: fields.raw(name) for name in ASKED.get(form, (form,)) if _is_asked(fields, form, name)}
        if len(texts) > 1 and not all(isinstance(text, str) for text in texts.values()):
            raise UserError(f"{' and '.join(map(repr, texts))} must be texts")
        messages.append(_user("\n\n".join(texts.values()) if len(texts) > 1 else content))
    return messages + _answer(fields)


def _answer(fields: Fields) -> list[Any]:
    """The assistant's message of a record with one question; empty without an answer."""
    for name in ANSWERS:
        value = fields.get(name)
        if name == "answers":  # SQuAD's, TriviaQA's: several texts for the same answer
            value = _first_text(value)
        if value is None:
            continue
        if (given := _messages_in(value)) is not None:
            return given
        if not isinstance(value, str):
            raise UserError(f"{name!r} must be a text, the content of the assistant's message")
        reasoning = {key: fields.raw(key) for key in REASONING if fields.get(key) is not None}
        return [{"role": "assistant", "content": value} | reasoning]
    return []


def _first_text(answers: Any) -> Any:
    if isinstance(answers, dict):
        answers = answers.get("text")
    while isinstance(answers, list):
        answers = answers[0] if answers else None
    return answers.get("text") if isinstance(answers, dict) else answers


def _is_asked(fields: Fields, form: str, name: str) -> bool:
    """Whether a field belongs to the question; a context of another type stays unread."""
    value = fields.values.get(name)
    return name == form or (not is_empty(value) and (name != "context" or isinstance(value, str)))


def _pairs(fields: Fields) -> list[Any]:
    """Earlier questions and answers of LLaMA-Factory's `history`; empty if it is anything else."""
    turns = fields.values.get("history")
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        return []
    return fields.raw("history")


def _messages_in(value: Any) -> list[Any] | None:
    """Messages, possibly as JSON text, in a place for text; None for any other value.

    Raises:
        UserError: messages in Python's notation, which is no JSON.
    """
    if isinstance(value, str) and PRINTED.match(value):
        raise UserError("messages in Python's notation instead of a text; write them as JSON")
    found = parse_json(value)
    if isinstance(found, dict) and found is not value:
        found = found.get("messages")
    if not isinstance(found, list) or not found or not all(isinstance(m, dict) for m in found):
        return None
    return found if found is value or all(role_of(m) for m in found) else None


def _tools(fields: Fields, columnar: bool) -> Tools:
    """Schemas of functions, in OpenAI's form."""
    name = "tools" if fields.values.get("tools") not in (None, "", []) else "functions"
    tools = parse_json(fields.raw(name))  # some datasets store schemas as JSON texts
    if tools is None or tools == "":
        return ()
    tools = [parse_json(tool) for tool in tools] if isinstance(tools, list) else None
    if tools is None or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{name!r} must be a list of schemas")
    try:
        without = [without_null(tool) for tool in tools]
        return tuple(map(_schema, without if columnar else tools))
    except RecursionError:
        raise UserError(f"{name!r} is nested too deep") from None


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert a schema of Anthropic's form, or a plain function, to OpenAI's form."""
    if (kind := tool.get("type", "function")) not in ("function", "custom", None):
        raise UserError(f"a tool of type {kind!r}; only schemas of functions can be written")
    if "name" not in tool or "function" in tool:
        return tool
    function = {"parameters" if k == "input_schema" else k: v for k, v in tool.items() if k != "type"}
    return {"type": "function", "function": function}


def _string_field(fields: Fields, names: Sequence[str]) -> str:
    """The first of these fields that the record has, as a string."""
    for name in names:
        value = fields.raw(name)
        if value not in (None, ""):
            if isinstance(value, bool) or not isinstance(value, str | int):
                raise UserError(f"{name!r} must be a text or a whole number")
            return str(value)
    return ""


def _weight(fields: Fields) -> float:
    name = next((name for name in WEIGHTS if fields.values.get(name) is not None), None)
    if name is None:
        return 1.0
    value = fields.raw(name)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1e300:  # an int may exceed any float
        raise UserError(f"{name!r} must be a finite number that is at least 0")
    return float(value)
