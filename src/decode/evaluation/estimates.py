"""Estimates from counts: survival of drafts in rounds, and bootstrap intervals over prompts.

Survival is s_j, the share of rounds that accept at least j draft tokens, corrected for rounds cut by a
text's end.

A round with only R tokens left in its text has no information on later ones. Omitting it would bias the
result: near the end, rounds that accept more are cut. So its first R tokens count, as in survival analysis
with censoring: alpha_j is the share of acceptances among rounds that accepted j - 1 tokens and have a j-th
in their text, and s_j = alpha_1 ... alpha_j (Kaplan and Meier 1958). The end of a text must not depend
on the draft; it does not.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from decode.generation.types import Output

DRAWS = 2000  # resamples of a bootstrap
MIN_SAMPLES = 5  # prompts or batches; with fewer, bootstrap intervals are far too narrow
TINY = 1e-300  # instead of 0 rounds


def kaplan_meier(counts: np.ndarray) -> list[float]:
    """s_j, j from 1; 0 from the first position that no text has.

    Args:
        counts: (2, K + 1) rounds that accepted token j, and rounds that accepted all tokens before it and
            have it in their text. Column 0 is all rounds.
    """
    accepted, tried = counts
    # s_j = (share that accepted j) * (rounds that accepted i - 1) / (rounds of them that tried i), i up to j.
    # If no text ends, all of them tried, and only the share remains.
    share = accepted[1:] / max(accepted[0], TINY)
    uncut = np.divide(accepted[:-1], tried[1:], out=np.zeros(len(share)), where=tried[1:] > 0)
    return (share * np.cumprod(uncut)).tolist()


def decoded_counts(outputs: Sequence[Output], depth: int) -> np.ndarray:
    """(2, depth + 1) counts of a decoder run; see `kaplan_meier`.

    A round that emits e tokens tries e positions; acceptances after the end of the text are ignored.
    """
    counts = np.zeros((2, depth + 1))
    for output in outputs:
        for accepted, emitted in zip(output.accepted, output.emitted, strict=True):
            counts[0, : min(accepted, emitted) + 1] += 1
            counts[1, : emitted + 1] += 1
    return counts


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
