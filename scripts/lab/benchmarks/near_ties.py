"""Which greedy texts differ, and which of them part at a near tie of the target's logits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.evaluation.audit import LARGEST_COPY
from decode.model.target import Target

# Dtypes in which the rounding of others is measured; in float64 no difference is put down to rounding.
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
Tokens = Sequence[int]


class Parting(NamedTuple):
    """Where two texts part, as the target's wider copy sees it."""

    gap: float  # between the logits of the two tokens
    rounding: float  # largest error of the two tokens' logits in the target's dtype, along the common text

    @property
    def is_near_tie(self) -> bool:
        """Whether such errors, one for each token, can reverse their order."""
        return self.gap < 2 * self.rounding


class Differences:
    """Compares texts with those of a first contender.

    A text that differs is read again up to the place where the two part: the same plain pass over the
    common text, without cache, in the target's dtype and in a wider one to which the same weights are
    cast. The gap is that of the wider pass where the texts part. The errors are the differences of the two
    passes at all positions: the errors of the contenders' own passes are others of the same size, and one
    position is too small a sample of them (docs/speed.md).

    Args:
        target: whose greedy texts are compared.
        prompts: token ids.
        first: (prompts) new tokens of the first contender.
    """

    def __init__(self, target: Target, prompts: Sequence[Tokens], first: Sequence[Tokens]) -> None:
        self.target, self.prompts, self.first = target, prompts, first
        self._seen: dict[tuple[int, ...], Parting] = {}

    def __call__(self, texts: Sequence[Tokens]) -> dict[str, Any]:
        """Counts of one contender's (prompts) texts.

        Returns:
            `differ`: texts that are not the first contender's; `near_ties`: those of them that part at a
            near tie; `largest_gap`: at the places where they part, in logits, or None if none do. A text
            that is the beginning of the other parts nowhere, so it is no near tie. The last two are None
            if the target is too large to be cast, or lies on several devices.
        """
        rows = zip(self.prompts, self.first, texts, strict=True)
        different = [(prompt, one, other) for prompt, one, other in rows if list(one) != list(other)]
        if different and not self._can_cast:
            return {"differ": len(different), "near_ties": None, "largest_gap": None}
        partings = [found for case in different if (found := self._parting(*case))]
        return {
            "differ": len(different),
            "near_ties": sum(found.is_near_tie for found in partings),
            "largest_gap": max((found.gap for found in partings), default=None),
        }

    def _parting(self, prompt: Tokens, one: Tokens, other: Tokens) -> Parting | None:
        place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if place is None:
            return None
        key = *prompt, *one[:place], *sorted([one[place], other[place]])
        if key not in self._seen:  # most contenders part from the first at the same places
            text, pair = [*prompt, *one[:place]], [one[place], other[place]]
            exact, rounded = (_logits(reader, text, pair) for reader in (self._wide, self.target))
            gap, error = (exact[-1, 0] - exact[-1, 1]).abs(), (rounded - exact).abs().max()
            self._seen[key] = Parting(float(gap), float(error))
        return self._seen[key]

    @property
    def _can_cast(self) -> bool:
        return self.target.movable and sum(p.numel() for p in self.target.model.parameters()) <= LARGEST_COPY

    @cached_property
    def _wide(self) -> Target:
        """The target in a wider dtype, if there is one."""
        wide = WIDER.get(self.target.dtype)
        if wide is None:
            return self.target
        model: Any = copy.deepcopy(self.target.model)
        return Target(model.to(wide))


@torch.inference_mode()
def _logits(target: Target, text: Tokens, pair: Tokens) -> Tensor:
    """(n, 2) float64 logits of two tokens after each of the n tokens of a text, from a plain pass."""
    last = target.read(torch.tensor([list(text)], device=target.device)).last  # (1, n, D)
    return target.head(last[0])[:, list(pair)].double()
