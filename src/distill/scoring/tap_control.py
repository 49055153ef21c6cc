"""Control experiment for scores: acceptance with hidden states of wrong positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.errors import UserError
from decode.model.target import Target


class ShuffledTaps:
    """Replaces each tap that a drafter reads by the tap of another position; see `Target.tap_transform`.

    The position is a hash of the tap and the seed. The output stays the target's. If acceptance does not
    drop, the drafter has learned only from the text.

    Args:
        target: target with taps to replace.
        prompts: token ids of the prompts that provide the replacements.
        seed: seed of the choice.

    Raises:
        UserError: the drafter reads no taps.
    """

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]], seed: int) -> None:
        if not target.taps:
            raise UserError("control=shuffled_taps: this drafter reads none of the target's hidden states")
        device, target.tap_transform = target.device, None
        taps = [target.read(torch.tensor([list(p)], device=device)).taps[0] for p in prompts]
        self.bank = torch.cat(taps)  # (M, L, D)
        dice = torch.Generator().manual_seed(seed)
        self.key = torch.randn(self.bank[0].numel(), generator=dice, dtype=torch.float64).to(device)
        target.tap_transform = self

    def __call__(self, taps: Tensor) -> Tensor:
        """(B, n, L, D) -> the same shape."""
        share = (taps.flatten(2).double() @ self.key * 1e3).frac().abs()  # (B, n), close to uniform
        return self.bank[(share * len(self.bank)).long().clamp_max(len(self.bank) - 1)]
