"""Name and tags of a run in a tracker: drafter, target and objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distill.config.choices import objective_name
from distill.scoring.tables import target_label
from distill.utils.paths import CONF
from drafters.base import Drafter
from drafters.registry import KNOWN, drafter_class

LONGEST = 64  # characters of a tag of W&B


def parts_of(options: Mapping[str, Any]) -> list[str]:
    """Drafter, target and objective of a run by their short names; no objective where nothing is trained.

    Args:
        options: the run's options by group.
    """
    drafter = _drafter(options["drafter"])
    parts = [drafter, target_label(str(options["target"]["path"]))]
    trains = drafter not in KNOWN or drafter_class(drafter).unroll is not Drafter.unroll
    return parts + [objective_name(CONF, options["objective"])] * trains


def run_name(options: Mapping[str, Any], job: str = "") -> str:
    """Name of a run, with the options that tell a sweep's job from the others."""
    return ", ".join([" ".join(parts_of(options)), *([job] if job else [])])


def tags(options: Mapping[str, Any]) -> list[str]:
    """Tags of a run."""
    return [part[:LONGEST] for part in dict.fromkeys(parts_of(options))]


def _drafter(options: Mapping[str, Any]) -> str:
    """Short name of the drafter's class; the name of one that is not ours."""
    if "families" in options:
        return "auto"
    module, _, name = str(options["_target_"]).removesuffix(".for_target").rpartition(".")
    return next((short for short, place in KNOWN.items() if place == f"{module}:{name}"), name.lower())
