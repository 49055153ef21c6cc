"""s_j, the share of rounds that accept at least j draft tokens, corrected for rounds cut by a text's end.

A round with only R tokens left in its text has no information on later ones. Omitting it would bias the
result: near the end, rounds that accept more are cut. So its first R tokens count, as in survival analysis
with censoring: alpha_j is the share of acceptances among rounds that accepted j - 1 tokens and have a j-th
in their text, and s_j = alpha_1 ... alpha_j (Kaplan and Meier 1958). The end of a text must not depend
on the draft; it does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decode.generation.types import Output

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
