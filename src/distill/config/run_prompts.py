"""Read the options of prompts and plan that a checkpoint's run recorded; the record is untrusted.

A run's folder can come from anywhere, so its record is treated as data. Hydra parses each override;
its value is checked and quoted again. No text of the record reaches Hydra unchanged. Accepted are choices of
`conf/prompts` and `conf/experiment`, plain settings, and files of the run's folder, below the current folder
(by relative path) or bundled. Other files, URLs and datasets are accepted if the user gave them here before
(`own_runs`); otherwise an error names the options to give. Interpolations and functions of Hydra, which can
read the environment, are never accepted.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from decode.errors import UserError
from distill.config.choices import experiment, options
from distill.config.own_runs import are_own
from distill.utils.atomic_files import read_json
from distill.utils.paths import ROOT
from distill.utils.redact import printable

RECORD = Path(".hydra") / "overrides.yaml"  # in a run's folder
GROUP, PLAN = "prompts", "decode"
KEY = re.compile(r"[A-Za-z_][\w-]*")  # mapping key that Hydra reads without quotes
NAME = re.compile(r"[A-Za-z_]\w*")
NO_NAMES = ("true", "false", "null", "nan", "inf")
FILES = ("path", "heldout")
REQUESTS = ("dataset", "files")
TEXTS = ("name", "split", "revision", "answers", "template")
NUMBERS = ("limit", "strict", "max_bytes", "max_tokens", "max_left_out", "heldout_share", "self", "weight")
SHOWN = 400  # longest shown value, in characters
MAPPINGS = ("columns", "template_options")
OF_PROMPTS = re.compile(rf"{GROUP}(\W|$)")
OF_PLAN = re.compile(r"decode(?:/rule|(?:\.[A-Za-z]\w*)+)?")
ASK = "give prompts on the command line"
DAMAGED = f"no record of a run's options; remove it, and {ASK}"
OUTSIDE = "it is a file outside of the run's folder"
REQUEST = "it can be a request to another machine"


def of_run(run: Path, config_dir: Path, wanted: Collection[str] | None, given: Collection[str]) -> list[str]:
    """Overrides that select the prompts of a run.

    Args:
        run: folder of the run.
        config_dir: folder of configurations.
        wanted: prompt settings of the command; None: all, and the group's choice.
        given: names set on the command line.

    Raises:
        UserError: the record is damaged, or contains a required value that is not accepted.
    """
    lines = _read(run / RECORD)
    recorded = {override.key_or_group: override for override in _about_prompts(run / RECORD, lines)}
    chosen = recorded.pop("experiment", None)
    values: dict[str, Any] = {key: override.value() for key, override in recorded.items()}
    taken = [key for key in values if _is_wanted(key, wanted) and key not in given]
    faults = {key: why for key in taken if (why := _fault(key, values[key], run, config_dir))}
    if faults and are_own(lines):
        faults = {key: why for key, why in faults.items() if why not in (OUTSIDE, REQUEST)}
    if faults:
        raise UserError(_question(run / RECORD, {key: values[key] for key in taken}, faults))
    stated = _of_experiment(chosen, config_dir, GROUP) if chosen else {}
    stated = {key: value for key, value in stated.items() if key not in recorded and _is_wanted(key, wanted)}
    return [assignment(key, value) for key, value in (stated | {key: values[key] for key in taken}).items()]


def plan_of_run(run: Path, config_dir: Path) -> list[str]:
    """Overrides that select the plan of a run: choices of `conf/decode`, and plain settings of them.

    Args:
        run: folder of the run.
        config_dir: folder of configurations.

    Raises:
        UserError: the record is damaged, or has something else about the plan.
    """
    parsed = _parsed(run / RECORD, _read(run / RECORD))
    recorded = {one.key_or_group: one for one in parsed if one.key_or_group.startswith(PLAN)}
    for one in recorded.values():
        if not _is_of_plan(one, config_dir):
            line = printable(str(one.input_line))[:SHOWN]
            raise UserError(f"{run / RECORD}: {line!r} is no setting of a plan; give decode=... yourself")
    chosen = next((one for one in parsed if one.key_or_group == "experiment"), None)
    stated = _of_experiment(chosen, config_dir, PLAN) if chosen else {}
    values = stated | {key: one.value() for key, one in recorded.items()}
    groups = sorted(values, key=lambda key: "." in key)  # choices first
    return [assignment(key, values[key]) for key in groups]


def _is_of_plan(one: Override, config_dir: Path) -> bool:
    key, value = one.key_or_group, one.value()
    if one.is_delete() or one.is_add() or one.is_force_add() or one.package or not OF_PLAN.fullmatch(key):
        return False
    if "." not in key:
        return value in options(config_dir, key)
    return _is_plain(value) and not _names_a_class(value)


def _names_a_class(value: Any) -> bool:
    """Whether Hydra would call something that a value names."""
    if isinstance(value, dict):
        return any(str(key)[:1] == "_" or _names_a_class(part) for key, part in value.items())
    return isinstance(value, list) and any(map(_names_a_class, value))


def too_long(run: Path) -> int | None:
    """The token limit above which training omitted held-out prompts; None if none was omitted.

    Raises:
        UserError: the run's prompts.json is damaged.
    """
    advice = "give prompts.max_tokens, and remove the file"
    shown = (read_json(run / "prompts.json", advice) or {}).get("too_long", {})
    if not isinstance(shown, dict) or not shown.get("held_out"):
        return None
    tokens = shown.get("tokens")
    if not isinstance(tokens, int) or not 0 < tokens < 2**31:
        raise UserError(f"{run / 'prompts.json'}: damaged (too_long); {advice}")
    return tokens


def assignment(key: str, value: Any) -> str:
    """Format `key=value` for Hydra; names stay unquoted, as group choices require."""
    bare = isinstance(value, str) and NAME.fullmatch(value) and value.lower() not in NO_NAMES
    return f"{key}={value if bare else hydra_text(value)}"


def hydra_text(value: Any) -> str:
    """Format a plain value in Hydra's grammar, with unquoted keys."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {hydra_text(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(hydra_text, value)) + "]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def quoted(value: str) -> str:
    """Quote a text for Hydra."""
    # Hydra keeps backslashes, except before a quote.
    doubled = re.sub(r"(\\*)(?='|\Z)", lambda match: match[1] * 2, value)
    return "'" + doubled.replace("'", "\\'") + "'"


