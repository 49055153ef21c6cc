"""Whether an engine's greedy text with a drafter is its text without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from decode.evaluation.audit import Rescorer, widest_tie
from decode.model.target import Target


class TextCounts(NamedTuple):
    """Answers by how they compare."""

    equal: int
    near_ties: int
    different: int


def compare_texts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    drafted: Sequence[Sequence[int]],
) -> TextCounts:
    """Count answers that are equal, that part where two tokens are as likely, and that just differ.

    What comes behind the first difference is another text, and is not compared.

    Args:
        target: scores the two tokens where two answers part, in fp32 if it is small enough.
        prompts: token ids.
        plain: greedy answers without a drafter, token ids.
        drafted: greedy answers to the same prompts with one.
    """
    parted = [i for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if list(a) != list(b)]
    rescore = Rescorer(target) if parted else None
    near = 0
    for i in parted:
        pairs = enumerate(zip(plain[i], drafted[i], strict=False))
        place = next((place for place, (a, b) in pairs if a != b), None)
        if place is None or rescore is None:  # one of them ends early
            continue
        row = rescore(prompts[i], plain[i][: place + 1])[place]  # (V,)
        gap = float((row[plain[i][place]] - row[drafted[i][place]]).abs())
        near += gap <= widest_tie(float(row.abs().max()), target.dtype)
    return TextCounts(len(plain) - len(parted), near, len(parted) - near)
