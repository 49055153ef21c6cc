"""Running rows of a loop in the buffers of captured rounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.generation.capture.makers import Captured, CapturedRound, Captures, Key, Maker
from decode.generation.capture.round import FixedRound
from decode.generation.capture.state import StateBuffers
from decode.generation.capture.verification import RunningTexts
from decode.generation.types import Proposer
from decode.kernels.weight_state import current_state
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.transfer import Settled, upload


class Setup(NamedTuple):
    """What all rounds of a loop have in common.

    Attributes:
        captures: of the target.
        drafter: None: plain decoding.
        plan: resolved.
        sampler: of the target.
        slots: most tokens of a text, and slots of a draft.
    """

    captures: Captures
    drafter: Proposer | None
    plan: Plan
    sampler: Sampler
    slots: int

    @property
    def capacity(self) -> int:
        """Slots of a row in every store."""
        return bucket(self.slots, self.captures.slots)

    def key(self, texts: RunningTexts, rows: int, whole: bool) -> Key:
        """The key of rounds that are captured whole, or of captured verification."""
        target, drafter = texts.target, self.drafter if whole else None
        parts = [
            *target.model.parameters(),
            *(drafter.parameters() if isinstance(drafter, nn.Module) else ()),
        ]
        weights, taps = tuple(map(current_state, parts)), (target.taps, target.tap_transform)
        others = self.plan, self.sampler, taps, str(target.dtype), self.capacity, whole
        return Key(drafter, weights, others, rows)


class CapturedRows(ABC):
    """Rows of a loop, each at a place of the buffers of captured rounds.

    In a round the loop calls `draft`, `verify`, `table` and `settle`.

    Args:
        setup: of the loop.
        captured: buffers.
        key: of the buffers.

    Attributes:
        places: of the running rows, in their order.
        depth: levels of the newest draft in `table`.
        passes: see `Generation`.
    """

    passes = "captured"
    depth: int
    _round: CapturedRound  # the newest

    def __init__(self, setup: Setup, captured: Captured, key: Key) -> None:
        self._setup, self._captured, self._key = setup, captured, key
        self._captured.owner, self.places = self, list[int]()
        self._captured.state.active.zero_()
        self._changed()

    def _changed(self) -> None:
        """The running rows are others."""
        self._coin: KeyedCoin | None = None
        self._index: Tensor | None = None

    @property
    def slots(self) -> int:
        """Slots of a row in the newest pass of the target."""
        return self._round.fixed.slots

    @property
    def index(self) -> Tensor:
        """(B,) places of the running rows, on the device."""
        if self._index is None:
            self._index = upload(np.array(self.places), self._captured.state.active.device)
        return self._index

    @abstractmethod
    def draft(self, coin: KeyedCoin, position: np.ndarray, rounds: np.ndarray) -> None:
        """Begin a round of the running rows; see `KeyedCoin.at` for the arguments."""

    @abstractmethod
    def drafted(self) -> Draft:
        """The draft of the newest round."""

    def verify(self) -> None:
        """Verify the draft."""
        self._round.verify.run()

    def table(self) -> list[list[int]]:
        """Lines of `result_table` of the running rows; the only synchronisation of a round."""
        table = self._round.verify.results[0].tolist()
        return [table[place] for place in self.places]

    def settle(self, rows: Sequence[int], counts: Settled) -> None:
        """Let only these rows go on; the others stand still.

        Args:
            rows: that have not ended, of the running ones.
            counts: of all running rows.
        """
        del counts
        if len(rows) == len(self.places):
            return
        left = [self.places[row] for row in rows]
        for place in set(self.places) - set(left):
            self._captured.state.active[place] = False
        self.places = left
        self._changed()

    def load(self, texts: RunningTexts, count: int) -> None:
        """Add the first `count` rows of some texts, after the running ones."""
        state, free = self._captured.state, [*range(self._captured.state.rows)]
        free = [place for place in free if place not in self.places][:count]
        for row, place in enumerate(free):
            state.load(texts, place, row)
        self.places += free
        self._changed()

    def fit(self, more_wait: bool) -> None:
        """Before a round: move to buffers of fewer rows if half are free and nobody waits for them.

        Raises:
            UserError: the buffers hold other texts.
        """
        if self._captured.owner is not self:
            raise UserError("stream: the target has started another text; finish one stream before the next")
        rows = bucket(len(self.places), 1)
        if more_wait or rows >= self._captured.state.rows:
            return
        old, places = self._captured.state, self.places
        self._key = self._key._replace(rows=rows)
        self._captured = self._setup.captures.of(self._key, lambda make: self._resized(make, rows))
        self._captured.owner, new = self, self._captured.state
        new.active.zero_()
        for place, source in enumerate(places):
            for buffer, value in zip(new.tensors, old.tensors, strict=True):
                buffer[place] = value[source]
            new.active[place] = True
        self.places = [*range(len(places))]
        self._changed()

    def _resized(self, make: Maker, rows: int) -> Captured:
        """The same buffers and rounds for another number of rows."""
        captured = Captured(self._captured.state.resized(rows), make)
        for form, one in self._captured.rounds.items():
            captured.round(form, partial(one.fixed.resized, captured.state))
        return captured

    def _feed(self, coin: KeyedCoin, position: np.ndarray, rounds: np.ndarray) -> None:
        """Copy the draws of all places to the newest round."""
        assert position.max() < self._setup.capacity, "a text outgrows its slots"
        # Places without a running row repeat the draws of the first one.
        index = np.zeros(self._captured.state.rows, np.int64)
        index[self.places] = np.arange(len(self.places))
        if self._coin is None:
            self._coin = coin.select(index.tolist())
        self._round.fixed.feed(self._coin.at(position[index], rounds[index]))


class WholeRows(CapturedRows):
    """Rows of rounds that are captured whole: the drafter's state is in the buffers, too.

    Args:
        setup: of the loop.
        texts: the rows, after their prefill.
        rows: most rows at a time.

    Raises:
        NotCapturedError: see `FixedRound` and `trace`.
    """

    def __init__(self, setup: Setup, texts: RunningTexts, rows: int) -> None:
        rows = bucket(rows, 1)
        key = setup.key(texts, rows, whole=True)

        def made(make: Maker) -> Captured:
            captured = Captured(StateBuffers(texts, rows, setup.capacity), make)
            captured.round(None, lambda: FixedRound(setup.drafter, setup.plan, setup.sampler, captured.state))
            return captured

        super().__init__(setup, setup.captures.of(key, made), key)
        self._round, self.depth = self._captured.rounds[None], setup.plan.depth if setup.drafter else 0
        self.load(texts, len(texts.root))

    @override
    def fit(self, more_wait: bool) -> None:
        super().fit(more_wait)
        self._round = self._captured.rounds[None]

    @override
    def draft(self, coin: KeyedCoin, position: np.ndarray, rounds: np.ndarray) -> None:
        self._feed(coin, position, rounds)
        self._round.draft.run()

    @override
    def table(self) -> list[list[int]]:
        self._round.advance.run()  # before the host waits
        return super().table()

    @override
    def drafted(self) -> Draft:
        fixed = self._round.fixed
        assert isinstance(fixed, FixedRound)
        draft = fixed.draft_of(self._round.draft.results)
        return replace(draft, tokens=draft.tokens[self.index], parents=draft.parents[self.index], probs=None)


def bucket(count: int, least: int) -> int:
    """`count` rounded up: to a power of two, or if large to an eighth of it, which adds a fifth at most."""
    power = max(least, 1 << max(0, count - 1).bit_length())
    step = max(least, power // 8)
    return power if power <= 8 * least else -(-count // step) * step