def _read(path: Path) -> list[str]:
    if not path.is_file():
        return []
    from drafters.hub.untrusted_files import JSON_BYTES, check_link  # slow import, needed only here

    try:
        if check_link(path).stat().st_size > JSON_BYTES:
            raise ValueError("too large")
        lines = yaml.safe_load(path.read_text())
        # YAML aliases cannot inflate a list of texts.
        if not isinstance(lines, list | None) or not all(isinstance(line, str) for line in lines or []):
            raise ValueError("no list of texts")
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        raise UserError(f"{path}: {DAMAGED}") from None
    return lines or []


def _parsed(path: Path, lines: list[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(lines)
    except (HydraException, RecursionError):
        raise UserError(f"{path}: {DAMAGED}") from None


def _about_prompts(path: Path, lines: list[str]) -> list[Override]:
    """Overrides of a record that concern prompts, and its experiment."""
    parsed = _parsed(path, lines)
    mine = [one for one in parsed if one.key_or_group == "experiment" or OF_PROMPTS.match(one.key_or_group)]
    for one in mine:
        if one.is_delete() or one.is_add() or one.is_force_add() or one.package:
            line = printable(str(one.input_line))
            raise UserError(f"{path}: {line!r} is more than a setting of prompts; remove it, and {ASK}")
    return mine


def _is_wanted(key: str, wanted: Collection[str] | None) -> bool:
    return wanted is None or key.removeprefix(f"{GROUP}.").partition(".")[0] in wanted


def _fault(key: str, value: Any, run: Path, config_dir: Path) -> str:
    """Why a recorded setting is rejected; empty if it is accepted."""
    if key == GROUP:
        return "" if value in options(config_dir, GROUP) else "it is none of conf/prompts"
    name = key.removeprefix(f"{GROUP}.")
    if not _is_plain(value):
        return "interpolations, functions and control characters of a record are not followed"
    if value is None:
        return ""
    if name != "sources":
        return _fault_of_setting(name, value, run)
    entries = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, dict) for entry in entries):
        return "it is no list of mappings"
    found = (_fault_of_setting(str(name), part, run) for entry in entries for name, part in entry.items())
    return next(filter(None, found), "")


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(
            isinstance(key, str) and KEY.fullmatch(key) and _is_plain(part) for key, part in value.items()
        )
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return "${" not in value and value.isprintable()
    return value is None or (isinstance(value, bool | int | float) and math.isfinite(value))


