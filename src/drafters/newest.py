"""What drafters share that look at the newest feature and the root alone: no cache to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from decode.errors import UserError
from decode.target import LAST, Target
from drafters.base import Drafter


@dataclass(slots=True)
class Newest:
    """All that is looked at; None before the first `advance`."""

    feature: Tensor | None = None  # (B, D) the target's last, at the token before the root
    root: Tensor | None = None  # (B,)


class NewestDrafter(Drafter):
    """Their state.

    Attributes:
        depth: levels that it can draft, K.
    """

    taps = (LAST,)
    depth: int

    @property
    def deepest(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A head for each, and no more."""
        return self.depth

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.parameters()).dtype

    @override
    def new_state(self, rows: int) -> Newest:
        return Newest()

    @override
    def advance(
        self,
        state: Newest,
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        end = torch.tensor(counts).to(taps.device) - 1  # (B,)
        state.feature = taps[torch.arange(len(end), device=taps.device), end, 0]
        state.root = root

    @override
    def select(self, state: Newest, rows: Sequence[int]) -> None:
        if state.feature is not None and state.root is not None:
            state.feature, state.root = state.feature[list(rows)], state.root[list(rows)]


def at_least_one(**settings: Any) -> None:
    """Refuse counts below 1.

    Raises:
        UserError: one of them.
    """
    for name, value in settings.items():
        if value < 1:
            raise UserError(f"drafter.{name}={value} must be at least 1")
