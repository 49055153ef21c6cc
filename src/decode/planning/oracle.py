"""What a perfect choice among drafts, made anew in every round, would reach."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def least_seconds(keeps: Sequence[np.ndarray], prices: Sequence[float]) -> float:
    """Of one stored answer, the least expected seconds of any way to pick a draft in every round.

    The places where a round may begin are nodes of a graph without cycles; a round with draft i at place t
    costs prices[i] and goes to t + j + 1 with the chance that it keeps exactly j tokens. Backwards,
    least(t) = min over i of prices[i] + sum_j P_i(j | t) least(t + j + 1). Where drafts are chosen, all
    chances are 0 or 1 and this is a shortest path. Nothing that picks drafts before it has seen their
    coins takes less, whatever it knows of the text (docs/advise.md).

    Args:
        keeps: of each draft (starts, K_i) chances that token j past a start is kept if those before are,
            as `replay.Replayed` has them; (starts, 0) for plain decoding.
        prices: seconds of a round with each.
    """
    starts = len(keeps[0])
    ends = [_ends(keep) for keep in keeps]
    least = np.zeros(starts + max(end.shape[1] for end in ends) + 1)
    for t in reversed(range(starts)):
        least[t] = min(
            price + float(end[t] @ least[t + 1 : t + 1 + end.shape[1]])
            for end, price in zip(ends, prices, strict=True)
        )
    return float(least[0])


def _ends(keep: np.ndarray) -> np.ndarray:
    """(starts, K + 1) chances to keep exactly 0, 1, ... tokens."""
    through = np.cumprod(np.concatenate([np.ones((len(keep), 1)), keep], 1), 1)
    return through - np.concatenate([through[:, 1:], np.zeros((len(keep), 1))], 1)


def lowest_share(price: np.ndarray) -> float:
    """(B,) seconds of a round with 1, 2, ... B rows -> the least that a row of a round can be charged."""
    return float((price / np.arange(1, len(price) + 1)).min())
