"""Running rows of a loop in the buffers of captured rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from decode.errors import UserError
from decode.generation.capture.makers import Captures, Key
from decode.generation.capture.round import FixedRound, RoundResult, RunningTexts
from decode.generation.capture.state import StateBuffers
from decode.generation.types import Proposer
from decode.kernels.weight_state import current_state
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler


class CapturedRows:
    """Rows of a loop, each at a place of a captured round.

    Args:
        captures: of the target.
        drafter: see `FixedRound`.
        plan: see `FixedRound`.
        sampler: see `FixedRound`.
        texts: the rows, after their prefill.
        rows: most rows at a time.
        slots: most tokens of a text, and slots of a draft.

    Attributes:
        places: of the running rows, in their order.

    Raises:
        NotCapturedError: see `FixedRound` and `trace`.
    """

    def __init__(
        self,
        captures: Captures,
        drafter: Proposer | None,
        plan: Plan,
        sampler: Sampler,
        texts: RunningTexts,
        rows: int,
        slots: int,
    ) -> None:
        rows, self.capacity = bucket(rows, 1), bucket(slots, 64)
        target, self._captures = texts.target, captures
        parts = [
            *target.model.parameters(),
            *(drafter.parameters() if isinstance(drafter, nn.Module) else ()),
        ]
        weights = tuple(map(current_state, parts))
        taps, dtype = (target.taps, target.tap_transform), str(target.dtype)
        self._key = Key(drafter, weights, (plan, sampler, taps, dtype, self.capacity), rows)
        self._captured = captures.of(
            self._key,
            lambda: FixedRound(drafter, plan, sampler, StateBuffers(texts, rows, self.capacity)),
        )
        self._captured.owner, self.places = self, []
        self._captured.round.active.zero_()
        self.load(texts, len(texts.root))

    def load(self, texts: RunningTexts, count: int) -> None:
        """Add the first `count` rows of some texts, after the running ones."""
        fixed, free = self._captured.round, [*range(self._captured.round.rows)]
        free = [place for place in free if place not in self.places][:count]
        for row, place in enumerate(free):
            fixed.state.load(texts, place, row)
            fixed.active[place] = True
        self.places += free
        self._coin: KeyedCoin | None = None

    def keep(self, rows: Sequence[int], more_wait: bool) -> None:
        """Let only these rows go on; the others stand still until `more_wait` is False and half are left."""
        left = [self.places[row] for row in rows]
        fixed = self._captured.round
        for place in set(self.places) - set(left):
            fixed.active[place] = False
        self.places, self._coin = left, None
        size = bucket(max(1, len(left)), 1)
        if left and not more_wait and size < fixed.rows:
            self._move(size)

    def _move(self, rows: int) -> None:
        """Move the running rows to a round with fewer rows."""
        old, places = self._captured, self.places
        self._captured = self._captures.of(self._key._replace(rows=rows), lambda: old.round.resized(rows))
        self._captured.owner, new = self, self._captured.round
        new.active.zero_()
        for place, source in enumerate(places):
            for buffer, value in zip(new.state.tensors, old.round.state.tensors, strict=True):
                buffer[place] = value[source]
            new.active[place] = True
        self.places = [*range(len(places))]

    def round(self, coin: KeyedCoin, position: np.ndarray, rounds: np.ndarray) -> RoundResult:
        """Run a round of all places; see `KeyedCoin.at` for the arguments, of the running rows."""
        captured = self._captured
        if captured.owner is not self:
            raise UserError("stream: the target has started another text; finish one stream before the next")
        assert position.max() < self.capacity, "a text outgrows its slots"
        # Places without a running row repeat the draws of the first one.
        index = np.zeros(captured.round.rows, np.int64)
        index[self.places] = np.arange(len(self.places))
        if self._coin is None:
            self._coin = coin.select(index.tolist())
        captured.round.feed(self._coin.at(position[index], rounds[index]))
        return captured.run()


def bucket(count: int, least: int) -> int:
    """`count` rounded up: to a power of two, or if large to an eighth of it, which adds a fifth at most."""
    power = max(least, 1 << max(0, count - 1).bit_length())
    step = max(least, power // 8)
    return power if power <= 8 * least else -(-count // step) * step
