"""A command about a checkpoint takes target and prompts from the run that made it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from decode.errors import UserError
from distill.utils.atomic_files import read_json

BUNDLED = "data/pocket"  # what every command has by default
TARGET = {"target", "target.path"}  # what names another one; how it is loaded is another matter
PROMPTS = {"prompts", "prompts.path", "prompts.dataset", "prompts.sources"}


def follow(argv: Sequence[str], config_dir: Path, config_name: str) -> list[str]:
    """The command line, with target and prompts of `checkpoint=` where it names none itself.

    The target is the one that the checkpoint was made for: of a downloaded one that is a name, and
    decides nothing else. What was told of prompts is known of runs of this machine alone. A command
    about a store of rollouts takes the target that wrote it.

    Args:
        argv: of the command.
        config_dir: holds the groups.
        config_name: its configuration.

    Raises:
        UserError: no checkpoint there, or what it says of its target is no name.
    """
    own, groups = _settings(config_dir, config_name)
    given = {argument.partition("=")[0] for argument in argv}
    # A configuration that sets `target` itself knows what to do with a checkpoint.
    target = "target" in groups and "target" not in own and not given & TARGET
    prompts = ("prompts" in groups or "prompts" in own) and not given & PROMPTS
    found: list[str] = []
    if any(argument.startswith("-") for argument in argv):
        pass
    elif "stores" in own:
        found = _named(**_writer(argv, own["stores"])) if target else []
    elif "checkpoint" in own and (target or prompts) and _has_weights(source := _value(argv, "checkpoint")):
        from drafters.checkpoint import io as hub  # a second, which such a command spends anyway
        from drafters.checkpoint.folder import target_origin

        folder = hub.fetch(source)
        known = target_origin(folder)
        found = _named(known.name, known.revision) if target else []
        if prompts:
            found += _prompts(folder.resolve().parent.parent, own.get("prompts"), target)
    if found:
        print(f"as in training: {' '.join(found)}", flush=True)
    return [*found, *argv]


def _value(argv: Sequence[str], key: str) -> str:
    return next((a.partition("=")[2] for a in argv if a.startswith(f"{key}=")), "")


def _named(target: str, revision: str | None) -> list[str]:
    """Overrides that name it; what somebody's file says is not to be read as more than a name.

    Raises:
        UserError: it may be: an interpolation, say, would put the environment's secrets into a hub's address.
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
    """A configuration's own settings and its groups, those that it is based on included."""
    own: Any = OmegaConf.to_container(OmegaConf.load(config_dir / f"{name}.yaml"))
    groups = set[str]()
    for entry in own["defaults"]:
        if isinstance(entry, dict):
            groups |= entry.keys()
        elif entry != "_self_":
            more, others = _settings(config_dir, entry)
            own, groups = more | own, groups | others
    return own, groups


def _prompts(run: Path, own: dict[str, Any] | None, target: bool) -> list[str]:
    """What a run was told of its prompts; of a configuration with few settings of prompts, these alone.

    With the run's own `target`, whose tokens were counted, its limit on their length comes along.
    """
    said = run / ".hydra" / "overrides.yaml"
    every: Any = OmegaConf.to_container(OmegaConf.load(said)) if said.is_file() else []
    kept = [line for line in map(str, every) if re.match(r"prompts[.=]", line) and "${oc." not in line]
    # Where held-out prompts were too long for training, the same are scored again without them.
    too_long = (read_json(run / "prompts.json") or {}).get("too_long", {})
    if (
        target
        and too_long.get("held_out")
        and not any(line.startswith("prompts.max_tokens=") for line in kept)
    ):
        kept.append(f"prompts.max_tokens={int(too_long['tokens'])}")
    return kept if own is None else [line for line in kept if line[8:].partition("=")[0] in own]


def _writer(argv: Sequence[str], stores: str) -> dict[str, Any]:
    """Who wrote the store that is named, or the newest; what is wrong with it the command will say."""
    from distill.rollouts.store import find

    try:
        folder = find(_value(argv, "store") or None, _value(argv, "stores") or stores)
        origin = json.loads((folder / "manifest.json").read_text())["origin"]
        return {"target": str(origin["target"]), "revision": origin["revision"]}
    except (UserError, OSError, ValueError, LookupError, TypeError):
        return {"target": "", "revision": None}
