"""Running rows of a loop in the buffers of captured rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from decode.draft import Draft
from decode.errors import UserError
from decode.generation.capture.makers import Captures, Key
from decode.generation.capture.round import FixedRound, RunningTexts
from decode.generation.capture.state import NotCapturedError, StateBuffers
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
        if target.fused is not None and target.fused.compiled is not None:
            # Its operations are not torch's: a trace would hold one pass's results as constants.
            raise NotCapturedError("decodes with compiled passes: set target.compile=false")
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
        self._captured.fixed.active.zero_()
        self.load(texts, len(texts.root))

    @property
    def slots(self) -> int:
        """Slots of a row in a pass of the target."""
        return self._captured.fixed.slots

    def load(self, texts: RunningTexts, count: int) -> None:
        """Add the first `count` rows of some texts, after the running ones."""
        fixed, free = self._captured.fixed, [*range(self._captured.fixed.rows)]
        free = [place for place in free if place not in self.places][:count]
        for row, place in enumerate(free):
            fixed.state.load(texts, place, row)
            fixed.active[place] = True
        self.places += free
        self._coin: KeyedCoin | None = None

    def keep(self, rows: Sequence[int]) -> None:
        """Let only these rows go on; the others stand still."""
        left = [self.places[row] for row in rows]
        fixed = self._captured.fixed
        for place in set(self.places) - set(left):
            fixed.active[place] = False
        self.places, self._coin = left, None

    def fit(self, more_wait: bool) -> None:
        """Before a round: move the rows to one with fewer places if half are free and nobody waits for them.

        Raises:
            UserError: another text is in the buffers.
        """
        if self._captured.owner is not self:
            raise UserError("stream: the target has started another text; finish one stream before the next")
        size = bucket(len(self.places), 1)
        if not more_wait and size < self._captured.fixed.rows:
            self._move(size)

    def _move(self, rows: int) -> None:
        """Move the running rows to a round with fewer rows."""
        old, places = self._captured, self.places
        self._captured = self._captures.of(self._key._replace(rows=rows), lambda: old.fixed.resized(rows))
        self._captured.owner, new = self, self._captured.fixed
        new.active.zero_()
        for place, source in enumerate(places):
            for buffer, value in zip(new.state.tensors, old.fixed.state.tensors, strict=True):
                buffer[place] = value[source]
            new.active[place] = True
        self.places = [*range(len(places))]

    def draft(self, coin: KeyedCoin, position: np.ndarray, rounds: np.ndarray) -> None:
        """Begin a round of the running rows; see `KeyedCoin.at` for the arguments."""
        captured = self._captured
        assert position.max() < self.capacity, "a text outgrows its slots"
        # Places without a running row repeat the draws of the first one.
        index = np.zeros(captured.fixed.rows, np.int64)
        index[self.places] = np.arange(len(self.places))
        if self._coin is None:
            self._coin = coin.select(index.tolist())
        captured.fixed.feed(self._coin.at(position[index], rounds[index]))
        captured.draft.run()

    def verify(self) -> None:
        """Verify the draft."""
        self._captured.verify.run()

    def advance(self) -> list[list[int]]:
        """Advance the drafter; returns the lines of `result_table` of the running rows."""
        self._captured.advance.run()
        table = self._captured.verify.results[0].tolist()
        return [table[place] for place in self.places]

    def drafted(self) -> Draft:
        """The draft of the newest round."""
        captured, draft = self._captured, self._captured.fixed.draft_of(self._captured.draft.results)
        places = torch.tensor(self.places, device=captured.fixed.active.device)
        return replace(draft, tokens=draft.tokens[places], parents=draft.parents[places], probs=None)


def bucket(count: int, least: int) -> int:
    """`count` rounded up: to a power of two, or if large to an eighth of it, which adds a fifth at most."""
    power = max(least, 1 << max(0, count - 1).bit_length())
    step = max(least, power // 8)
    return power if power <= 8 * least else -(-count // step) * step
