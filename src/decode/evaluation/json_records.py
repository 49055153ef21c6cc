"""Dataclasses and other typed records as JSON, and back with checks of every field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from decode.evaluation.audit import Audit
from decode.evaluation.replay import ContextPart, Counts

# Properties that are also written to JSON, for readers in other languages.
DERIVED: dict[type, tuple[str, ...]] = {
    ContextPart: ("tau",),
    Audit: ("passed", "sampled_tokens", "impossible", "pit_p", "surprisal_p", "surprisal_z"),
}

_hints = cache(get_type_hints)


def as_json(value: Any) -> Any:
    """Dataclasses and `Counts` as dicts, other tuples as lists."""
    if is_dataclass(value):
        names = [*(f.name for f in fields(value)), *DERIVED.get(type(value), ())]
        return {name: as_json(getattr(value, name)) for name in names}
    if isinstance(value, Counts):
        return value._asdict()
    if isinstance(value, Mapping):
        return {name: as_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(part) for part in value]
    return value


def build(kind: Any, value: Any, where: str) -> Any:
    """Convert parsed JSON to a type.

    Args:
        kind: dataclass, NamedTuple, list, tuple, dict, union or plain type.
        value: parsed JSON; an int is accepted as a float.
        where: path of the value in the file.

    Raises:
        ValueError: wrong type, or a missing field without a default.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is UnionType:  # only `T | None`
        return None if value is None else build(arguments[0], value, where)
    if is_dataclass(kind) or kind is Counts:
        return _record(kind, _checked(dict, value, where), where)
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple, as a list
        hints = list(_hints(kind).values())
        if len(_checked(list, value, where)) != len(hints):
            raise ValueError(f"{where}: {len(value)} parts, not {len(hints)}")
        return kind(*(build(hint, part, where) for hint, part in zip(hints, value, strict=True)))
    if origin in (list, tuple):
        parts = enumerate(_checked(list, value, where))
        return origin(build(arguments[0], part, f"{where}[{i}]") for i, part in parts)
    if origin is dict:
        items = _checked(dict, value, where).items()
        return {name: build(arguments[1], part, f"{where}.{name}") for name, part in items}
    return _checked((int, float) if kind is float else kind, value, where)


def _record(kind: Any, values: dict[str, Any], where: str) -> Any:
    """A dataclass or NamedTuple of named fields; unknown keys are ignored."""
    hints, optional = _hints(kind), _optional(kind)
    if missing := [name for name in hints if name not in values and name not in optional]:
        raise ValueError(f"{where}.{missing[0]} is missing".removeprefix("."))
    return kind(**{n: build(hint, values[n], f"{where}.{n}") for n, hint in hints.items() if n in values})


def _optional(kind: Any) -> set[str]:
    """Names of a dataclass's fields that have a default."""
    if not is_dataclass(kind):
        return set()
    return {f.name for f in fields(kind) if f.default is not MISSING or f.default_factory is not MISSING}


def _checked(kind: Any, value: Any, where: str) -> Any:
    """The value itself if it has the type; True is not a number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        name = getattr(kind, "__name__", "number")
        raise ValueError(f"{where.removeprefix('.')}: {value!r:.40} is no {name}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{where.removeprefix('.')}: too large a number")
    return value
