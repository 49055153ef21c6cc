"""Defaults of commands on a checkpoint: target, prompts and plan of its training run."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from decode.errors import UserError
from distill.config import run_prompts
from distill.utils.atomic_files import read_json
from drafters.hub import RECIPE

BUNDLED = "data/pocket"  # default target of every command
TARGET = {"target", "target.path"}  # overrides that name a target
PROMPTS = {"prompts", "prompts.path", "prompts.dataset", "prompts.sources"}


def with_run_settings(argv: Sequence[str], config_dir: Path, config_name: str) -> list[str]:
    """Add target and prompts of `checkpoint=` to a command line, unless it names others.

    A command that scores decodes by the plan of the run as well.

    The checkpoint records its target. The prompts are known if the checkpoint is in its run's folder
    (`config.run_prompts`). A command on a store of rollouts uses the target that wrote the store.

    Args:
        argv: arguments of the command.
        config_dir: folder of configurations.
        config_name: configuration of the command.

    Raises:
        UserError: no such checkpoint, or a malformed target name.
    """
    settings, groups = _settings(config_dir, config_name)
    keys = {argument.partition("=")[0] for argument in argv}
    # A configuration that sets `target` itself handles checkpoints itself.
    target = "target" in groups and "target" not in settings and not keys & TARGET
    prompts = ("prompts" in groups or "prompts" in settings) and not keys & PROMPTS
    # Benchmarks of the laboratory have plans of their own.
    own_plan = config_name.startswith("lab/") or "decode" in settings or "override /decode" in groups
    plan = {"decode", "score"} <= groups and not own_plan and "decode" not in keys
    overrides: list[str] = []
    if any(argument.startswith("-") for argument in argv):
        pass
    elif "stores" in settings:
        overrides = _target_overrides(**_writer(argv, settings["stores"])) if target else []
    elif (
        "checkpoint" in settings
        and (target or prompts or plan)
        and _has_weights(source := _value(argv, "checkpoint"))
    ):
        from drafters.checkpoint import io as checkpoint_io  # slow import, needed by such commands only
        from drafters.checkpoint.folder import target_origin

        folder = checkpoint_io.fetch(source)
        origin = target_origin(folder)
        overrides = _target_overrides(origin.name, origin.revision) if target else []
        if prompts:
            run, wanted = folder.resolve().parent.parent, settings.get("prompts")
            overrides += run_prompts.of_run(run, config_dir, wanted, keys)
            overrides += _limit(run, wanted, {line.partition("=")[0] for line in overrides}) if target else []
        if plan:
            overrides += _plan(folder.resolve().parent.parent, config_dir)
        if target and "prompts.template" not in keys | {line.partition("=")[0] for line in overrides}:
            overrides += _published_template(folder)
    if overrides:
        print(f"as in training: {' '.join(overrides)}", flush=True)
    return [*overrides, *argv]


def _plan(run: Path, config_dir: Path) -> list[str]:
    """Overrides that select the plan of a run; names the default where no run is recorded."""
    if not (run / run_prompts.RECORD).is_file():
        print("plan: decode=dynamic, the default, since no run around the checkpoint records one", flush=True)
    return run_prompts.plan_of_run(run, config_dir)


def _value(argv: Sequence[str], key: str) -> str:
    return next((a.partition("=")[2] for a in argv if a.startswith(f"{key}=")), "")


def _target_overrides(target: str, revision: str | None) -> list[str]:
    """Overrides that select a target; the name comes from an untrusted file.

    Paths are allowed, since no code of a model's folder is run and its data stays on this machine.

    Raises:
        UserError: a malformed name: an interpolation could leak environment variables in a URL.
    """
    if target in ("", BUNDLED):
        return []
    odd = "${" in target or "://" in target or target[:1] in ("'", '"', "~") or not target.isprintable()
    if odd or (revision and not re.fullmatch(r"[\w./-]+", revision)):
        shown = " ".join(filter(None, (target, revision)))[:400]
        raise UserError(f"no name of a target ({shown!r}); give target=<path or hub id>")
    return [f"target={target}", *([f"target.revision='{revision}'"] if revision else [])]


def _has_weights(source: str) -> bool:
    from drafters.hub.untrusted_files import is_hub_id

    return (Path(source).expanduser() / "config.json").is_file() or is_hub_id(source)


def _settings(config_dir: Path, name: str) -> tuple[dict[str, Any], set[str]]:
    """Settings and groups of a configuration, including inherited ones."""
    settings: Any = OmegaConf.to_container(OmegaConf.load(config_dir / f"{name}.yaml"))
    groups = set[str]()
    for entry in settings["defaults"]:
        if isinstance(entry, dict):
            groups |= {group.lstrip("/") for group in entry}
        elif entry != "_self_":
            more, others = _settings(config_dir, entry.lstrip("/"))
            settings, groups = more | settings, groups | others
    return settings, groups


def _limit(run: Path, wanted: Collection[str] | None, given: Collection[str]) -> list[str]:
    """Override that omits held-out prompts that were too long in training, for the run's own target."""
    name = "max_tokens"
    if f"prompts.{name}" in given or (wanted is not None and name not in wanted):
        return []
    tokens = run_prompts.too_long(run)
    return [f"prompts.{name}={tokens}"] if tokens else []


def _published_template(folder: Path) -> list[str]:
    """Override for a drafter of a base model without a chat template."""
    recipe = read_json(folder / RECIPE, "download or export the checkpoint again, or remove the file") or {}
    return ["prompts.template=none"] if recipe.get("template") == "none" else []


def _writer(argv: Sequence[str], stores: str) -> dict[str, Any]:
    """Target and revision of the named or newest store; the command itself reports errors."""
    from distill.rollouts.store import find

    try:
        folder = find(_value(argv, "store") or None, _value(argv, "stores") or stores)
        origin = json.loads((folder / "manifest.json").read_text())["origin"]
        target, revision = origin["target"], origin["revision"]
        return {
            "target": target if isinstance(target, str) else "",
            "revision": None if revision is None else str(revision),
        }
    except (UserError, OSError, ValueError, LookupError, TypeError):
        return {"target": "", "revision": None}
