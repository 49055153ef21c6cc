"""Intervals of what was measured, by drawing the same prompts again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

DRAWS = 2000


def drawn(columns: Sequence[ArrayLike], groups: Sequence[Hashable] | None = None) -> np.ndarray:
    """Sums of every column over prompts drawn with replacement, the same ones for all columns.

    So what is computed of one draw is paired: a prompt that is easy for all is drawn for all.

    Args:
        columns: C of (N,), of each prompt or place.
        groups: (N,) what is drawn together, since it is alike; default everything by itself.

    Returns:
        (DRAWS, C), the same draws for any columns of as many groups.
    """
    values = np.stack([np.asarray(column, float) for column in columns], 1)  # (N, C)
    if groups is not None:
        _, member = np.unique(np.asarray(groups), return_inverse=True)
        values = np.stack([np.bincount(member, column) for column in values.T], 1)
    chosen = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    times = np.zeros((DRAWS, len(values)))  # that each group is drawn
    np.add.at(times, (np.arange(DRAWS)[:, None], chosen), 1)
    return times @ values


def ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """Of two columns of `drawn`; a draw whose `bottom` is 0 counts as 0."""
    return np.divide(top, bottom, out=np.zeros(len(top)), where=bottom != 0)


def middle(values: np.ndarray) -> tuple[float, float]:
    """Where the middle 95 % of all draws lie."""
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def interval(
    top: ArrayLike, bottom: ArrayLike, groups: Sequence[Hashable] | None = None
) -> tuple[float, float]:
    """95 % bootstrap interval of sum(top) / sum(bottom), the same draws for any `top` of as many groups.

    Args:
        top: (N,) of each prompt, or place.
        bottom: (N,) likewise; a draw in which it is 0 throughout counts as 0.
        groups: (N,) what is drawn together, since it is alike; default everything by itself.
    """
    if not len(np.asarray(top)):
        return 0.0, 0.0
    tops, bottoms = drawn([top, bottom], groups).T
    return middle(ratio(tops, bottoms))
