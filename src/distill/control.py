"""A control for scores: does a drafter read the target at all?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.errors import UserError
from decode.target import Target


class Strangers:
    """In place of its taps a drafter gets those of random other places; see `Target.disguise`.

    Output stays the target's. A drafter that accepts as much with them has learned from the text alone.

    Args:
        target: whose taps are replaced from now on.
        prompts: token ids; their places are what is drawn from.
        seed: of the draws.

    Raises:
        UserError: a drafter that reads no taps.
    """

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]], seed: int) -> None:
        if not target.taps:
            raise UserError("control=shuffled_taps: this drafter reads none of the target's hidden states")
        device, target.disguise = target.device, None
        read = [target.read(torch.tensor([list(p)], device=device)).taps[0] for p in prompts]
        self.bank = torch.cat(read)  # (M, L, D)
        self.dice = torch.Generator().manual_seed(seed)
        target.disguise = self

    def __call__(self, taps: Tensor) -> Tensor:
        """(B, n, L, D) -> the same shape."""
        chosen = torch.randint(len(self.bank), taps.shape[:2], generator=self.dice)
        return self.bank[chosen.to(taps.device)]
