"""Intervals of what was measured, by drawing the same prompts again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

DRAWS = 2000


def interval(
    top: ArrayLike, bottom: ArrayLike, groups: Sequence[Hashable] | None = None
) -> tuple[float, float]:
    """95 % bootstrap interval of sum(top) / sum(bottom), the same draws for any `top` of as many groups.

    Args:
        top: (N,) of each prompt, or place.
        bottom: (N,) likewise; a draw in which it is 0 throughout counts as 0.
        groups: (N,) what is drawn together, since it is alike; default everything by itself.
    """
    tops, bottoms = np.asarray(top, float), np.asarray(bottom, float)
    if not len(tops):
        return 0.0, 0.0
    if groups is not None:
        _, member = np.unique(np.asarray(groups), return_inverse=True)
        tops, bottoms = np.bincount(member, tops), np.bincount(member, bottoms)
    chosen = np.random.default_rng(0).integers(len(tops), size=(DRAWS, len(tops)))
    below = bottoms[chosen].sum(1)
    ratios = np.divide(tops[chosen].sum(1), below, out=np.zeros(DRAWS), where=below != 0)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)
