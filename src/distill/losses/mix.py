"""A loss that is a sum of terms, each a divergence with its own weights and factor.

Training of block drafters adds terms for the accepted prefix to a cross-entropy ("Teaching Diffusion to
Speculate Left-to-Right", arXiv:2606.11552): a focal term on the first error, and the expected accepted
length. Here these are weights of rows (`weights.Focal`, `weights.Streak`), and a `Mix` adds them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from decode.errors import UserError
from distill.losses.divergences import Divergence
from distill.losses.weights import RowWeights, Weights

Part = TypeVar("Part")
NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_-]*")  # in the names of what is logged


@dataclass(frozen=True)
class MixedTerm:
    """One term of a `Mix`, as it is configured.

    Args:
        objective: divergence of the term, or a `Mix`, which a mix refuses.
        weights: its weights; None: those of the run.
        factor: multiplies it, at least 0.
    """

    objective: Divergence | Mix
    weights: Weights | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class Mix:
    """A sum of terms.

    Args:
        terms: by the name under which a term is logged.

    Raises:
        UserError: no term, a mix as a term, a factor that is negative or no number, only factors of 0, or
            weights of their own for every term, so that the run's would not be used.
    """

    terms: Mapping[str, MixedTerm]

    def __post_init__(self) -> None:
        if not self.terms:
            raise UserError(
                "objective.terms: give at least one, as in "
                "'objective.terms={ce: {objective: nll}, chain: {objective: hit, weights: streak}}'"
            )
        for name, term in self.terms.items():
            _check(f"objective.terms.{name}", name, term)
        if not any(term.factor for term in self.terms.values()):
            raise UserError("objective.terms: every factor is 0, so nothing is trained")
        if all(term.weights is not None for term in self.terms.values()):
            raise UserError(
                "objective.terms: every term has weights of its own, so weights= is not used; leave out the "
                "weights of one term, which then has those of weights="
            )


class Term(NamedTuple):
    """One summand of the loss: factor x weights x divergence."""

    name: str  # empty in a loss that is no mix
    divergence: Divergence
    weights: Weights
    factor: float


def terms_of(objective: Divergence | Mix, weights: Weights) -> tuple[Term, ...]:
    """Terms of a loss; equal divergences and equal weights are the same object.

    Args:
        objective: one divergence or a sum of terms.
        weights: of the run; of terms that have none.

    Raises:
        UserError: weights that are negative or not finite at a depth.
    """
    if not isinstance(objective, Mix):
        _check_weights("weights", weights)
        return (Term("", objective, weights, 1.0),)
    found: list[Term] = []
    for name, term in objective.terms.items():
        assert not isinstance(term.objective, Mix)
        divergence = _known([other.divergence for other in found], term.objective)
        own = (
            weights if term.weights is None else _known([weights, *(t.weights for t in found)], term.weights)
        )
        _check_weights("weights" if term.weights is None else f"objective.terms.{name}.weights", own)
        found.append(Term(name, divergence, own, float(term.factor)))
    return tuple(found)


def _known(known: Sequence[Part], part: Part) -> Part:
    """The equal one of `known`, so that what terms share is computed once; `part` if there is none."""
    return next((other for other in known if _content(other) == _content(part)), part)


def _content(part: Any) -> Any:
    """What makes two divergences or weights equal; partial functions are equal only to themselves."""
    return (part.func, part.args, part.keywords) if isinstance(part, partial) else part


def _check(place: str, name: str, term: MixedTerm) -> None:
    if not NAME.fullmatch(name):
        raise UserError(f"{place}: the name of a term is letters, digits, _ or -, and begins with a letter")
    if isinstance(term.objective, Mix):
        raise UserError(f"{place}.objective: is a mix itself; write its terms here")
    factor = term.factor
    number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not number or not math.isfinite(factor) or factor < 0:
        raise UserError(f"{place}.factor={factor}: must be a number, at least 0")


def _check_weights(place: str, weights: Weights) -> None:
    """Check the first two depths, at which every rule of ours that can be wrong is wrong."""
    if isinstance(weights, RowWeights):
        return
    for depth in (1, 2):
        value = weights(depth)
        if not math.isfinite(value) or value < 0:
            raise UserError(f"{place}: depth {depth} has weight {value}; must be a number, at least 0")
