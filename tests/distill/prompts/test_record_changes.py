"""Records with a field added, dropped, renamed or changed: what they say is in the prompt, or it is named."""

import json
import random

from record_shapes import READ

from decode.errors import UserError
from distill.prompts.records.fields import parse_json
from distill.prompts.records.forms import to_prompt

NAMES = (
    "thinking",
    "reasoning",
    "name",
    "weight",
    "train",
    "extra",
    "tool_calls",
    "role",
    "content",
    "value",
)
VALUES = ("zebra", "", None, 0, 1, 3.5, True, [], {}, [{}], ["okapi"], {"a": None}, {"b": "gnu"}, "\ud800")
# Fields that say how to read others.
KINDS = ("type", "role", "from", "url", "method")


def mutated(draw: random.Random, record: dict) -> dict:
    """A record with a field added, dropped, renamed or changed: of itself, or of one of its messages."""
    record = json.loads(json.dumps(record))
    places = [record, *(m for v in record.values() if isinstance(v, list) for m in v if isinstance(m, dict))]
    place = draw.choice(places)
    key = draw.choice([*place]) if place else "prompt"
    kind = draw.choice(("add", "drop", "rename", "change"))
    value = place.pop(key, None) if kind in ("drop", "rename") else draw.choice(VALUES)
    if kind != "drop":
        place[key if kind == "change" else draw.choice(NAMES)] = value
    return record


def leaves(value, path: str = ""):
    """Texts of a value, each with its path, JSON in texts included."""
    value = parse_json(value) if isinstance(value, str) and value[:1] in ("[", "{") else value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, path)
    elif isinstance(value, str) and value.strip() and path.rpartition(".")[2] not in KINDS:
        yield path, value


def test_a_changed_record_says_the_same_or_names_a_field_or_is_refused():
    draw, refused, named = random.Random(0), 0, 0
    for _ in range(1000):
        record, unread = mutated(draw, draw.choice([record for record, _, _ in READ.values()])), set()
        try:
            prompt = to_prompt(record, "1", unread=unread)
        except UserError as error:
            refused += "\n" not in str(error)
            continue
        named += bool(unread)
        whole = [*prompt.messages, *prompt.tools, prompt.id, prompt.category]
        said = "\n".join(text for _, text in leaves(whole))
        gone = {name.rpartition(".")[2] for name in unread} | {"answers"}
        for path, text in leaves(record):
            assert text in said or gone & set(path.split(".")), (path, text, record)
        if record.get("extra"):
            assert "extra" in unread
    assert refused > 50
    assert named > 50