def _fault_of_setting(name: str, value: Any, run: Path) -> str:
    checks: Mapping[str, Callable[[Any], str]] = {
        **dict.fromkeys(FILES, lambda file: _fault_of_file(file, run)),
        **dict.fromkeys(REQUESTS, lambda _: REQUEST),
        **dict.fromkeys(TEXTS, lambda text: "" if isinstance(text, str) else "it is no text"),
        **dict.fromkeys(NUMBERS, lambda number: "" if isinstance(number, int | float) else "it is no number"),
        **dict.fromkeys(MAPPINGS, lambda names: "" if isinstance(names, dict) else "it is no mapping"),
    }
    group, _, part = name.partition(".")
    if name not in checks and not (group in MAPPINGS and KEY.fullmatch(part)):
        return "it is no setting of prompts that a record can have"
    return "" if value is None or part else checks[name](value)


def _fault_of_file(file: Any, run: Path) -> str:
    if not isinstance(file, str) or "://" in file or "::" in file:
        return "it is no file's path"
    if file[:1] == "~":
        return OUTSIDE
    path = Path(file)
    homes = [run] if path.is_absolute() else [run, Path.cwd()]
    homes += [ROOT / "data"]
    places = [path] if path.exists() or path.is_absolute() else [path, ROOT / path]  # as `paths.bundled`
    inside = any(place.resolve().is_relative_to(home.resolve()) for place in places for home in homes)
    if ".." in path.parts or not inside:
        return OUTSIDE
    return ""


def _question(path: Path, values: Mapping[str, Any], faults: Mapping[str, str]) -> str:
    """Error message that names the rejected settings and the options that set them."""
    first, why = next(iter(faults.items()))
    text = printable(" ".join(str(values[first]).split()))
    if len(text) > SHOWN:
        text = f"{text[:SHOWN]}..."
    known = [key for key in values if faults.get(key, OUTSIDE) in (OUTSIDE, REQUEST)]
    words = [_word(key, values[key]) if key in known else f"{key}=..." for key in values]
    return f"{path}: {first}={text} is not taken from a record: {why}; if you want it, give {' '.join(words)}"


def _word(key: str, value: Any) -> str:
    """Format an option for the shell."""
    path = isinstance(value, str) and key.removeprefix(f"{GROUP}.") in FILES  # quoted by the command line
    word = f"{key}={value}" if path else assignment(key, value)
    return f'"{word}"' if "'" in word and not re.search(r'["$`!\\]', word) else shlex.quote(word)


def _of_experiment(chosen: Override, config_dir: Path, group: str) -> dict[str, Any]:
    """Settings of a group in an experiment of conf/experiment."""
    name = chosen.value()
    if not isinstance(name, str) or name not in options(config_dir, "experiment"):
        return {}
    shown = experiment(config_dir, name)
    values = {group: shown.choices[group]} if group in shown.choices else {}
    # null removes a default, which overrides cannot express
    stated = {key: value for key, value in shown.settings.get(group, {}).items() if value is not None}
    return values | {f"{group}.{key}": value for key, value in stated.items()}
