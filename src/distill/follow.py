"""A command about a checkpoint takes target and prompts from the run that made it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from decode.errors import UserError

if TYPE_CHECKING:
    from drafters.base import Origin

BUNDLED = "data/pocket"  # what every command has by default


def follow(argv: Sequence[str], config_dir: Path, config_name: str) -> list[str]:
    """The command line, with target and prompts of `checkpoint=` where it names none itself.

    The target is the one that the checkpoint was made for: of a downloaded one that is a name, and
    decides nothing else. What was told of prompts is known of runs of this machine alone.

    Args:
        argv: of the command.
        config_dir: holds the groups.
        config_name: its configuration.

    Raises:
        UserError: no checkpoint there, or what it says of its target is no name.
    """
    source = next((a.partition("=")[2] for a in argv if a.startswith("checkpoint=")), "")
    keys, groups = _settings(config_dir, config_name)
    flags = any(argument.startswith("-") for argument in argv)
    # A configuration that sets `target` itself knows what to do with a checkpoint; so does what reads cards.
    if flags or "checkpoint" not in keys or "target" in keys or not _has_weights(source):
        return list(argv)

    from drafters import hub  # a second, which such a command spends anyway
    from drafters.folder import written

    folder, found = hub.fetch(source), []
    known, given = written(folder), {_first(argument) for argument in argv}
    if "target" in groups - given and known.name not in ("", BUNDLED):
        found += _target(folder, known)
    if "prompts" in groups - given:
        found += _prompts(folder.resolve().parent.parent)
    if found:
        print(f"as in training: {' '.join(found)}", flush=True)
    return [*found, *argv]


def _target(folder: Path, known: Origin) -> list[str]:
    """Overrides that name it; what somebody's file says is not to be read as more than a name.

    Raises:
        UserError: it may be: an interpolation, say, would put the environment's secrets into a hub's address.
    """
    texts = [known.name, known.revision or ""]
    if any("${" in text or text[:1] in ("'", '"') or not text.isprintable() for text in texts) or (
        known.revision and not re.fullmatch(r"[\w./-]+", known.revision)
    ):
        raise UserError(f"{folder}: no name of a target ({' '.join(texts)!r}); give target=<path or hub id>")
    return [f"target={known.name}", *([f"target.revision='{known.revision}'"] if known.revision else [])]


def _has_weights(source: str) -> bool:
    from drafters.sharing.files import is_hub_id

    return (Path(source).expanduser() / "config.json").is_file() or is_hub_id(source)


def _first(argument: str) -> str:
    return argument.partition("=")[0].partition(".")[0]


def _settings(config_dir: Path, name: str) -> tuple[set[str], set[str]]:
    """Keys and groups of a configuration, those that it is based on included."""
    own: Any = OmegaConf.to_container(OmegaConf.load(config_dir / f"{name}.yaml"))
    keys, groups = set(own), set[str]()
    for entry in own["defaults"]:
        if isinstance(entry, dict):
            groups |= entry.keys()
        elif entry != "_self_":
            more, others = _settings(config_dir, entry)
            keys, groups = keys | more, groups | others
    return keys, groups


def _prompts(run: Path) -> list[str]:
    """What a run was told of its prompts."""
    said = run / ".hydra" / "overrides.yaml"
    every: Any = OmegaConf.to_container(OmegaConf.load(said)) if said.is_file() else []
    return [line for line in map(str, every) if _first(line) == "prompts" and "${oc." not in line]
