"""Hydra for people: paths as group values, one-line errors, exit code 2, resume."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from decode.errors import UserError
from distill.runs import Run, claim

# group -> (the yaml that takes a path, the key the path goes to)
PATH_GROUPS = {"target": ("hf", "path"), "prompts": ("jsonl", "path")}
Task = Callable[[DictConfig, Path], float]


def main(task: Task, config_dir: Path) -> None:
    """Run `task(config, folder)` under Hydra; user errors are one line and exit code 2.

    Args:
        task: does the work and returns the metric that sweeps optimise.
        config_dir: holds config.yaml and the groups.
    """
    run: Run | None = None

    def job(cfg: DictConfig) -> float:
        folder = Path(HydraConfig.get().runtime.output_dir)
        with _one_line_errors(run):
            result = task(cfg, folder)
        if run:
            run.finish()
        return result

    with _one_line_errors(None):
        argv = rewrite(sys.argv[1:], config_dir)
        # Flags are Hydra's own; a rank that Lightning started has its folder in argv already.
        flags = any(a.startswith("-") for a in argv)
        child = any(a.startswith("hydra.run.dir=") for a in argv) or "LOCAL_RANK" in os.environ
        if not flags and not child:
            cfg = compose(argv, config_dir)
            resolved: Any = OmegaConf.to_container(cfg, resolve=True)
            run = claim(Path(cfg.output_dir), resolved, str(cfg.resume))
            print(f"{'resuming' if run.resumed else 'run folder'}: {run.path}", flush=True)
            argv = [*argv, f"hydra.run.dir={_quote(str(run.path))}"]
    sys.argv = [sys.argv[0], *argv]
    hydra.main(version_base="1.3", config_path=str(config_dir), config_name="config")(job)()
    if run:
        print(run.path, flush=True)


class _one_line_errors:  # noqa: N801 - reads as a statement
    def __init__(self, run: Run | None) -> None:
        self.run = run

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, UserError):
            if self.run:
                self.run.discard_if_empty()
            print(f"error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None


def rewrite(argv: Sequence[str], config_dir: Path) -> list[str]:
    """Turn `target=/a/folder` into `target=hf target.path='/a/folder'`, and quote other paths."""
    result = []
    for argument in argv:
        key, sign, value = argument.partition("=")
        if not sign or argument.startswith("-") or value[:1] in ("'", '"'):
            result.append(argument)
        elif key in PATH_GROUPS and value not in options(config_dir, key) and "," not in value:
            name, where = PATH_GROUPS[key]
            result += [f"{key}={name}", f"{key}.{where}={_quote(value)}"]
        elif value.startswith(("/", "~", "./", "../")):
            result.append(f"{key}={_quote(value)}")
        else:
            result.append(argument)
    return result


def _quote(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def options(config_dir: Path, group: str) -> list[str]:
    """Names of a group's yaml files."""
    return sorted(p.stem for p in (config_dir / group).glob("*.yaml"))


def compose(overrides: Sequence[str], config_dir: Path) -> DictConfig:
    """The configuration that these overrides give.

    Raises:
        UserError: an override that names nothing, with the nearest names that exist.
    """
    groups = [p.name for p in sorted(config_dir.iterdir()) if p.is_dir()]
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key in groups and value not in [*options(config_dir, key), "null"] and value[:1] != "[":
            raise UserError(f"{key}={value}: {_nearest(value, options(config_dir, key))}")
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(config_dir), version_base="1.3"):
        chosen = [o for o in overrides if o.lstrip("+~").partition("=")[0] in groups]
        try:
            base = hydra.compose("config", overrides=chosen)
            for override in overrides:
                key = override.partition("=")[0]
                if override not in chosen and key[:1] not in "+~" and not key.startswith("hydra."):
                    _check_key(base, key)
            return hydra.compose("config", overrides=list(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(" ".join(str(error).split())) from None


def _check_key(cfg: DictConfig, key: str) -> None:
    node, done = cfg, []
    for part in key.split("."):
        if not OmegaConf.is_dict(node) or part not in node:
            names = [str(k) for k in node] if OmegaConf.is_dict(node) else []
            where = ".".join(done)
            raise UserError(f"{key}: no such option{' in ' + where if where else ''}; {_nearest(part, names)}")
        done.append(part)
        node = node._get_node(part)  # the raw node: an unset value must not raise here


def _nearest(wrong: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(wrong, names, n=1)
    return f"{f'did you mean {close[0]}? ' if close else ''}choose one of {', '.join(names) or '(none)'}"
