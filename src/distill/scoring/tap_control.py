"""A control for scores: does a drafter read the target at all?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.errors import UserError
from decode.model.target import Target


class Strangers:
    """In place of its taps a drafter gets those of another place; see `Target.disguise`.

    Which one is a function of the taps and the seed, as a hash is. Output stays the target's. A drafter
    that accepts as much with them has learned from the text alone.

    Args:
        target: whose taps are replaced from now on.
        prompts: token ids; their places are what is drawn from.
        seed: of the choice.

    Raises:
        UserError: a drafter that reads no taps.
    """

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]], seed: int) -> None:
        if not target.taps:
            raise UserError("control=shuffled_taps: this drafter reads none of the target's hidden states")
        device, target.disguise = target.device, None
        read = [target.read(torch.tensor([list(p)], device=device)).taps[0] for p in prompts]
        self.bank = torch.cat(read)  # (M, L, D)
        dice = torch.Generator().manual_seed(seed)
        self.key = torch.randn(self.bank[0].numel(), generator=dice, dtype=torch.float64).to(device)
        target.disguise = self

    def __call__(self, taps: Tensor) -> Tensor:
        """(B, n, L, D) -> the same shape."""
        share = (taps.flatten(2).double() @ self.key * 1e3).frac().abs()  # (B, n), as good as uniform
        return self.bank[(share * len(self.bank)).long().clamp_max(len(self.bank) - 1)]
