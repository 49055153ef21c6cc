"""Read the configurations recorded in run folders; remove secrets for loggers and pages."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import AliasToken, YAMLError, scan

import distill.config.resolvers  # noqa: F401  registers resolvers of configurations
from distill.utils.redact import override, without_secrets

MAX_BYTES = 4 * 2**20  # limit of a configuration's size
UNREADABLE = (ValueError, RecursionError, YAMLError, OmegaConfBaseException)
FILE = Path(".hydra") / "config.yaml"  # in a run's folder, next to overrides.yaml


def resolved(config: Any) -> dict[str, Any]:
    """Resolve a configuration after removing its secrets."""
    shown = without_secrets(OmegaConf.to_container(config, resolve=False))
    return OmegaConf.to_container(OmegaConf.create(shown), resolve=True)  # pyright: ignore[reportReturnType]


def settings(run: Path) -> dict[str, Any] | None:
    """The resolved configuration of one of the user's own runs; None if unknown.

    It may contain environment variables: never show or send it; see `shown_settings`.
    """
    try:
        config = OmegaConf.to_container(_load(run / FILE), resolve=True)
    except (*UNREADABLE, OSError):
        return None
    return config if isinstance(config, dict) else None  # pyright: ignore[reportReturnType]


def shown_settings(run: Path) -> dict[str, Any] | None:
    """The configuration of any run, without secrets and without values that read the environment."""
    try:
        config = resolved(_load(run / FILE))
    except (*UNREADABLE, OSError):
        return None
    return config if isinstance(config, dict) else None


def _load(path: Path) -> Any:
    """Load a configuration in YAML, as written by Hydra.

    Raises:
        YAMLError: no regular file, too large, or with aliases (which can expand to gigabytes).
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # reading a pipe waits for a writer
        raise YAMLError("no file")
    if status.st_size > MAX_BYTES:
        raise YAMLError(f"more than {MAX_BYTES} bytes")
    try:
        if any(isinstance(token, AliasToken) for token in scan(path.read_text())):
            raise YAMLError("an alias, which Hydra does not write")
    except RecursionError:
        raise YAMLError("nested too deeply") from None
    return OmegaConf.load(path)


def readable_overrides(run: Path) -> list[str]:
    """Overrides in a run's folder, without secrets; empty if the record is missing or damaged."""
    try:
        lines: Any = OmegaConf.to_container(_load((run / FILE).with_name("overrides.yaml")), resolve=False)
    except (OSError, *UNREADABLE):
        return []
    return [override(str(one)) for one in lines]
