"""Prompts of the run that a checkpoint lies in: what may be taken from a record that others may have written.

A run's folder can come from anywhere, so its record is data and no command line. Each override of prompts is
parsed by Hydra, its value is checked and written again; no text of the record reaches Hydra as it stands.
Taken are choices of `conf/prompts` and `conf/experiment`, plain settings, and files of the run's folder,
below the current folder (named by a relative path) or bundled. Files elsewhere, which may be private, and
URLs and datasets, which are requests, are taken if the user gave them here before (`own_runs`), else asked
for in one line. Interpolations and functions of Hydra, which read the environment, are never taken.
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
from omegaconf import OmegaConf

from decode.errors import UserError
from distill.config.compose import options
from distill.config.own_runs import are_own
from distill.utils.atomic_files import read_json
from distill.utils.paths import ROOT
from distill.utils.redact import printable

RECORD = Path(".hydra") / "overrides.yaml"  # in a run's folder
GROUP = "prompts"
KEY = re.compile(r"[A-Za-z_][\w-]*")  # of a mapping that Hydra reads without quotes
NAME = re.compile(r"[A-Za-z_]\w*")
NO_NAMES = ("true", "false", "null", "nan", "inf")
FILES = ("path", "heldout")
REQUESTS = ("dataset", "files")
TEXTS = ("name", "split", "revision", "answers", "template")
NUMBERS = ("limit", "strict", "max_bytes", "max_tokens", "max_left_out", "heldout_share", "self", "weight")
SHOWN = 400  # characters of a value that are shown
MAPPINGS = ("columns", "template_options")
OF_PROMPTS = re.compile(rf"{GROUP}(\W|$)")
ASK = "give prompts on the command line"
DAMAGED = f"no record of a run's options; remove it, and {ASK}"
OUTSIDE = "it is a file outside of the run's folder"
REQUEST = "it can be a request to another machine"


def of_run(run: Path, config_dir: Path, wanted: Collection[str] | None, given: Collection[str]) -> list[str]:
    """Overrides that give the prompts which a run was started with.

    Args:
        run: its folder.
        config_dir: folder of configurations.
        wanted: settings of prompts that the command has; None: all, and the group's choice.
        given: names that the command line sets.

    Raises:
        UserError: the record is damaged, or has something that is asked for and not taken.
    """
    lines = _read(run / RECORD)
    recorded = {override.key_or_group: override for override in _about_prompts(run / RECORD, lines)}
    experiment = recorded.pop("experiment", None)
    values: dict[str, Any] = {key: override.value() for key, override in recorded.items()}
    taken = [key for key in values if _is_wanted(key, wanted) and key not in given]
    faults = {key: why for key in taken if (why := _fault(key, values[key], run, config_dir))}
    if faults and are_own(lines):
        faults = {key: why for key, why in faults.items() if why not in (OUTSIDE, REQUEST)}
    if faults:
        raise UserError(_question(run / RECORD, {key: values[key] for key in taken}, faults))
    stated = _of_experiment(experiment, config_dir) if experiment else {}
    stated = {key: value for key, value in stated.items() if key not in recorded and _is_wanted(key, wanted)}
    return [assignment(key, value) for key, value in (stated | {key: values[key] for key in taken}).items()]


def too_long(run: Path) -> int | None:
    """The limit of tokens past which held-out prompts were left out in training; None if none was.

    Raises:
        UserError: the file that says so is damaged.
    """
    advice = "give prompts.max_tokens, and remove the file"
    said = (read_json(run / "prompts.json", advice) or {}).get("too_long", {})
    if not isinstance(said, dict) or not said.get("held_out"):
        return None
    tokens = said.get("tokens")
    if not isinstance(tokens, int) or not 0 < tokens < 2**31:
        raise UserError(f"{run / 'prompts.json'}: damaged (too_long); {advice}")
    return tokens


def assignment(key: str, value: Any) -> str:
    """`key=value` for Hydra; a name has no quotes, as the choice of a group must not."""
    bare = isinstance(value, str) and NAME.fullmatch(value) and value.lower() not in NO_NAMES
    return f"{key}={value if bare else hydra_text(value)}"


def hydra_text(value: Any) -> str:
    """A plain value in Hydra's grammar, whose keys have no quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {hydra_text(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(hydra_text, value)) + "]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def quoted(value: str) -> str:
    """A text in Hydra's quotes."""
    # Hydra keeps backslashes, except before a quote.
    doubled = re.sub(r"(\\*)(?='|\Z)", lambda match: match[1] * 2, value)
    return "'" + doubled.replace("'", "\\'") + "'"


