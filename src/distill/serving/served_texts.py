"""Check an engine's drafted text: greedy by its plain text, sampled by the target's distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from decode.evaluation.audit import Rescorer, widest_tie
from decode.model.target import Target
from decode.sampling import Sampler
from distill.rollouts.surprisal import MAX_Z, MAX_ZERO_PROB_SHARE, measure


class TextCounts(NamedTuple):
    """Number of answers by outcome of the comparison."""

    equal: int
    near_ties: int
    different: int


class Excess(NamedTuple):
    """Surprisal of sampled answers above the target's entropy.

    Attributes:
        nats: mean a token, over the possible ones; about 0 if they were drawn from the target.
        error: its standard error if they were.
        impossible: share of tokens with probability 0.
    """

    nats: float
    error: float
    impossible: float

    @property
    def by_chance(self) -> bool:
        """Whether answers that were drawn from the target may have it."""
        return abs(self.nats) <= MAX_Z * self.error and self.impossible <= MAX_ZERO_PROB_SHARE


def excess_of(
    target: Target, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], sampler: Sampler
) -> Excess:
    """Run the target on sampled answers.

    Args:
        target: of which they should be samples.
        prompts: token ids.
        answers: token ids.
        sampler: of the answers; must not need the history.

    Raises:
        UserError: the target's hidden states are not finite.
    """
    pairs = zip(prompts, answers, strict=True)
    rows = [
        {"tokens": [*prompt, *answer], "loss_mask": [0] * len(prompt) + [1] * len(answer)}
        for prompt, answer in pairs
    ]
    stats = measure(target, rows, sampler)
    possible = stats.possible
    return Excess(*stats.excess(), 1 - float(possible.mean()) if len(possible) else 0.0)


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
