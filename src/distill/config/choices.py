"""Choices of a configuration group: yaml files of conf/, and those of installed packages.

A package has the options of its drafter or objective in `conf/<group>/<name>.yaml` next to the module that
its entry point names. What is built from them is the entry point's class or function.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from decode.errors import UserError
from drafters.installed import GROUPS, Installed, installed

FACTORY = {"drafter": ".for_target", "objective": ""}  # what is called with the options
UNREADABLE = (OSError, ValueError, YAMLError, OmegaConfBaseException)


def options(config_dir: Path, group: str) -> list[str]:
    """Names that a group can be set to."""
    built_in = {path.stem for path in (config_dir / group).glob("*.yaml")}
    return sorted(built_in | _others(config_dir, group).keys())


def path_of(config_dir: Path, group: str, name: str) -> Path:
    """The yaml file of a choice.

    Raises:
        UserError: the choice is a broken package's.
    """
    path = config_dir / group / f"{name}.yaml"
    other = None if path.exists() else _others(config_dir, group).get(name)
    return _file(other) if other else path


class Experiment(NamedTuple):
    """What an experiment sets, and what it inherits from other experiments.

    Attributes:
        choices: name by group.
        settings: options by group, not resolved.
    """

    choices: dict[str, str]
    settings: dict[str, Any]


def experiment(config_dir: Path, name: str) -> Experiment:
    """Read an experiment of conf/experiment; its own settings come before inherited ones."""
    own: Any = OmegaConf.load(config_dir / "experiment" / f"{name}.yaml")
    choices, settings = dict[str, str](), OmegaConf.create()
    entries: Any = own.pop("defaults", [])
    for entry in entries:
        if OmegaConf.is_dict(entry):
            choices |= {group.removeprefix("override /"): choice for group, choice in entry.items()}
        else:
            inherited = experiment(config_dir, entry)
            choices, settings = inherited.choices | choices, OmegaConf.merge(settings, inherited.settings)
    merged: Any = OmegaConf.to_container(OmegaConf.merge(settings, own))
    return Experiment(choices, merged)


def packages(config_dir: Path, group: str) -> list[str]:
    """Names of a group that packages have, each with its package."""
    return [f"{name} ({other.packages})" for name, other in _others(config_dir, group).items()]


def check_choice(config_dir: Path, group: str, name: str) -> None:
    """Import what a choice of a package names, before work starts.

    Raises:
        UserError: it cannot be used.
    """
    if not (other := _others(config_dir, group).get(name)):
        return
    other.check((config_dir / group / f"{name}.yaml").exists())
    _node(other)
    if group == "drafter":
        from drafters.registry import drafter_class  # slow import of torch, not needed for `--help`

        drafter_class(name)
    elif isinstance(value := other.load(), type) or not callable(value):
        raise other.error(f"{other.path} must be a function (student, teacher, its options)")


def register_choices(config_dir: Path) -> None:
    """Tell Hydra the choices of packages; those that `check_choice` refuses are left out."""
    for group in GROUPS:
        for name, other in _others(config_dir, group).items():
            try:
                other.check((config_dir / group / f"{name}.yaml").exists())
                node = _node(other)
            except UserError:
                continue
            ConfigStore.instance().store(name=name, node=node, group=group, provider=other.packages)


def objective_name(config_dir: Path, target: str) -> str:
    """Name of the choice of conf/objective that is built from this dotted path; else its last part."""
    for path in sorted((config_dir / "objective").glob("*.yaml")):
        if yaml.safe_load(path.read_text()).get("_target_") == target:
            return path.stem
    named = (name for name, other in _others(config_dir, "objective").items() if other.path == target)
    return next(named, target.rpartition(".")[2].lower())


def used_packages(options: Any) -> dict[str, str]:
    """Packages other than foredraft whose drafter or objective these options build.

    Args:
        options: resolved options of a run, nested by group.

    Returns:
        `package==version` by the group and name, as in `objective=focal`.
    """
    built = set(_built(options))
    return {
        f"{kind}={name}": "==".join((other.entry.dist.name, other.entry.dist.version))
        for kind in GROUPS
        for name, other in installed(kind).items()
        if other.entry.dist and other.path + FACTORY[kind] in built
    }


def _built(node: Any) -> Iterator[str]:
    """What the options build: `_target_` at any depth."""
    if isinstance(node, dict):
        if isinstance(path := node.get("_target_"), str):
            yield path
        for part in node.values():
            yield from _built(part)


def _others(config_dir: Path, group: str) -> dict[str, Installed]:
    """Names that packages declare, where the configuration has the group."""
    return dict(installed(group)) if group in GROUPS and (config_dir / group).is_dir() else {}


def _file(other: Installed) -> Path:
    path = other.folder() / "conf" / other.kind / f"{other.name}.yaml"
    if not path.is_file():
        raise other.error(f"its options are not in {path}; the package must contain that file")
    return path


def _node(other: Installed) -> Any:
    """The options of the yaml, and what is built from them."""
    path = _file(other)
    try:
        node = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except UNREADABLE as error:
        raise other.error(f"{path} cannot be read: {error}") from None
    if not isinstance(node, dict):
        raise other.error(f"{path} must be lines of `option: value`")
    if wrong := [key for key in node if str(key)[:1] == "_"]:
        raise other.error(f"remove {wrong[0]} from {path}: the entry point says what is built")
    return OmegaConf.create({"_target_": other.path + FACTORY[other.kind], "_partial_": True, **node})
