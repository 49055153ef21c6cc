"""Read the options of `foredraft make`: those of training, and some of its own."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from decode.errors import UserError
from distill.config.compose import compose
from distill.config.read import checked_options, read_part
from distill.options.commands import MakeOptions
from distill.options.run import TrainOptions
from distill.utils.paths import CONF

CONFIG = "make"
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def make_options(cfg: Any) -> MakeOptions:
    """Options that training does not have.

    Raises:
        UserError: a value of another type, or one out of range.
    """
    options = read_part(MakeOptions, cfg)
    seconds_of(options.budget)
    if not options.ship or len(set(options.ship)) < len(options.ship):
        raise UserError("ship: name at least one format, each once")
    if min(options.lengths, default=0) < 1:
        raise UserError("lengths: give numbers of 1 or more")
    if not 0 < options.answers_share < 1:
        raise UserError(f"answers_share={options.answers_share}: must be between 0 and 1")
    if not options.candidates or len(set(options.candidates)) < len(options.candidates):
        raise UserError("candidates: name at least one drafter, each once, as in [eagle3,eagle]")
    return options


def training_options(words: Sequence[str]) -> TrainOptions:
    """Options of the training run.

    Args:
        words: overrides of conf/make.yaml, which name a drafter.

    Raises:
        UserError: see `compose` and `checked_options`.
    """
    own = [field.name for field in fields(MakeOptions)]
    return checked_options(TrainOptions, compose(words, CONF, CONFIG), announce=False, ignored=own)


def seconds_of(budget: str) -> float:
    """Seconds of a time such as 90s, 25m or 1.5h.

    Raises:
        UserError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", budget.strip())
    seconds = float(found[1]) * UNITS[found[2]] if found else 0.0
    if not (found and 0 < seconds < math.inf):
        raise UserError(f"budget={budget}: give a time above 0, as in 90s, 25m or 4h")
    return seconds
