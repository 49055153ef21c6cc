"""Bootstrap intervals over prompts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

DRAWS = 2000


def resampled_sums(columns: Sequence[ArrayLike], groups: Sequence[Hashable] | None = None) -> np.ndarray:
    """Sums of columns over prompts resampled with replacement.

    All columns use the same resamples, so statistics are paired by resample.

    Args:
        columns: C arrays of (N,) values, per prompt or position.
        groups: (N,) values with the same group are resampled together; None: each value is a group.

    Returns:
        (DRAWS, C). The resamples depend only on the number of groups.
    """
    values = np.stack([np.asarray(column, float) for column in columns], 1)  # (N, C)
    if groups is not None:
        _, member = np.unique(np.asarray(groups), return_inverse=True)
        values = np.stack([np.bincount(member, column) for column in values.T], 1)
    chosen = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    weights = np.zeros((DRAWS, len(values)))  # how often each group is drawn
    np.add.at(weights, (np.arange(DRAWS)[:, None], chosen), 1)
    return weights @ values


def ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """Ratio of two columns of `resampled_sums`; 0 where `bottom` is 0."""
    return np.divide(top, bottom, out=np.zeros(len(top)), where=bottom != 0)


def central_interval(values: np.ndarray) -> tuple[float, float]:
    """The central 95 % interval of the resamples."""
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def interval(
    top: ArrayLike, bottom: ArrayLike, groups: Sequence[Hashable] | None = None
) -> tuple[float, float]:
    """95 % bootstrap interval of sum(top) / sum(bottom).

    Args:
        top: (N,) values, per prompt or position.
        bottom: (N,) values; a resample with a sum of 0 counts as 0.
        groups: as in `resampled_sums`.
    """
    if not len(np.asarray(top)):
        return 0.0, 0.0
    tops, bottoms = resampled_sums([top, bottom], groups).T
    return central_interval(ratio(tops, bottoms))
