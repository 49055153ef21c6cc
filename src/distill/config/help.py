"""`--help` of every command, generated from the comments of its configuration."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

WIDTH = 100
GROUP = re.compile(r"  - (\w+): (\S+)\s*(?:# (.*))?$")
BASE = re.compile(r"^  - (\w+)$", re.MULTILINE)
OPTION = re.compile(r"(\w+):\s*([^#]*?)\s*(?:# (.*))?$")
MORE = """\
A group is chosen by name (drafter=medusa); any setting of it is overridden with a dot
(drafter.depth=3 trainer.max_steps=2000). Lists and mappings are quoted: 'score.temperatures=[0,1]'.
  --cfg job          print the configuration that a command would run with, and run nothing
  -m a=1,2 b=x,y     every combination, one after the other (docs/sweeps.md)
What a value means stands in conf/<group>/<name>.yaml; what is not known is refused with the nearest name."""


def show_help(config_dir: Path, config_name: str) -> None:
    """Print the help text and exit, if --help was given."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_text(config_dir, config_name))
        raise SystemExit(0)


def help_text(config_dir: Path, config_name: str) -> str:
    """Usage, groups with their choices, and options with their defaults."""
    text = (config_dir / f"{config_name}.yaml").read_text()
    about = {name: comment for name, _, comment in _groups((config_dir / "config.yaml").read_text())}
    lines = [line.removeprefix("# ") for line in text.split("defaults:")[0].splitlines()]
    lines = ["usage: " + lines[0], *lines[1:]]
    groups = [*_groups(text), *(group for base in _bases(config_dir, text) for group in _groups(base))]
    if groups:
        lines += ["", "Groups, with what they are unless you say so, and what else there is:"]
    for name, chosen, comment in groups:
        lines.append(f"  {name}: {chosen}  ({comment or about.get(name, '')})")
        others = [n for n in _names(config_dir / name) if n != chosen]
        lines += textwrap.wrap(" ".join(others), WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    options = {option[0]: option for base in _bases(config_dir, text) for option in _options(base)}
    options |= {option[0]: option for option in _options(text)}
    if options := [option for name, option in options.items() if name not in {group[0] for group in groups}]:
        lines += ["", "Options:"]
        width = max(len(f"{name}={value}") for name, value, _ in options)
        lines += [f"  {f'{name}={value}':{min(width, 36)}}  {said}".rstrip() for name, value, said in options]
    return "\n".join([*lines, "", MORE])


def _names(group: Path) -> list[str]:
    return sorted(path.stem for path in group.glob("*.yaml"))


def _bases(config_dir: Path, text: str) -> list[str]:
    """Texts of the configurations that this one is based on."""
    bases = [(config_dir / f"{name}.yaml").read_text() for name in BASE.findall(text.partition("_self_")[0])]
    return [*(deeper for base in bases for deeper in _bases(config_dir, base)), *bases]


def _groups(text: str) -> list[tuple[str, str, str]]:
    """Name, choice and comment of each entry of the defaults list."""
    matches = map(GROUP.match, text.splitlines())
    return [(m[1], m[2], m[3] or "") for m in matches if m]


def _options(text: str) -> list[tuple[str, str, str]]:
    """Name, default and comment of each setting that is in no group; mappings have theirs in the file."""
    matches = [m for m in map(OPTION.match, text.partition("_self_")[2].splitlines()) if m]
    matches = [m for m in matches if m[1] != "hydra"]
    return [(m[1], "..." if m[2] in ("", "???") else m[2], m[3] or "") for m in matches]
