"""How deep to draft next, by what was accepted so far and what a round costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from decode.errors import UserError

MEMORY = 0.9  # what a round's counts are worth a round later
WEIGHT = 8.0  # tokens that the prior counts for


@dataclass(frozen=True, slots=True)
class Pace:
    """The depth of a row's next chain that makes the most of a round's cost, if the row goes on as it did.

    A row's acceptance is an average over its rounds that forgets: accepted tokens over those that were
    tried (accepted, and the first that was not), where counts fade by `MEMORY` a round and the prior has
    the weight of `WEIGHT` tokens. Rounds that draft nothing let it fade back to the prior, so that
    drafting is tried again where it pays on average. A chain of k is expected to give 1 + a + ... + a^k.

    Args:
        prior: acceptance of a token, before anything is known of a row.
        costs: batch size -> cost of a round whose chains have 0, 1, ... tokens; in any unit.

    Raises:
        UserError: no cost curve, curves of different lengths, or numbers out of range.
    """

    prior: float
    costs: tuple[tuple[int, tuple[float, ...]], ...]

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Pace:
        """As yaml has it: `{prior: 0.6, costs: {1: [1, 1.3], 8: [1, 1.5]}}`."""
        costs = given.get("costs")
        if set(given) != {"prior", "costs"} or not isinstance(costs, Mapping) or not costs:
            raise UserError(
                "decode.adapt: give {prior: ..., costs: {<batch size>: [...]}}, as advise prints it"
            )
        try:
            curves = {int(batch): tuple(float(c) for c in curve) for batch, curve in costs.items()}
            prior = float(given["prior"])  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError) as error:
            raise UserError(f"decode.adapt: {error}; all of it is numbers, as advise prints them") from None
        return cls(prior, tuple(sorted(curves.items())))

    def __post_init__(self) -> None:
        batches, curves = zip(*self.costs, strict=True)
        if len({len(curve) for curve in curves}) > 1 or not curves[0]:
            raise UserError("decode.adapt.costs: every batch size needs as many costs, one or more")
        if not 0 <= self.prior <= 1 or min(batches) < 1 or min(map(min, curves)) <= 0:
            raise UserError(
                "decode.adapt: prior is from 0 to 1, batch sizes are 1 or more, costs more than 0"
            )

    @property
    def deepest(self) -> int:
        """Tokens of the longest chain that has a cost."""
        return len(self.costs[0][1]) - 1

    def price(self, batch: int) -> np.ndarray:
        """(K + 1,) costs at a batch size, between those that are known in proportion."""
        sizes = [size for size, _ in self.costs]
        curves = np.array([curve for _, curve in self.costs])  # (sizes, K + 1)
        return np.array([np.interp(batch, sizes, column) for column in curves.T])

    def start(self, rows: int) -> np.ndarray:
        """(2, B) accepted and tried, of rows of which nothing is known."""
        return np.zeros((2, rows))

    def seen(self, counts: np.ndarray, accepted: Sequence[int], offered: Sequence[int]) -> np.ndarray:
        """(2, B) counts after a round."""
        kept, shown = np.array(accepted, float), np.array(offered, float)
        return MEMORY * counts + np.stack([kept, np.minimum(kept + 1, shown)])

    def depths(self, counts: np.ndarray, alone: bool) -> list[int]:
        """Of every row the length of its next chain.

        Args:
            counts: (2, B).
            alone: each row by its own past, at the largest batch size that has a cost; else the rows
                that are running agree on what is best for them together.
        """
        accepted, tried = counts
        chance = (accepted + self.prior * WEIGHT) / (tried + WEIGHT)  # (B,)
        gain = (chance[:, None] ** np.arange(self.deepest + 1)).cumsum(1)  # (B, K + 1)
        if alone:
            return (gain / np.array(self.costs[-1][1])).argmax(1).tolist()
        best = int((gain.sum(0) / self.price(len(chance))).argmax())
        return [best] * len(chance)
