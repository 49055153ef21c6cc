"""Compare an engine's greedy text with a drafter to its text without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from decode.evaluation.audit import Rescorer, widest_tie
from decode.model.target import Target


class TextCounts(NamedTuple):
    """Number of answers by outcome of the comparison."""

    equal: int
    near_ties: int
    different: int


def compare_texts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    drafted: Sequence[Sequence[int]],
) -> TextCounts:
    """Count answers that are equal, that differ at a near tie, and that differ otherwise.

    Only the first difference is examined, since the context differs after it.

    Args:
        target: scores the two tokens at the first difference, in fp32 if it is small enough.
        prompts: token ids.
        plain: greedy answers without a drafter, token ids.
        drafted: greedy answers to the same prompts with a drafter.
    """
    parted = [i for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if list(a) != list(b)]
    rescore = Rescorer(target) if parted else None
    near = 0
    for i in parted:
        pairs = enumerate(zip(plain[i], drafted[i], strict=False))
        place = next((place for place, (a, b) in pairs if a != b), None)
        if place is None or rescore is None:  # one answer ends early
            continue
        row = rescore(prompts[i], plain[i][: place + 1])[place]  # (V,)
        gap = float((row[plain[i][place]] - row[drafted[i][place]]).abs())
        near += gap <= widest_tie(float(row.abs().max()), target.dtype)
    return TextCounts(len(plain) - len(parted), near, len(parted) - near)
