"""Choices of a configuration group: yaml files of conf/, and those of installed packages.

Terms of a sum of losses (`objective.terms`) name choices, too; `with_terms` replaces the names by options.

A package has the options of its drafter or objective in `conf/<group>/<name>.yaml` next to the module that
its entry point names. What is built from them is the entry point's class or function.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from decode.errors import UserError
from drafters.installed import GROUPS, Installed, installed

FACTORY = {"drafter": ".for_target", "objective": ""}  # what is called with the options
OURS = "distill.losses"  # the package of our divergences
MIX, MIXED_TERM = f"{OURS}.mix.Mix", f"{OURS}.mix.MixedTerm"
TERM = {"objective": None, "weights": None, "factor": 1.0}  # options of a term, with their defaults
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


def objective_name(config_dir: Path, options: Mapping[str, Any]) -> str:
    """Name of the choice of conf/objective with these options; names of the terms of a sum, as in ce+chain.

    Args:
        config_dir: folder of configurations.
        options: of the group `objective`, as a run records them.
    """
    target = str(options["_target_"])
    if target == MIX:
        return "+".join(options["terms"])
    for path in sorted((config_dir / "objective").glob("*.yaml")):
        if yaml.safe_load(path.read_text()).get("_target_") == target:
            return path.stem
    named = (name for name, other in _others(config_dir, "objective").items() if other.path == target)
    return next(named, target.rpartition(".")[2].lower())


def nearest(wrong: str, names: Sequence[str]) -> str:
    """Advice for an unknown name: the nearest known one, and all of them."""
    close = difflib.get_close_matches(wrong, names, n=1)
    return f"{f'did you mean {close[0]}? ' if close else ''}choose one of {', '.join(names) or '(none)'}"


def with_terms(config_dir: Path, cfg: DictConfig) -> DictConfig:
    """Replace names of choices in `objective.terms` by their options.

    A term is a mapping with `objective`, `weights` and `factor`. `objective` and `weights` are names of
    conf/objective and conf/weights, or mappings with `name` and options of that choice.

    Args:
        config_dir: folder of configurations.
        cfg: configuration of a run; returned as it is if its objective is no sum.

    Raises:
        UserError: an unknown name or option.
    """
    kind = str(OmegaConf.select(cfg, "objective._target_"))
    if kind != MIX:
        if kind.startswith(f"{OURS}.") and "terms" in cfg.objective:
            raise UserError("objective.terms: is of a sum of terms; write objective=mix, too")
        return cfg
    given = OmegaConf.to_container(cfg.objective, resolve=True)
    assert isinstance(given, dict)
    terms: Any = given.get("terms")
    if not isinstance(terms, dict):
        raise UserError(f"objective.terms={terms}: must be a mapping of names to terms")
    named = {str(name): term for name, term in terms.items() if term is not None}  # null removes one
    found = {name: _term(config_dir, f"objective.terms.{name}", term) for name, term in named.items()}
    copy = cfg.copy()
    copy.objective = OmegaConf.create(given | {"terms": found})
    return copy


def _term(config_dir: Path, place: str, term: Any) -> dict[str, Any]:
    if not isinstance(term, dict) or term.get("objective") is None:
        raise UserError(f"{place}: write {{objective: nll}}, with weights and factor if you want")
    if wrong := [key for key in term if key not in (*TERM, "_target_")]:
        raise UserError(f"{place}.{wrong[0]}: no such option; {nearest(str(wrong[0]), list(TERM))}")
    term = TERM | term
    for group in ("objective", "weights"):
        if term[group] is not None:
            term[group] = _choice(config_dir, group, f"{place}.{group}", term[group])
    return {"_target_": MIXED_TERM, **term}


def _choice(config_dir: Path, group: str, place: str, given: Any) -> dict[str, Any]:
    """Options of a choice that is given by name, or as a mapping with `name`."""
    if isinstance(given, dict) and "_target_" in given:  # of a record, in which names are replaced
        return given
    own = given if isinstance(given, dict) else {"name": given}
    name, names = str(own.get("name")), options(config_dir, group)
    if name not in names:
        raise UserError(f"{place}={name}: {nearest(name, names)}")
    check_choice(config_dir, group, name)
    path = config_dir / group / f"{name}.yaml"
    node = OmegaConf.load(path) if path.exists() else _node(_others(config_dir, group)[name])
    known: Any = OmegaConf.to_container(node, resolve=True)
    if known.get("_target_") == MIX:
        raise UserError(f"{place}={name}: is a sum of terms itself; write its terms here")
    own = {key: value for key, value in own.items() if key != "name"}
    if wrong := [key for key in own if key not in known]:
        choices = [key for key in known if key[:1] != "_"]
        raise UserError(f"{place}.{wrong[0]}: no such option of {name}; {nearest(str(wrong[0]), choices)}")
    for key, value in own.items():
        number = isinstance(known[key], int | float) and not isinstance(known[key], bool)
        if number and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"{place}.{key}={value}: must be a number")
    return known | own


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
