"""Compose Hydra configurations from overrides, with one-line error messages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import distill.config.resolvers  # noqa: F401  registers resolvers of configurations
from decode.errors import UserError
from distill.config.choices import check_choice, nearest, options, register_choices
from distill.config.other_names import meant

EMPTY_GROUPS = ("experiment",)  # groups that may be null
CLOSED = ("drafter", "objective", "weights", "decode")  # groups with files that list all options

MOVED = {"rollout.max_prompt_tokens": "prompts.max_tokens"}  # renamed options: old name -> new name
MERGING = "Error merging override "  # Hydra's error for a list instead of a mapping
FASTEST = "decode=fastest"  # reads a score, and so makes none


def compose(
    overrides: Sequence[str], config_dir: Path, config_name: str = "config", own: Sequence[str] = ()
) -> DictConfig:
    """Compose the configuration of these overrides.

    Args:
        overrides: of the configuration.
        config_dir: folder of configurations.
        config_name: the primary configuration.
        own: options that the command has besides; an unknown option may be one of them.

    Raises:
        UserError: an unknown or invalid override; the message names close matches.
    """
    groups = [str(p.relative_to(config_dir)) for p in sorted(config_dir.rglob("*")) if p.is_dir()]
    for override in overrides:
        _check_override(override, groups, config_dir)
        if override == FASTEST and config_name != "generate":
            raise UserError(
                f"{override}: is for foredraft generate; name a plan, or decode=auto to measure some"
            )
    chosen = tuple(o for o in overrides if o.lstrip("+~").partition("=")[0].partition("@")[0] in groups)
    keys = [o.partition("=")[0] for o in overrides if o not in chosen]
    keys = [k for k in keys if k[:1] not in "+~" and not k.startswith(("hydra.", "hydra/"))]
    try:
        defaults = _defaults(chosen, config_dir, config_name)
        for key in keys:
            _check_key(defaults, key, own)
        with configurations(config_dir):
            cfg = hydra.compose(config_name, overrides=list(overrides))
            if any(o.startswith("experiment=") for o in chosen):
                _check_experiment(overrides, config_name)
        for key in keys:
            _check_kind(key, OmegaConf.select(defaults, key), OmegaConf.select(cfg, key))
        if unset := sorted(OmegaConf.missing_keys(cfg)):
            raise UserError(f"{', '.join(unset)}: must be given, as in {unset[0]}=...")
    except (HydraException, OmegaConfBaseException) as error:
        text = " ".join(str(error).split())
        if text.startswith(MERGING):
            text = f"{text.removeprefix(MERGING)}: must be text, or a mapping"
        raise UserError(text) from None
    return cfg


@cache
def _defaults(chosen: tuple[str, ...], config_dir: Path, config_name: str) -> DictConfig:
    """The configuration with these groups only; shared by most jobs of a sweep."""
    with configurations(config_dir):
        return hydra.compose(config_name, overrides=list(chosen))


@contextmanager
def configurations(config_dir: Path) -> Iterator[Any]:
    """Yield Hydra (`compose_config`, `run`) for a folder of configurations."""
    GlobalHydra.instance().clear()
    register_choices(config_dir)
    with hydra.initialize_config_dir(str(config_dir), version_base="1.3"):
        reader = GlobalHydra.instance().hydra
        assert reader
        yield reader


def _check_override(override: str, groups: Sequence[str], config_dir: Path) -> None:
    if override[:1] == "~":
        return
    key, sign, value = override.lstrip("+").partition("=")
    if not sign:
        raise UserError(f"{override}: not an override; write option=value")
    try:
        OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise UserError(f"{override}: {str(error).splitlines()[0]}") from None
    group, _, place = key.partition("@")
    names = options(config_dir, group) + ["null"] * (group in EMPTY_GROUPS)
    if group in groups and value not in names:
        raise UserError(f"{place or key}={value}: {nearest(value, names)}")
    check_choice(config_dir, group, value)


def _check_key(cfg: DictConfig, key: str, own: Sequence[str] = ()) -> None:
    if key in MOVED:
        raise UserError(f"{key}: renamed; write {MOVED[key]}")
    node: Any = OmegaConf.to_container(cfg, resolve=False)  # unset values and interpolations as strings
    done: list[str] = []
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            if done == ["decode"]:
                _check_moved_number(part)
                if part in node.get("otherwise", ()):  # decode=fastest
                    raise UserError(f"{key}: of a plan; name the plan, too, as in decode=dynamic")
            names = [str(k) for k in node if str(k)[0] != "_"] if isinstance(node, dict) else []
            names = names if done else list(dict.fromkeys([*own, *names]))
            where = f" in {'.'.join(done)}" if done else ""
            raise UserError(f"{key}: no such option{where}; {_hint(part, names, cfg)}")
        done.append(part)
        node = node[part]


def _check_experiment(overrides: Sequence[str], config_name: str) -> None:
    """Reject an experiment that sets options of another drafter, loss or plan than the chosen one.

    Hydra adds a key of an experiment's file where the group has no such key.
    """
    whole = hydra.compose(config_name, overrides=list(overrides), return_hydra_config=True)
    choices = {k: v for k, v in whole.hydra.runtime.choices.items() if k.partition("@")[0] in CLOSED and v}
    own = hydra.compose(config_name, overrides=[f"{group}={choice}" for group, choice in choices.items()])
    for group in CLOSED:
        unknown = sorted(f"{group}.{key}" for key in set(whole.get(group) or ()) - set(own.get(group) or ()))
        if unknown:
            raise UserError(
                f"experiment={whole.hydra.runtime.choices.experiment}: sets {', '.join(unknown)}, which "
                f"{group}={choices[group]} does not have; add {' '.join(f'~{name}' for name in unknown)}"
            )


def _hint(part: str, names: Sequence[str], cfg: DictConfig) -> str:
    """Advice for an unknown option; `names` are those where it was looked for."""
    leaves = list(_leaves(OmegaConf.to_container(cfg)))
    if part in leaves:
        return f"did you mean {part}?"
    if written := meant(part, cfg):
        return f"write {written}"
    elsewhere = [name for name in leaves if name.endswith(f".{part}")]
    return f"did you mean {' or '.join(elsewhere)}?" if elsewhere else nearest(part, names)


def without_dashes(name: str, value: str, config_dir: Path, config_name: str) -> str:
    """How to write an option that was given as `--name value`.

    Args:
        name: without its dashes.
        value: empty if there was none.
        config_dir: folder of configurations.
        config_name: configuration of the command.
    """
    cfg = _defaults((), config_dir, config_name)
    leaves, key = list(_leaves(OmegaConf.to_container(cfg))), name.replace("-", "_")
    if key not in [*leaves, *map(str, cfg)]:
        if written := meant(name, cfg, value):
            return written
        elsewhere = [leaf for leaf in leaves if leaf.endswith(f".{key}")]
        key = elsewhere[0] if len(elsewhere) == 1 else key
    return f"{key}={value or '...'}"


def _check_moved_number(name: str) -> None:
    """Reject a former plan option that is now an option of the acceptance rule, and name the new option."""
    from decode.plan import MOVED as NUMBERS  # slow import of torch, not needed for `--help`

    if name in NUMBERS:
        rule, number = NUMBERS[name]
        raise UserError(f"decode.{name}: moved; write decode/rule={rule} decode.rule.{number}")


def _leaves(node: Any, name: str = "") -> Iterator[str]:
    """Dotted names of all settings."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name


def _check_kind(key: str, default: Any, value: Any) -> None:
    """Reject a value of another type than the default; null defaults and Lightning's options are not checked.

    A folder or a name may replace a mapping of settings.
    """
    free = default is None or key == "trainer.devices"
    # Here null is a valid value: every token is drafted.
    free = free or (value is None and (key.startswith("trainer.") or key.endswith("draft_vocab_size")))
    built = isinstance(default, DictConfig) and ("_target_" in default or "name" in default)
    free = free or (built and isinstance(value, str))
    if not free and not _same_kind(default, value):
        kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        expected = kinds.get(type(default), f"like {default}")
        raise UserError(f"{key}={'null' if value is None else value}: must be {expected}")


def _same_kind(default: Any, value: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, int | float) and not math.isnan(value)
    if isinstance(default, str):  # a name may look like a number
        return isinstance(value, str | int | float)
    if OmegaConf.is_list(default):
        return OmegaConf.is_list(value) and all(_same_kind(default[0], v) for v in value if len(default))
    return OmegaConf.is_dict(value) if OmegaConf.is_dict(default) else isinstance(value, type(default))
