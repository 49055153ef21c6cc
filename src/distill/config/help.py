"""`--help` and `--version` of every command; the help is generated from the comments of its configuration."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from distill.config.choices import options as names_of
from distill.config.choices import packages, path_of
from distill.utils.paths import ROOT

WIDTH = 100
GLOBAL = "# @package _global_\n"  # marks a yaml with top-level settings
GROUP = re.compile(r"  - /?(\w+): (\S+)\s*(?:# (.*))?$")
BASE = re.compile(r"^  - /?([\w/]+)$", re.MULTILINE)
INNER = re.compile(r"  - /\w+@(\w+): (\S+)\s*(?:# (.*))?$", re.MULTILINE)  # a choice inside a choice
OPTION = re.compile(r"(\w+):\s*([^#]*?)\s*(?:# (.*))?$")
SETTING = re.compile(r"( *)(\w+):\s*([^#]*?)\s*(?:# (.*))?$")
MORE = """\
A group is chosen by name (drafter=medusa); any setting of it is overridden with a dot
(drafter.depth=3 trainer.max_steps=2000). Lists and mappings are quoted: 'score.temperatures=[0,1]'.
  <group>=<name> --help   explain all settings of this choice: drafter=medusa --help
  --cfg job          print the configuration that a command would run with, and run nothing
  -m a=1,2 b=x,y     run every combination (docs/sweeps.md)
conf/<group>/<name>.yaml explains every setting; an unknown name is rejected with the nearest known name."""
PLACE = f"conf/ and docs/ are in {ROOT}"


def show_help(config_dir: Path, config_name: str) -> None:
    """Print the help text or the version and exit, if --help or --version was given."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        given = dict(word.split("=", 1) for word in words if "=" in word)
        print(help_text(config_dir, config_name, given), flush=True)
    elif "--version" in words:
        print(f"foredraft {version('foredraft')}", flush=True)
    else:
        return
    raise SystemExit(0)


def help_text(config_dir: Path, config_name: str, given: Mapping[str, str]) -> str:
    """Format usage, groups with choices and settings, and options with defaults.

    Args:
        config_dir: folder of configurations.
        config_name: the primary configuration.
        given: choices on the command line; only their settings are explained in full.
    """
    text = (config_dir / f"{config_name}.yaml").read_text()
    about = {name: comment for name, _, comment in _groups((config_dir / "config.yaml").read_text())}
    comments = text.removeprefix(GLOBAL).split("defaults:")[0]
    lines = [line.removeprefix("# ") for line in comments.splitlines()]
    lines = ["usage: " + lines[0], *lines[1:]]
    groups = [*_groups(text), *(group for base in _bases(config_dir, text) for group in _groups(base))]
    if groups:
        lines += ["", "Groups, with their defaults and other choices:"]
    for name, chosen, comment in groups:
        names, choice = names_of(config_dir, name), given.get(name, chosen)
        lines.append(f"  {name}: {choice}  ({comment or about.get(name, '')})")
        settings = _settings(config_dir, name, choice) if choice in names else []
        paragraphs = [" ".join(other for other in names if other != choice)]
        paragraphs += [f"installed: {', '.join(found)}"] if (found := packages(config_dir, name)) else []
        if name not in given and settings:
            paragraphs.append("settings: " + " ".join(f"{key}={value}" for key, value, _ in settings))
        for paragraph in paragraphs:
            lines += textwrap.wrap(paragraph, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
        lines += _table(settings, " " * 6) if name in given else []
    options = {option[0]: option for base in _bases(config_dir, text) for option in _options(base)}
    options |= {option[0]: option for option in _options(text)}
    if options := [option for name, option in options.items() if name not in {group[0] for group in groups}]:
        lines += ["", "Options:", *_table(options, "  ")]
    return "\n".join([*lines, "", MORE, PLACE])


def _table(options: Sequence[tuple[str, str, str]], indent: str) -> list[str]:
    """Format a line per name, value and comment."""
    rows = [(f"{name}={value}", about) for name, value, about in options]
    width = min(36, max((len(option) for option, _ in rows), default=0))
    return [f"{indent}{option:{width}}  {about}".rstrip() for option, about in rows]


def _settings(config_dir: Path, group: str, choice: str) -> list[tuple[str, str, str]]:
    """Dotted name, value and comment of each setting of a choice, including inherited ones."""
    text = path_of(config_dir, group, choice).read_text()
    bases = [base for base in BASE.findall(text) if base != "_self_"]
    settings = {setting[0]: setting for base in bases for setting in _settings(config_dir, group, base)}
    place = [] if text.startswith(GLOBAL) else [group]
    for key, value, about in INNER.findall(text):
        name = ".".join([*place, key])
        settings[name] = (name, value, about)
    parents: list[str] = []
    for match in filter(None, map(SETTING.match, text.splitlines())):
        parents[len(match[1]) // 2 :] = [match[2]]
        if match[3] and match[2][0] != "_" and parents[0] not in ("defaults", "hydra"):
            name = ".".join([*place, *parents])
            settings[name] = (name, match[3], match[4] or "")
    return list(settings.values())


def _bases(config_dir: Path, text: str) -> list[str]:
    """Texts of the configurations that this one inherits from."""
    bases = [(config_dir / f"{name}.yaml").read_text() for name in BASE.findall(text.partition("_self_")[0])]
    return [*(deeper for base in bases for deeper in _bases(config_dir, base)), *bases]


def _groups(text: str) -> list[tuple[str, str, str]]:
    """Name, choice and comment of each entry of the defaults list."""
    matches = map(GROUP.match, text.splitlines())
    return [(m[1], m[2], m[3] or "") for m in matches if m]


def _options(text: str) -> list[tuple[str, str, str]]:
    """Name, default and comment of each ungrouped setting; comments of mappings are in the file."""
    matches = [m for m in map(OPTION.match, text.partition("_self_")[2].splitlines()) if m]
    matches = [m for m in matches if m[1] != "hydra"]
    return [(m[1], "..." if m[2] in ("", "???") else m[2], m[3] or "") for m in matches]
