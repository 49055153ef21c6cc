"""Verification of one round as a function of tensors of fixed shape, which are changed in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from decode.generation.device_part import accepted_path, checked, follow, result_table, target_pass
from decode.generation.finite import broken_slot
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
        state: of the drafter; None if it does not draft in the round.
    """

    target: Target
    state: Any
    root: Tensor
    seen: Tensor | None
    followed: TextState | None


class FixedVerification:
    """Verification of given drafts, for a fixed number of rows with a fixed number of slots each.

    A stage is a function of tensors: `buffers`, a draft's, then what earlier stages returned. It changes
    buffers in place.

    Args:
        plan: resolved.
        sampler: of the target.
        state: buffers of `RunningTexts`.
        draft: any draft; all others have its structure and its shapes. None: a subclass drafts.
        answers: whether the table has the target's answers.

    Attributes:
        given: buffers of a draft.
        slots: of a row in the target's pass.

    Raises:
        NotCapturedError: the rule reads the host, or keeps state there.
    """

    def __init__(
        self,
        plan: Plan,
        sampler: Sampler,
        state: StateBuffers,
        draft: Draft | None,
        answers: bool = False,
    ) -> None:
        self.plan, self.sampler, self.state, self.answers = plan, sampler, state, answers
        self.given, self._like = list[Tensor](), None
        if draft is not None:
            self.slots, self._like = 1 + draft.tokens.shape[1], without_tensors(draft)
        with torch.inference_mode(False), torch.no_grad():
            for part in tensors_of(draft):
                self.given.append(part[:1].expand(state.rows, *part.shape[1:]).clone())
            self._keys = self._learn()
            table = KeyedCoin(0, range(state.rows)).table(self._keys)
            self.draws = upload(table, state.active.device).clone()

    def resized(self, state: StateBuffers) -> FixedVerification:
        """The same over buffers of another number of rows."""
        draft = self._taken(iter(self.given))
        return FixedVerification(self.plan, self.sampler, state, draft, self.answers)

    @property
    def buffers(self) -> list[Tensor]:
        """First arguments of a stage."""
        return [self.state.active, self.draws, *self.state.tensors]

    def feed(self, coin: KeyedCoin) -> None:
        """Copy the random numbers of the next round, of all rows, to their buffer."""
        if self._keys:
            self.draws.copy_(upload(coin.table(self._keys), self.draws.device), non_blocking=True)

    def verify(self, *tensors: Tensor) -> list[Tensor]:
        """Run the target on the draft, and settle what is accepted; the first result is `result_table`."""
        with device_only():
            active, coin, texts, rest = self._open(tensors)
            return self._verified(active, coin, texts, rest)

    def _learn(self) -> list[Any]:
        """Blocks of draws that a round uses, found by running one on copies.

        This also makes all tables and copies of weights that are made once.
        """
        zeros = np.zeros(self.state.rows, np.int64)
        coin = KeyedCoin(0, range(self.state.rows)).at(zeros, zeros)
        with torch.inference_mode(), device_only(), refused_reads():
            copies = [*clones(self.state.tensors)]
            # Each stage begins with the state before the draft.
            self._run(torch.ones_like(self.state.active), coin, lambda: self.state.over(iter(copies)))
        return coin.asked

    def _run(self, active: Tensor, coin: KeyedCoin, texts: Callable[[], RunningTexts]) -> None:
        """Run all stages once."""
        self._verified(active, coin, texts(), clones(self.given))

    def _open(self, tensors: Sequence[Tensor]) -> tuple[Tensor, TableCoin, RunningTexts, Iterator[Tensor]]:
        """Active rows, draws, texts, and the results of earlier stages."""
        rest = iter(tensors)
        active, draws = next(rest), next(rest)
        return active, TableCoin(self._keys, draws, len(active)), self.state.over(rest), rest

    def _taken(self, given: Iterator[Tensor]) -> Draft:
        """The draft, from its tensors."""
        assert self._like is not None
        return replaced(self._like, lambda _: next(given), no_store)

    def _verified(
        self, active: Tensor, coin: KeyedCoin, texts: RunningTexts, given: Iterator[Tensor]
    ) -> list[Tensor]:
        """Table, settled tokens, their taps, counts and new roots."""
        draft, fault = checked(self._taken(given), texts.target, self.plan)
        root, texts = texts.root, replace(texts, state=None)
        before = tensors_and_stores(texts)
        lengths = lengths_of(before)
        forward, logits = target_pass(texts.target, root, draft)
        probs = TargetProbs(logits, self.sampler, texts.seen, texts.followed)
        result = verify(self.plan.rule, draft, probs, coin)
        answers = logits.argmax(-1) if self.answers else None
        table = result_table(draft, result, broken_slot(logits, draft), fault, answers)
        counts = result.accepted + 1
        texts.target.keep(DeviceInts(counts), None if draft.is_chain else result.slots)
        tokens, taps = accepted_path(root, draft, result, forward)
        follow(texts, result)
        new_root = texts.root
        write_back(before, lengths, texts, active)
        return [table, tokens, taps, counts, new_root]


def tensors_of(draft: Draft | None) -> list[Tensor]:
    """All tensors of a draft, in the order of `replaced`."""
    return only_tensors(tensors_and_stores(draft))


def only_tensors(parts: Sequence[Any]) -> list[Tensor]:
    """The parts, all of which are tensors.

    Raises:
        NotCapturedError: a part is a store.
    """
    if stores := [part for part in parts if not isinstance(part, Tensor)]:
        raise NotCapturedError(f"makes a {type(stores[0]).__name__} in every draft")
    return [*parts]


def no_store(store: RowStore) -> RowStore:
    """Called for a store in a draft."""
    raise AssertionError(f"a draft has a {type(store).__name__}")
