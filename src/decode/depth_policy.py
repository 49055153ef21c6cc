"""Adaptive draft length: chosen from past acceptance and the cost of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from decode.errors import UserError

DECAY = 0.9  # per round, of past counts
PRIOR_TOKENS = 8.0  # weight of the prior, in tokens


@dataclass(frozen=True, slots=True)
class DepthPolicy:
    """Choose the draft length with the most expected tokens per cost.

    The acceptance rate a of a row is a decayed average over its rounds: accepted tokens over tried
    tokens (the accepted ones and the first rejected one). Counts decay by `DECAY` per round, and the prior
    has the weight of `PRIOR_TOKENS` tokens. Rounds without a draft let the rate return to the prior, so
    drafting is tried again if it pays on average. A chain of k tokens has an expected yield of
    1 + a + ... + a^k.

    Args:
        prior: acceptance rate of a token before a row has any history.
        costs: (batch size, cost of a round with a chain of 0, 1, ... tokens) pairs; in any one unit.

    Raises:
        UserError: no cost curve, curves of different lengths, or numbers out of range.
    """

    prior: float
    costs: tuple[tuple[int, tuple[float, ...]], ...]

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> DepthPolicy:
        """Build from yaml: `{prior: 0.6, costs: {1: [1, 1.3], 8: [1, 1.5]}}`."""
        costs = config.get("costs")
        if set(config) != {"prior", "costs"} or not isinstance(costs, Mapping) or not costs:
            raise UserError(
                "decode.adapt: give {prior: ..., costs: {<batch size>: [...]}}, as advise prints it"
            )
        try:
            curves = {int(batch): tuple(float(c) for c in curve) for batch, curve in costs.items()}
            prior = float(config["prior"])  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError) as error:
            raise UserError(
                f"decode.adapt: {error}; all values must be numbers, as advise prints them"
            ) from None
        return cls(prior, tuple(sorted(curves.items())))

    @property
    def settings(self) -> dict[str, object]:
        """Plain values, as `from_config` reads them."""
        return {"prior": self.prior, "costs": {str(batch): list(curve) for batch, curve in self.costs}}

    def __post_init__(self) -> None:
        batches, curves = zip(*self.costs, strict=True)
        if len({len(curve) for curve in curves}) > 1 or not curves[0]:
            raise UserError(
                "decode.adapt.costs: every batch size needs the same number of costs, at least one"
            )
        if not 0 <= self.prior <= 1 or min(batches) < 1 or min(map(min, curves)) <= 0:
            raise UserError("decode.adapt: prior must be from 0 to 1, batch sizes at least 1, costs above 0")

    @property
    def max_depth(self) -> int:
        """Length of the longest chain with a cost."""
        return len(self.costs[0][1]) - 1

    def round_costs(self, batch: int) -> np.ndarray:
        """(K + 1,) costs at a batch size, interpolated linearly between the given sizes."""
        sizes = [size for size, _ in self.costs]
        curves = np.array([curve for _, curve in self.costs])  # (sizes, K + 1)
        return np.array([np.interp(batch, sizes, column) for column in curves.T])

    def initial_counts(self, rows: int) -> np.ndarray:
        """(2, B) counts of accepted and tried tokens, for new rows."""
        return np.zeros((2, rows))

    def update(self, counts: np.ndarray, accepted: Sequence[int], draft_lengths: Sequence[int]) -> np.ndarray:
        """(2, B) counts after a round, from (B,) accepted tokens and draft lengths."""
        num_accepted, length = np.array(accepted, float), np.array(draft_lengths, float)
        # Tried tokens: the accepted ones and the first rejected one, if there was one.
        return DECAY * counts + np.stack([num_accepted, np.minimum(num_accepted + 1, length)])

    def depths(self, counts: np.ndarray, per_row: bool) -> list[int]:
        """Draft length of each row's next round.

        Args:
            counts: (2, B) accepted and tried tokens.
            per_row: choose for each row from its own history, at the largest batch size with a cost;
                otherwise choose one length for the whole batch.
        """
        accepted, tried = counts
        rate = (accepted + self.prior * PRIOR_TOKENS) / (tried + PRIOR_TOKENS)  # (B,)
        expected = (rate[:, None] ** np.arange(self.max_depth + 1)).cumsum(1)  # (B, K + 1) tokens
        if per_row:
            return (expected / np.array(self.costs[-1][1])).argmax(1).tolist()
        best = int((expected.sum(0) / self.round_costs(len(rate))).argmax())
        return [best] * len(rate)
