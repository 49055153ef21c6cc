"""Acceptance that is stated, or that a scorecard has, for a forecast of an engine's speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from decode.errors import UserError
from decode.evaluation.rows import Row
from decode.evaluation.scorecard import Scorecard
from distill.engine_costs.costs import constant
from distill.scoring.compare import scorecard


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAcceptance:
    """P(at least j drafted tokens are accepted), j from 1, and where it is from."""

    survival: tuple[float, ...]
    source: str


def known_acceptance(
    stated: Any, checkpoint: str | None, temperature: float, longest: int
) -> KnownAcceptance | None:
    """The acceptance to forecast with; None if there is none.

    Args:
        stated: a rate of every token; P(at least j accepted) for j = 1, 2, ...; or a checkpoint, a run or a
            scorecard; None: of `checkpoint`.
        checkpoint: folder of the drafter that is served, or None.
        temperature: of the answers.
        longest: longest draft.

    Raises:
        UserError: no probabilities, or a scorecard without chains at this temperature.
    """
    if isinstance(stated, bool | float | int):
        rate = _probabilities([stated])[0]
        return KnownAcceptance(
            survival=tuple(constant(rate, longest)), source=f"{rate:g} of every token, as stated"
        )
    if isinstance(stated, str) or (stated is None and checkpoint):
        where = stated if isinstance(stated, str) else str(checkpoint)
        return _scored(scorecard(Path(where).expanduser()), where, temperature)
    if stated is None:
        return None
    return KnownAcceptance(survival=tuple(_probabilities(list(stated))), source="as stated")


def _probabilities(values: Sequence[float]) -> list[float]:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    shares = numbers and all(0 <= value <= 1 for value in values)
    if not (values and shares and all(early >= late for early, late in pairwise(values))):
        raise UserError(
            f"acceptance={list(values)}: give a rate (0.7), or the shares of rounds that accept 1, 2, ... "
            "tokens, falling from 1 to 0 ([0.7,0.5,0.4])"
        )
    return list(values)


def _scored(card: Scorecard, where: str, temperature: float) -> KnownAcceptance:
    """Acceptance of the longest chain."""
    chains = [
        row
        for row in card.rows
        if row.temperature == temperature and not row.lossy and row.decode == f"chain-{_depth(row)}"
    ]
    if not chains:
        raise UserError(
            f"acceptance={where}: its scorecard has no chain at T={temperature:g}; score one: foredraft "
            f"score checkpoint={where} decode=chain decode.depth=8 'score.temperatures=[{temperature:g}]'"
        )
    row = max(chains, key=_depth)
    source = f"scored: {row.decode}, T={temperature:g}, step {card.checkpoint.step} of {where}"
    return KnownAcceptance(survival=tuple(row.acceptance.survival), source=source)


def _depth(row: Row) -> int:
    return len(row.acceptance.survival)
