"""Rows of rounds whose verification is captured, and not their drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.generation.capture.makers import Captured, CapturedRound, Maker
from decode.generation.capture.padding import form, missing_nodes, padded
from decode.generation.capture.rows import CapturedRows, Setup, bucket
from decode.generation.capture.state import NotCapturedError, StateBuffers
from decode.generation.capture.verification import FixedVerification, RunningTexts, tensors_of
from decode.generation.device_part import checked, proposed
from decode.generation.types import Observes, Proposer
from decode.rng import KeyedCoin
from decode.transfer import RowInts, Settled


class VerifiedRows(CapturedRows):
    """Rows whose drafter drafts, observes and advances as in rounds that are not captured.

    Its state is not in the buffers. Drafts are padded and copied to buffers; there is a graph for each of
    their forms.

    Args:
        setup: of the loop.
        drafter: does not read the target's cache.
        texts: the rows, after their prefill.
        rows: most rows at a time.
        coin: of the next round.

    Raises:
        NotCapturedError: see `FixedVerification` and `trace`.
    """

    passes = "verification captured"
    _draft: Draft  # of the newest round

    def __init__(
        self, setup: Setup, drafter: Proposer, texts: RunningTexts, rows: int, coin: KeyedCoin
    ) -> None:
        self._setup, self._drafter, self._target = setup, drafter, texts.target
        self._observer = drafter if isinstance(drafter, Observes) else None
        self._state: Any = None
        rows = bucket(rows, 1)
        key = setup.key(texts, rows, whole=False)

        def made(make: Maker) -> Captured:
            captured = Captured(StateBuffers(replace(texts, state=None), rows, setup.capacity), make)
            # What cannot be captured is to be known while the rows can still decode without.
            for draft in (self._usual(texts, coin), Draft.empty(1, texts.root.device)):
                self._round_of(captured, draft)
            return captured

        super().__init__(setup, setup.captures.of(key, made), key)
        self.load(texts, len(texts.root))

    @override
    def load(self, texts: RunningTexts, count: int) -> None:
        super().load(replace(texts, state=None), count)
        if self._state is None:
            self._state = texts.state
        else:
            self._drafter.append(self._state, self._target, texts.state)

    @override
    def draft(self, coin: KeyedCoin, position: np.ndarray, rounds: np.ndarray) -> None:
        self._draft = self._proposed(self._state, coin.at(position, rounds), len(self.places))
        draft = padded(self._draft, self._setup.plan)
        self.depth = draft.depth
        try:
            self._round = self._round_of(self._captured, draft)
        except NotCapturedError as reason:  # the usual form could be captured
            raise UserError(f"verification {reason}: set target.capture=false") from reason
        for buffer, part in zip(self._round.draft.results, tensors_of(draft), strict=True):
            buffer.index_copy_(0, self.index, part)
        self._feed(coin, position, rounds)

    @override
    def drafted(self) -> Draft:
        return checked(self._draft, self._target, self._setup.plan).draft

    @override
    def table(self) -> list[list[int]]:
        self._lines = super().table()
        return self._lines

    @override
    def settle(self, rows: Sequence[int], counts: Settled) -> None:
        if self._observer:
            first, slots = 6 + self.depth, 1 + self._draft.tokens.shape[1]
            self._observer.observe(self._state, [line[first : first + slots] for line in self._lines])
        if len(rows) < len(self.places):
            super().settle(rows, counts)
            if not rows:
                self._state = None
                return
            kept = RowInts(rows)
            self._drafter.select(self._state, kept)
            counts = counts.select(kept)
        tokens, taps, settled, root = (part[self.index] for part in self._round.verify.results[1:])
        counts, width = Settled(counts, settled, counts.texts, counts.draft_lengths), max(counts)
        tokens, taps = tokens[:, :width], taps[:, :width]
        self._drafter.advance(self._state, self._target, tokens, taps, counts, root)

    def _usual(self, texts: RunningTexts, coin: KeyedCoin) -> Draft:
        """A padded draft of the form that most rounds have."""
        plan, count = self._setup.plan, len(texts.root)
        if plan.proposal == "fixed":
            return missing_nodes(plan, count, texts.root.device)
        return padded(self._proposed(texts.state, coin, count), plan)

    def _proposed(self, state: Any, coin: KeyedCoin, rows: int) -> Draft:
        setup = self._setup
        return proposed(self._drafter, state, self._target, setup.sampler, coin, setup.plan, rows)

    def _round_of(self, captured: Captured, draft: Draft) -> CapturedRound:
        """The captured round for a padded draft."""
        plan, sampler, answers = self._setup.plan, self._setup.sampler, self._observer is not None
        return captured.round(
            (form(draft), answers), lambda: FixedVerification(plan, sampler, captured.state, draft, answers)
        )
