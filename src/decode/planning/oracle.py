"""Oracle bound: the best choice of a draft in every round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def least_seconds(keeps: Sequence[np.ndarray], prices: Sequence[float]) -> float:
    """Minimum expected seconds to decode a stored answer, over all choices of a draft in every round.

    Round starts form an acyclic graph: a round with draft i at position t costs prices[i] and leads to
    t + j + 1 with the probability of accepting exactly j tokens. Dynamic programming backwards:
    least(t) = min over i of prices[i] + sum_j P_i(j | t) least(t + j + 1). With fixed drafts all
    probabilities are 0 or 1 and this is a shortest path. No policy that chooses drafts before their draws
    is faster, even if it knows the text (docs/advise.md).

    Args:
        keeps: for each draft (starts, K_i), as in `replay.ReplayResult`; (starts, 0) for plain decoding.
        prices: seconds of a round with each draft.
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
    """(starts, K + 1) probabilities of accepting exactly 0, 1, ... tokens."""
    through = np.cumprod(np.concatenate([np.ones((len(keep), 1)), keep], 1), 1)
    return through - np.concatenate([through[:, 1:], np.zeros((len(keep), 1))], 1)


def min_seconds_per_row(price: np.ndarray) -> float:
    """Minimum seconds per row of a round, from (B,) seconds of rounds with 1, 2, ... B rows."""
    return float((price / np.arange(1, len(price) + 1)).min())
