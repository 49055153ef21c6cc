"""Access to a record's values; tracks which fields were read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

SHOWN_FIELDS = 5  # maximum number of unread fields in a message


class Fields:
    """A JSON object that tracks which fields were read.

    Args:
        values: values of the object.
        ignored: fields without meaning, which are not reported as unread.
    """

    def __init__(self, values: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
        self.values, self._read = values, set(ignored)

    def get(self, name: str) -> Any:
        """A field's value; None if absent or empty."""
        value = self.raw(name)
        return None if is_empty(value) else value

    def raw(self, name: str) -> Any:
        """A field's value, including empty ones; None if absent."""
        self._read.add(name)
        return self.values.get(name)

    def first(self, names: Collection[str]) -> str | None:
        """The first of these fields that has a value; later ones stay unread."""
        return next((name for name in names if self.get(name) is not None), None)

    def unread(self, prefix: str = "") -> set[str]:
        """Names of unread fields that have a value."""
        return {f"{prefix}{k}" for k, v in self.values.items() if k not in self._read and not is_empty(v)}


def describe_unread(counts: Counter[str]) -> str:
    """Describe which fields were not read, and in how many records, the most common first."""
    shown = [
        f"`{name}` of {count:,} record{'s' * (count > 1)}" for name, count in counts.most_common(SHOWN_FIELDS)
    ]
    more, many = len(counts) - len(shown), len(counts) > 1
    return (
        f"field{'s' * many} {', '.join(shown)}{f', and {more} more,' if more else ''} "
        f"{'were' if many else 'was'} not read"
    )


def is_empty(value: Any) -> bool:
    """Whether a value is null, or an empty text, list or object."""
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)


def is_text(value: Any, empty: bool = False) -> bool:
    """Whether this is a valid text for a tokenizer; blank texts only with `empty`."""
    if not isinstance(value, str) or not (empty or value.strip()):
        return False
    try:
        value.encode()  # JSON can contain lone surrogates, which tokenizers reject
    except UnicodeEncodeError:
        return False
    return True


class JsonReader:
    """A JSON decoder that detects duplicate keys in an object; a plain decoder drops the first.

    Attributes:
        twice: duplicate keys in the last value.
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
        """Decode a whole text; raises like `json.loads`."""
        self.twice = []
        return self._decoder.decode(text)

    def read_from(self, text: str, place: int) -> tuple[Any, int]:
        """Decode the value at an offset; also returns its end."""
        self.twice = []
        return self._decoder.raw_decode(text, place)

    @property
    def fault(self) -> str:
        """Why the last value cannot be used; empty if it can."""
        return f"the key {self.twice[0]!r} stands twice in an object" if self.twice else ""


def parse_json(value: Any) -> Any:
    """Decode a JSON text; returns other values, and JSON with duplicate keys, unchanged."""
    if isinstance(value, str):
        reader = JsonReader()
        try:
            parsed = reader.read(value)
            return value if reader.twice else parsed
        except (ValueError, RecursionError):
            pass
    return value


def without_null(value: Any) -> Any:
    """Drop null entries: columnar files give every object all keys."""
    if isinstance(value, dict):
        return {key: without_null(v) for key, v in value.items() if v is not None}
    return [without_null(v) for v in value] if isinstance(value, list) else value
