"""Values of a record, and which of its fields were read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

SHOWN_FIELDS = 5  # that were not read


class Fields:
    """A JSON object that remembers which fields were asked for, so that the others can be named.

    Args:
        values: of the object.
        ignored: fields that are neither used nor named, since their values mean nothing.
    """

    def __init__(self, values: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
        self.values, self._read = values, set(ignored)

    def get(self, name: str) -> Any:
        """A field's value; None where it is absent or empty."""
        value = self.raw(name)
        return None if is_empty(value) else value

    def raw(self, name: str) -> Any:
        """A field's value, empty ones as they are; None where it is absent."""
        self._read.add(name)
        return self.values.get(name)

    def first(self, names: Collection[str]) -> str | None:
        """The first of these fields that has a value; those behind it are not read."""
        return next((name for name in names if self.get(name) is not None), None)

    def unread(self, prefix: str = "") -> set[str]:
        """Names of the fields that have a value, and that nothing read."""
        return {f"{prefix}{k}" for k, v in self.values.items() if k not in self._read and not is_empty(v)}


def describe_unread(counts: Counter[str]) -> str:
    """Which fields of how many records were not read, the commonest first."""
    shown = [
        f"`{name}` of {count:,} record{'s' * (count > 1)}" for name, count in counts.most_common(SHOWN_FIELDS)
    ]
    more, many = len(counts) - len(shown), len(counts) > 1
    return (
        f"field{'s' * many} {', '.join(shown)}{f', and {more} more,' if more else ''} "
        f"{'were' if many else 'was'} not read"
    )


def is_empty(value: Any) -> bool:
    """Whether a value says nothing: null, or an empty text, list or object."""
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)


def is_text(value: Any, empty: bool = False) -> bool:
    """Whether this is a text that a tokenizer takes; blank ones are none unless `empty`."""
    if not isinstance(value, str) or not (empty or value.strip()):
        return False
    try:
        value.encode()  # JSON can contain lone surrogates, which tokenizers reject
    except UnicodeEncodeError:
        return False
    return True


class JsonReader:
    """A JSON decoder that notices keys that stand twice in one object: the first of the two would be gone.

    Attributes:
        twice: such keys, in what was read last.
    """

    def __init__(self) -> None:
        self.twice: list[str] = []
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            self.twice.append(next(name for name in names if names.count(name) > 1))
        return made

    def read(self, text: str) -> Any:
        """The value of a whole text; raises as `json.loads`."""
        self.twice = []
        return self._decoder.decode(text)

    def read_from(self, text: str, place: int) -> tuple[Any, int]:
        """The value that begins at a place, and where it ends."""
        self.twice = []
        return self._decoder.raw_decode(text, place)

    @property
    def fault(self) -> str:
        """Why what was read last cannot be used; empty if it can."""
        return f"the key {self.twice[0]!r} stands twice in an object" if self.twice else ""


def parse_json(value: Any) -> Any:
    """The value of a JSON text; anything else, and JSON with a key that stands twice, unchanged."""
    if isinstance(value, str):
        reader = JsonReader()
        try:
            parsed = reader.read(value)
            return value if reader.twice else parsed
        except (ValueError, RecursionError):
            pass
    return value


def without_null(value: Any) -> Any:
    """Drop null entries: columnar files give every object the keys of all others."""
    if isinstance(value, dict):
        return {key: without_null(v) for key, v in value.items() if v is not None}
    return [without_null(v) for v in value] if isinstance(value, list) else value
