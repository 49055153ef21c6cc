"""Configurations recorded in run folders, and without secrets for loggers and pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import distill.config.resolvers  # noqa: F401  that a configuration uses
from distill.utils.redact import override, without_secrets

FILE = Path(".hydra") / "config.yaml"  # in a run's folder, beside overrides.yaml


def resolved(config: Any) -> dict[str, Any]:
    """A configuration without secrets, interpolations filled in after these are removed."""
    shown = without_secrets(OmegaConf.to_container(config, resolve=False))
    return OmegaConf.to_container(OmegaConf.create(shown), resolve=True)  # pyright: ignore[reportReturnType]


def read_config(run: Path) -> dict[str, Any] | None:
    """The configuration in a run's folder, interpolations as they are; None where there is none."""
    if not (run / FILE).is_file():
        return None
    return OmegaConf.to_container(OmegaConf.load(run / FILE), resolve=False)  # pyright: ignore[reportReturnType]


def settings(run: Path) -> dict[str, Any] | None:
    """The configuration in a run's folder as it was resolved; None where that cannot be known."""
    try:
        config = OmegaConf.to_container(OmegaConf.load(run / FILE), resolve=True)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return None
    return config if isinstance(config, dict) else None  # pyright: ignore[reportReturnType]


def readable_config(run: Path) -> tuple[str, list[str]]:
    """The configuration in a run's folder as YAML, resolved and without secrets, and its overrides.

    Both are empty where the folder has none, or half of one.
    """
    try:
        config = OmegaConf.load(run / FILE)
        overrides: Any = OmegaConf.to_container(
            OmegaConf.load((run / FILE).with_name("overrides.yaml")), resolve=False
        )
    except (OSError, YAMLError):
        return "", []
    try:
        values = resolved(config)
    except Exception:  # of any kind: resolvers are functions; another version may have had others
        values = without_secrets(OmegaConf.to_container(config, resolve=False))
    return OmegaConf.to_yaml(OmegaConf.create(values)), [override(str(one)) for one in overrides]
