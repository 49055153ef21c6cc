"""s_j, the share of rounds that accept at least j draft tokens, where the end of a text cuts rounds short.

A round whose text ends behind its R-th token says nothing of later ones. To leave it out would be wrong: of
two rounds near an end, the one that accepts more is cut. So its first R tokens count, as in survival analysis
with censoring: alpha_j is the share of acceptances among the rounds that accepted j - 1 tokens and whose text
has a j-th, and s_j = alpha_1 ... alpha_j (Kaplan and Meier 1958). Where texts end must not depend on the
draft; it does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decode.generation.types import Output

TINY = 1e-300  # in place of no rounds


def kaplan_meier(counts: np.ndarray) -> list[float]:
    """s_j, j from 1; 0 from the first place on that no text has.

    Args:
        counts: (2, K + 1) rounds that accepted a token j, and rounds that accepted all before it and whose
            text has it. Column 0 is all rounds.
    """
    accepted, tried = counts
    # s_j = (share that accepted j) times (those that accepted i - 1) / (those of them that tried i), i up to
    # j. Where no text ends, all of them tried, and only the share is left.
    share = accepted[1:] / max(accepted[0], TINY)
    uncut = np.divide(accepted[:-1], tried[1:], out=np.zeros(len(share)), where=tried[1:] > 0)
    return (share * np.cumprod(uncut)).tolist()


def decoded_counts(outputs: Sequence[Output], depth: int) -> np.ndarray:
    """(2, depth + 1) counts of a decoder run, see `kaplan_meier`.

    A round that emits e tokens tries e places; what it accepts behind the end of the text is not read.
    """
    counts = np.zeros((2, depth + 1))
    for output in outputs:
        for accepted, emitted in zip(output.accepted, output.emitted, strict=True):
            counts[0, : min(accepted, emitted) + 1] += 1
            counts[1, : emitted + 1] += 1
    return counts
