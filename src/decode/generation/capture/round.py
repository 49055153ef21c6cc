"""One decoding round as a function of tensors of fixed shape, which are changed in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from decode.draft import Draft
from decode.generation.capture.state import (
    NotCapturedError,
    StateBuffers,
    clones,
    lengths_of,
    replaced,
    tensors_and_stores,
    without_tensors,
    write_back,
)
from decode.generation.capture.trace import refused_reads
from decode.generation.device_part import (
    CheckedDraft,
    accepted_path,
    drafted,
    follow,
    result_table,
    target_pass,
)
from decode.generation.finite import broken_slot
from decode.generation.types import Proposer
from decode.model.cache import RowStore
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin, TableCoin
from decode.sampling import Sampler
from decode.transfer import DeviceInts, device_only, upload
from decode.verification.rule import verify
from decode.verification.target_probs import TargetProbs, TextState


@dataclass(slots=True)
class RunningTexts:
    """State of running texts on the device; see `device_part.Texts`.

    Attributes:
        target: model with the texts' cache.
        state: of the drafter.
    """

    target: Target
    state: Any
    root: Tensor
    seen: Tensor | None
    followed: TextState | None


class FixedRound:
    """A round of a fixed number of rows with a fixed number of slots each, in three stages.

    Each stage is a function of tensors: `buffers`, then what the earlier stages returned. It changes buffers
    in place.

    Args:
        drafter: proposes; None: plain decoding.
        plan: resolved.
        sampler: of the target.
        state: buffers of `RunningTexts`.

    Attributes:
        active: (B,) rows that decode; the others do not change.
        slots: of a row in the target's pass.

    Raises:
        NotCapturedError: the drafter or the rule reads the host, or keeps state there.
    """

    def __init__(self, drafter: Proposer | None, plan: Plan, sampler: Sampler, state: StateBuffers) -> None:
        self.drafter, self.plan, self.sampler, self.state = drafter, plan, sampler, state
        self.rows, device = state.rows, state.tensors[0].device
        self._structure: _Structure | None = None
        with torch.inference_mode(False):
            self.active = torch.zeros(self.rows, dtype=torch.bool, device=device)
            self._keys = self._learn()
            self.draws = upload(KeyedCoin(0, range(self.rows)).table(self._keys), device).clone()

    def resized(self, rows: int) -> FixedRound:
        """The same round for another number of rows, all inactive."""
        return FixedRound(self.drafter, self.plan, self.sampler, self.state.resized(rows))

    @property
    def buffers(self) -> list[Tensor]:
        """First arguments of a stage."""
        return [self.active, self.draws, *self.state.tensors]

    def feed(self, coin: KeyedCoin) -> None:
        """Copy the random numbers of the next round, of all rows, to their buffer."""
        if self._keys:
            self.draws.copy_(upload(coin.table(self._keys), self.draws.device), non_blocking=True)

    def _learn(self) -> list[Any]:
        """Blocks of draws that a round uses, found by running one on copies.

        This also finds the structure of a draft, and makes all tables and copies of weights that are made
        once.
        """
        zeros = np.zeros(self.rows, np.int64)
        coin = KeyedCoin(0, range(self.rows)).at(zeros, zeros)
        with torch.inference_mode(), device_only(), refused_reads():
            active, copies = torch.ones_like(self.active), [*clones(self.state.tensors)]

            def texts() -> RunningTexts:  # each stage begins with the state before the draft
                return self.state.over(iter(copies))

            drafted = self._drafted(coin, texts(), len(active))
            verified = self._verified(active, coin, texts(), iter(drafted))
            if self.drafter:
                self._advanced(active, texts(), iter([*drafted, *verified]))
        return coin.asked

    # -- stages ------------------------------------------------------------------------------

    def draft(self, *given: Tensor) -> list[Tensor]:
        """Draft below the roots."""
        with device_only():
            active, coin, texts, _ = self._open(given)
            return self._drafted(coin, texts, len(active))

    def verify(self, *given: Tensor) -> list[Tensor]:
        """Run the target on the draft, and settle what is accepted; the first result is `result_table`."""
        with device_only():
            active, coin, texts, rest = self._open(given)
            return self._verified(active, coin, texts, rest)

    def advance(self, *given: Tensor) -> list[Tensor]:
        """Advance the drafter by the settled tokens; returns nothing."""
        with device_only():
            active, _, texts, rest = self._open(given)
            self._advanced(active, texts, rest)
            return []

    def draft_of(self, drafted: Sequence[Tensor]) -> Draft:
        """The draft among the results of `draft`."""
        return self._taken(iter(drafted)).draft

    def _open(self, given: Sequence[Tensor]) -> tuple[Tensor, TableCoin, RunningTexts, Iterator[Tensor]]:
        """Active rows, draws, texts, and the results of earlier stages."""
        rest = iter(given)
        active, draws = next(rest), next(rest)
        return active, TableCoin(self._keys, draws, len(active)), self.state.over(rest), rest

    def _drafted(self, coin: KeyedCoin, texts: RunningTexts, rows: int) -> list[Tensor]:
        """Faults and tensors of the draft, then tensors of the drafter's state that are new."""
        before = list(map(id, tensors_and_stores(texts.state)))
        draft, fault = drafted(self.drafter, texts.state, texts.target, self.sampler, coin, self.plan, rows)
        after = tensors_and_stores(texts.state)
        places = [before.index(id(part)) if id(part) in before else None for part in after]
        if self._structure is None:
            self.slots = 1 + draft.tokens.shape[1]
            self._structure = _Structure(without_tensors(draft), without_tensors(texts.state), places)
        new = [part for part, place in zip(after, places, strict=True) if place is None]
        return [fault, *_tensors(draft), *_checked(new)]

    def _taken(self, given: Iterator[Tensor]) -> CheckedDraft:
        """The draft, from the results of its stage."""
        assert self._structure is not None
        fault = next(given)
        return CheckedDraft(replaced(self._structure.draft, lambda _: next(given), _no_store), fault)

    def _verified(
        self, active: Tensor, coin: KeyedCoin, texts: RunningTexts, given: Iterator[Tensor]
    ) -> list[Tensor]:
        """Table, settled tokens, their taps, counts and new roots."""
        (draft, fault), root = self._taken(given), texts.root
        texts = replace(texts, state=None)
        before = tensors_and_stores(texts)
        lengths = lengths_of(before)
        forward, logits = target_pass(texts.target, root, draft)
        probs = TargetProbs(logits, self.sampler, texts.seen, texts.followed)
        result = verify(self.plan.rule, draft, probs, coin)
        table = result_table(draft, result, broken_slot(logits, draft), fault)
        counts = result.accepted + 1
        texts.target.keep(DeviceInts(counts), None if draft.is_chain else result.slots)
        tokens, taps = accepted_path(root, draft, result, forward)
        follow(texts, result)
        new_root = texts.root
        write_back(before, lengths, texts, active)
        return [table, tokens, taps, counts, new_root]

    def _advanced(self, active: Tensor, texts: RunningTexts, given: Iterator[Tensor]) -> None:
        assert self.drafter is not None
        assert self._structure is not None
        self._taken(given)
        before = tensors_and_stores(texts.state)
        lengths = lengths_of(before)
        now = [next(given) if place is None else before[place] for place in self._structure.places]
        parts: Iterator[Any] = iter(now)
        state = replaced(self._structure.state, lambda _: next(parts), lambda _: next(parts))
        _, tokens, taps, counts, root = given
        self.drafter.advance(state, texts.target, tokens, taps, DeviceInts(counts), root)
        write_back(before, lengths, state, active)


class _Structure(NamedTuple):
    """What a draft and the drafter's state after it consist of, without their tensors."""

    draft: Draft
    state: Any
    places: list[int | None]  # of the state's parts in the state before; None: made by the draft


def _tensors(draft: Draft) -> list[Tensor]:
    return _checked(tensors_and_stores(draft))


def _checked(parts: Sequence[Any]) -> list[Tensor]:
    """The parts, all of which are tensors."""
    if stores := [part for part in parts if not isinstance(part, Tensor)]:
        raise NotCapturedError(f"makes a {type(stores[0]).__name__} in every draft")
    return [*parts]


def _no_store(store: RowStore) -> RowStore:
    raise AssertionError(f"a draft has a {type(store).__name__}")