def _read(path: Path) -> list[str]:
    if not path.is_file():
        return []
    from drafters.hub.untrusted_files import JSON_BYTES, check_link  # takes a second; a checkpoint needs it

    try:
        if check_link(path).stat().st_size > JSON_BYTES:
            raise ValueError("too large")
        lines = yaml.safe_load(path.read_text())
        # A list of texts is not made larger by YAML's aliases.
        if not isinstance(lines, list | None) or not all(isinstance(line, str) for line in lines or []):
            raise ValueError("no list of texts")
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        raise UserError(f"{path}: {DAMAGED}") from None
    return lines or []


def _about_prompts(path: Path, lines: list[str]) -> list[Override]:
    """The overrides of a record that are about prompts, and its experiment."""
    try:
        parsed = OverridesParser.create().parse_overrides(lines)
    except (HydraException, RecursionError):
        raise UserError(f"{path}: {DAMAGED}") from None
    mine = [one for one in parsed if one.key_or_group == "experiment" or OF_PROMPTS.match(one.key_or_group)]
    for one in mine:
        if one.is_delete() or one.is_add() or one.is_force_add() or one.package:
            line = printable(str(one.input_line))
            raise UserError(f"{path}: {line!r} is more than a setting of prompts; remove it, and {ASK}")
    return mine


def _is_wanted(key: str, wanted: Collection[str] | None) -> bool:
    return wanted is None or key.removeprefix(f"{GROUP}.").partition(".")[0] in wanted


def _fault(key: str, value: Any, run: Path, config_dir: Path) -> str:
    """Why a setting is not taken from a record; empty where it is."""
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
    """What a record wants, and the options that give it."""
    first, why = next(iter(faults.items()))
    said = printable(" ".join(str(values[first]).split()))
    if len(said) > SHOWN:
        said = f"{said[:SHOWN]}..."
    known = [key for key in values if faults.get(key, OUTSIDE) in (OUTSIDE, REQUEST)]
    words = [_word(key, values[key]) if key in known else f"{key}=..." for key in values]
    return f"{path}: {first}={said} is not taken from a record: {why}; if you want it, give {' '.join(words)}"


def _word(key: str, value: Any) -> str:
    """An option as one writes it in a shell."""
    path = isinstance(value, str) and key.removeprefix(f"{GROUP}.") in FILES  # which the command line quotes
    word = f"{key}={value}" if path else assignment(key, value)
    return f'"{word}"' if "'" in word and not re.search(r'["$`!\\]', word) else shlex.quote(word)


def _of_experiment(experiment: Override, config_dir: Path) -> dict[str, Any]:
    """What an experiment of conf/experiment says of prompts."""
    name = experiment.value()
    if name not in options(config_dir, "experiment"):
        return {}
    said: Any = OmegaConf.to_container(OmegaConf.load(config_dir / "experiment" / f"{name}.yaml"))
    choices = dict(entry.popitem() for entry in said.get("defaults", []) if isinstance(entry, dict))
    values = {GROUP: choices["override /prompts"]} if "override /prompts" in choices else {}
    # null takes a default away, which no override can
    stated = {key: value for key, value in said.get(GROUP, {}).items() if value is not None}
    return values | {f"{GROUP}.{key}": value for key, value in stated.items()}
