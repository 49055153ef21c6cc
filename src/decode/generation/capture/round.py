"""One decoding round, drafting included, as a function of tensors of fixed shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import override

from decode.draft import Draft
from decode.generation.capture.state import (
    StateBuffers,
    lengths_of,
    replaced,
    tensors_and_stores,
    without_tensors,
    write_back,
)
from decode.generation.capture.verification import FixedVerification, RunningTexts, only_tensors, tensors_of
from decode.generation.device_part import checked, proposed
from decode.generation.types import Proposer
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.transfer import DeviceInts, device_only


class FixedRound(FixedVerification):
    """A `FixedVerification` of drafts that the drafter makes in a stage before, and reads in one after it.

    Args:
        drafter: proposes; None: plain decoding.
        plan: resolved.
        sampler: of the target.
        state: buffers of `RunningTexts`, with the drafter's state.

    Raises:
        NotCapturedError: the drafter or the rule reads the host, or keeps state there.
    """

    def __init__(self, drafter: Proposer | None, plan: Plan, sampler: Sampler, state: StateBuffers) -> None:
        self.drafter = drafter
        self._after: _StateAfter | None = None
        super().__init__(plan, sampler, state, None)

    @override
    def resized(self, state: StateBuffers) -> FixedRound:
        return FixedRound(self.drafter, self.plan, self.sampler, state)

    def draft(self, *tensors: Tensor) -> list[Tensor]:
        """Draft below the roots."""
        with device_only():
            active, coin, texts, _ = self._open(tensors)
            return self._drafted(coin, texts, len(active))

    def advance(self, *tensors: Tensor) -> list[Tensor]:
        """Advance the drafter by the settled tokens; returns nothing."""
        with device_only():
            active, _, texts, rest = self._open(tensors)
            self._advanced(active, texts, rest)
            return []

    def draft_of(self, drafted: Sequence[Tensor]) -> Draft:
        """The draft among the results of `draft`, as it is verified."""
        return checked(self._taken(iter(drafted)), self.state.template.target, self.plan).draft

    @override
    def _run(self, active: Tensor, coin: KeyedCoin, texts: Callable[[], RunningTexts]) -> None:
        drafted = self._drafted(coin, texts(), len(active))
        verified = self._verified(active, coin, texts(), iter(drafted))
        if self.drafter:
            self._advanced(active, texts(), iter([*drafted, *verified]))

    def _drafted(self, coin: KeyedCoin, texts: RunningTexts, rows: int) -> list[Tensor]:
        """Tensors of the draft, then tensors of the drafter's state that are new."""
        before = list(map(id, tensors_and_stores(texts.state)))
        draft = proposed(self.drafter, texts.state, texts.target, self.sampler, coin, self.plan, rows)
        after = tensors_and_stores(texts.state)
        places = [before.index(id(part)) if id(part) in before else None for part in after]
        if self._after is None:
            self.slots = 1 + draft.tokens.shape[1]
            self._like = without_tensors(draft)
            self._after = _StateAfter(without_tensors(texts.state), places)
        new = [part for part, place in zip(after, places, strict=True) if place is None]
        return [*tensors_of(draft), *only_tensors(new)]

    def _advanced(self, active: Tensor, texts: RunningTexts, given: Iterator[Tensor]) -> None:
        assert self.drafter is not None
        assert self._after is not None
        self._taken(given)
        before = tensors_and_stores(texts.state)
        lengths = lengths_of(before)
        now = [next(given) if place is None else before[place] for place in self._after.places]
        parts: Iterator[Any] = iter(now)
        state = replaced(self._after.state, lambda _: next(parts), lambda _: next(parts))
        _, tokens, taps, counts, root = given
        self.drafter.advance(state, texts.target, tokens, taps, DeviceInts(counts), root)
        write_back(before, lengths, state, active)


class _StateAfter(NamedTuple):
    """What the drafter's state consists of after a draft, without its tensors."""

    state: Any
    places: list[int | None]  # of its parts in the state before; None: made by the draft
