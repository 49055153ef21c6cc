"""Read the configurations recorded in run folders; remove secrets for loggers and pages.

A run's folder can come from anywhere, so no interpolation in it is followed: it could read the environment,
or double a text until memory ends.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import AliasToken, YAMLError, safe_load, scan

import distill.config.resolvers  # noqa: F401  registers resolvers of configurations
from distill.utils.redact import override, without_secrets

MAX_BYTES = 4 * 2**20  # limit of a configuration's size
UNREADABLE = (ValueError, RecursionError, YAMLError)
FILE = Path(".hydra") / "config.yaml"  # in a run's folder, next to overrides.yaml


def resolved(config: Any) -> dict[str, Any]:
    """Resolve a configuration after removing its secrets."""
    shown = without_secrets(OmegaConf.to_container(config, resolve=False))
    return OmegaConf.to_container(OmegaConf.create(shown), resolve=True)  # pyright: ignore[reportReturnType]


def settings(run: Path, current: Any) -> dict[str, Any] | None:
    """The configuration in a run's folder, to compare with a command's; None if unknown.

    It may contain environment variables: never show or send it; see `shown_settings`.

    Args:
        run: folder of the run.
        current: composed configuration of the command. An interpolation that it has too, at the same place,
            has its value; others stay text.
    """
    texts, values = (OmegaConf.to_container(current, resolve=resolve) for resolve in (False, True))
    config = _read(run)
    return None if config is None else _with_values(config, texts, values)


def _with_values(stored: Any, texts: Any, values: Any) -> Any:
    """What is stored, with the value of each interpolation that stands in `texts` at the same place."""
    if isinstance(stored, dict) and isinstance(texts, dict):
        return {k: _with_values(v, texts.get(k), values.get(k)) for k, v in stored.items()}
    if isinstance(stored, list) and isinstance(texts, list) and len(stored) == len(texts):
        return [_with_values(*parts) for parts in zip(stored, texts, values, strict=True)]
    return values if isinstance(stored, str) and "${" in stored and stored == texts else stored


def shown_settings(run: Path) -> dict[str, Any] | None:
    """The configuration of any run, without secrets; interpolations are text."""
    return without_secrets(_read(run))


def _read(run: Path) -> dict[str, Any] | None:
    """The configuration in a run's folder, not interpolated; None if unknown."""
    try:
        config = _load(run / FILE)
    except (*UNREADABLE, OSError):
        return None
    return config if isinstance(config, dict) else None


def _load(path: Path) -> Any:
    """Load YAML as written by Hydra.

    Raises:
        YAMLError: no regular file, too large, or with aliases (which can expand to gigabytes).
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # reading a pipe waits for a writer
        raise YAMLError("no file")
    if status.st_size > MAX_BYTES:
        raise YAMLError(f"more than {MAX_BYTES} bytes")
    try:
        text = path.read_text()
        if any(isinstance(token, AliasToken) for token in scan(text)):
            raise YAMLError("an alias, which Hydra does not write")
        return safe_load(text)
    except RecursionError:
        raise YAMLError("nested too deeply") from None


def readable_overrides(run: Path) -> list[str]:
    """Overrides in a run's folder, without secrets; empty if the record is missing or damaged."""
    try:
        lines = _load((run / FILE).with_name("overrides.yaml"))
    except (OSError, *UNREADABLE):
        return []
    return [override(str(one)) for one in lines] if isinstance(lines, list) else []
