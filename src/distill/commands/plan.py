"""Estimate hours, disk, memory and tau of a large run, before any run or from a small one: foredraft plan.

Options are checked before torch is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decode.errors import UserError
from distill.cli.main import rewrite
from distill.commands.planning.constants import CARDS
from distill.config.compose import compose
from distill.config.help import show_help
from distill.config.plan_options import plan_option, plan_option_names, plan_settings, read_plan_options
from distill.config.validate import check_paths, check_ranges
from distill.utils.atomic_files import put
from distill.utils.paths import CONF
from distill.utils.redact import printable

if TYPE_CHECKING:
    from distill.options.commands import PlanOptions

# Options that say how the run itself is done; a plan from a small run takes them from there.
BEFORE = ("card", "prompt_tokens", "answer_tokens")


def main() -> None:
    """Print the estimate."""
    show_help(CONF, "plan")
    options, training = read_arguments(sys.argv[1:])
    from distill.commands.planning.estimate import as_text  # slow imports of torch
    from distill.commands.planning.large_run import plan

    estimate = plan(options, training)
    print(printable(as_text(estimate)))
    if options.out:
        card = asdict(estimate) | {"hours": estimate.hours}
        put(Path(options.out), json.dumps(card, indent=1) + "\n")


def read_arguments(arguments: Sequence[str]) -> tuple[PlanOptions, list[str]]:
    """Options of the plan, and those of `foredraft train`.

    Raises:
        UserError: a flag, an unknown option, a value out of range, or one that a plan from a run has not.
    """
    own, training, names = [], [], plan_option_names()
    for word in _options(arguments):
        name, _, value = word.partition("=")
        counted = name != "prompts" or value.lstrip("-").isdigit()
        (own if name in names and counted else training).append(word)
    for word in training:
        name, _, value = word.partition("=")
        if written := plan_option(name, value):
            raise UserError(f"{name}: no such option; write {written}")
    settings = plan_settings(own)
    cfg = compose(rewrite(training, CONF), CONF, own=names)
    if settings.run is None:
        _check_before(settings, cfg)
    else:
        _check_from_run(settings, training)
    return read_plan_options(settings), training


def _check_before(settings: Any, cfg: Any) -> None:
    """Check options of a plan before any run."""
    check_ranges(cfg)
    check_paths(cfg)
    if settings.card is not None and settings.card.lower() not in CARDS:
        raise UserError(f"card={settings.card}: choose one of {', '.join(CARDS)}")
    if "_target_" not in cfg.drafter:
        raise UserError("drafter=auto: its budget is drafter.minutes; name a drafter to plan for it")


def _check_from_run(settings: Any, training: Sequence[str]) -> None:
    """Check options of a plan from a small run."""
    given = [*training, *(f"{name}={settings[name]}" for name in BEFORE if settings[name] is not None)]
    if given:
        raise UserError(f"{given[0]}: a plan from {settings.run} takes it from that run; leave it out")
    if settings.prompts is None:
        raise UserError("prompts: give the number of the large run's prompts, as in prompts=100000")
    if settings.gpus == 0:
        raise UserError("gpus=0: give the number of devices like the small run's, 1 or more")
    if not Path(settings.run).is_dir():
        raise UserError(f"run={settings.run}: no such folder; give a run's, as in run=outputs/<date>/<time>")


def _options(arguments: Sequence[str]) -> list[str]:
    """The arguments as option=value; `--gpus 8` is gpus=8, and a folder is run=.

    Raises:
        UserError: another flag.
    """
    found, words = [], iter(arguments)
    for word in words:
        name, sign, value = word.removeprefix("--").partition("=")
        if name == "gpus" and word.startswith("--"):
            found.append(f"gpus={value if sign else next(words, '')}")
        elif word.startswith("-"):
            name, value = name.lstrip("-"), value or _number(words)
            written = plan_option(name, value) or f"{name}={value or '...'}"
            raise UserError(f"{word}: write {written}; options have no dashes")
        elif sign:
            found.append(word)
        else:
            found.append(f"run={word}")
    return found


def _number(words: Any) -> str:
    """The next word where it is the value of a flag."""
    word = next(words, "")
    return "" if "=" in word or word[:1] == "-" else word
