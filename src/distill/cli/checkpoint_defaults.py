"""Commands on a checkpoint take target and prompts from its training run by default."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from decode.errors import UserError
from distill.utils.atomic_files import read_json

RECIPE = "recipe.json"  # in a published folder
BUNDLED = "data/pocket"  # default target of every command
TARGET = {"target", "target.path"}  # overrides that name a target
PROMPTS = {"prompts", "prompts.path", "prompts.dataset", "prompts.sources"}


def with_run_settings(argv: Sequence[str], config_dir: Path, config_name: str) -> list[str]:
    """The command line, with target and prompts of `checkpoint=` unless it names others.

    The target is the one recorded in the checkpoint. Settings of prompts are known only for runs on this
    machine. A command on a store of rollouts takes the target that wrote the store.

    Args:
        argv: of the command.
        config_dir: folder of configurations.
        config_name: of the command.

    Raises:
        UserError: no such checkpoint, or the name of its target is malformed.
    """
    settings, groups = _settings(config_dir, config_name)
    keys = {argument.partition("=")[0] for argument in argv}
    # A configuration that sets `target` itself handles checkpoints itself.
    target = "target" in groups and "target" not in settings and not keys & TARGET
    prompts = ("prompts" in groups or "prompts" in settings) and not keys & PROMPTS
    overrides: list[str] = []
    if any(argument.startswith("-") for argument in argv):
        pass
    elif "stores" in settings:
        overrides = _target_overrides(**_writer(argv, settings["stores"])) if target else []
    elif (
        "checkpoint" in settings
        and (target or prompts)
        and _has_weights(source := _value(argv, "checkpoint"))
    ):
        from drafters.checkpoint import io as hub  # takes a second; such a command needs it anyway
        from drafters.checkpoint.folder import target_origin

        folder = hub.fetch(source)
        origin = target_origin(folder)
        overrides = _target_overrides(origin.name, origin.revision) if target else []
        if prompts:
            overrides += _prompts(folder.resolve().parent.parent, settings.get("prompts"), target, config_dir)
        if target and "prompts.template" not in keys | {line.partition("=")[0] for line in overrides}:
            overrides += _published_template(folder)
    if overrides:
        print(f"as in training: {' '.join(overrides)}", flush=True)
    return [*overrides, *argv]


def _value(argv: Sequence[str], key: str) -> str:
    return next((a.partition("=")[2] for a in argv if a.startswith(f"{key}=")), "")


def _target_overrides(target: str, revision: str | None) -> list[str]:
    """Overrides that select a target; its name comes from a file that is not trusted.

    Raises:
        UserError: the name is malformed: an interpolation could leak secrets of the environment in a URL.
    """
    if target in ("", BUNDLED):
        return []
    texts = [target, revision or ""]
    if any("${" in text or text[:1] in ("'", '"') or not text.isprintable() for text in texts) or (
        revision and not re.fullmatch(r"[\w./-]+", revision)
    ):
        raise UserError(f"no name of a target ({' '.join(texts)!r}); give target=<path or hub id>")
    return [f"target={target}", *([f"target.revision='{revision}'"] if revision else [])]


def _has_weights(source: str) -> bool:
    from drafters.hub.untrusted_files import is_hub_id

    return (Path(source).expanduser() / "config.json").is_file() or is_hub_id(source)


def _settings(config_dir: Path, name: str) -> tuple[dict[str, Any], set[str]]:
    """Settings and groups of a configuration, including those that it is based on."""
    settings: Any = OmegaConf.to_container(OmegaConf.load(config_dir / f"{name}.yaml"))
    groups = set[str]()
    for entry in settings["defaults"]:
        if isinstance(entry, dict):
            groups |= entry.keys()
        elif entry != "_self_":
            more, others = _settings(config_dir, entry)
            settings, groups = more | settings, groups | others
    return settings, groups


def _prompts(run: Path, settings: dict[str, Any] | None, target: bool, config_dir: Path) -> list[str]:
    """Overrides of prompts that a run was started with, restricted to `settings` if given.

    With the run's own `target`, its limit on prompt length is included.
    """
    path = run / ".hydra" / "overrides.yaml"
    recorded: Any = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else []
    overrides = [
        line for line in map(str, recorded) if re.match(r"prompts[.=]", line) and "${oc." not in line
    ]
    overrides = _of_experiment(recorded, config_dir) + overrides
    # If held-out prompts were too long in training, leave out the same ones.
    advice = "give prompts.max_tokens, and remove the file"
    too_long = (read_json(run / "prompts.json", advice) or {}).get("too_long", {})
    if (
        target
        and too_long.get("held_out")
        and not any(line.startswith("prompts.max_tokens=") for line in overrides)
    ):
        overrides.append(f"prompts.max_tokens={int(too_long['tokens'])}")
    if settings is None:
        return overrides
    return [line for line in overrides if line[8:].partition("=")[0] in settings]


def _of_experiment(recorded: Sequence[Any], config_dir: Path) -> list[str]:
    """What the experiment among a run's overrides says of prompts and they do not, as overrides."""
    said = {key: value for key, _, value in (str(line).partition("=") for line in recorded)}
    file = config_dir / "experiment" / f"{said.get('experiment', '')}.yaml"
    if not file.is_file():
        return []
    given: Any = OmegaConf.to_container(OmegaConf.load(file))
    choices = dict(entry.popitem() for entry in given.get("defaults", []) if isinstance(entry, dict))
    values = {"prompts": choices["override /prompts"]} if "override /prompts" in choices else {}
    # null takes a default away, which no override can
    stated = {key: value for key, value in given.get("prompts", {}).items() if value is not None}
    values |= {f"prompts.{key}": _written(value) for key, value in stated.items()}
    return [f"{key}={value}" for key, value in values.items() if key not in said]


def _written(value: Any) -> str:
    """A value in Hydra's grammar, whose keys have no quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_written(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return json.dumps(value)


def _published_template(folder: Path) -> list[str]:
    """The override that a drafter of a base model needs, which has no chat template."""
    recipe = read_json(folder / RECIPE, "download or export the checkpoint again, or remove the file") or {}
    return ["prompts.template=none"] if recipe.get("template") == "none" else []


def _writer(argv: Sequence[str], stores: str) -> dict[str, Any]:
    """Target and revision that wrote a store (named, or the newest); errors are left to the command."""
    from distill.rollouts.store import find

    try:
        folder = find(_value(argv, "store") or None, _value(argv, "stores") or stores)
        origin = json.loads((folder / "manifest.json").read_text())["origin"]
        return {"target": str(origin["target"]), "revision": origin["revision"]}
    except (UserError, OSError, ValueError, LookupError, TypeError):
        return {"target": "", "revision": None}
