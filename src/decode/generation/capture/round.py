"""One decoding round as a function of tensors of fixed shape, which are changed in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from decode.generation.capture.state import StateBuffers, lengths_of, tensors_and_stores, write_back
from decode.generation.capture.trace import refused_reads
from decode.generation.device_part import accepted_path, drafted, follow, result_table, target_pass
from decode.generation.finite import broken_slot
from decode.generation.types import Proposer
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


class RoundResult(NamedTuple):
    """What the host reads of a round: the table always, the draft if something is wrong."""

    table: Tensor  # see `result_table`
    tokens: Tensor  # (B, N) of the draft
    parents: Tensor  # (B, N)


class FixedRound:
    """A round of a fixed number of rows with a fixed number of slots each; call it with its `buffers`.

    Args:
        drafter: proposes; None: plain decoding.
        plan: resolved.
        sampler: of the target.
        state: buffers of `RunningTexts`.

    Attributes:
        active: (B,) rows that decode; the others do not change.

    Raises:
        NotCapturedError: the drafter or the rule reads the host, or keeps state there.
    """

    def __init__(self, drafter: Proposer | None, plan: Plan, sampler: Sampler, state: StateBuffers) -> None:
        self.drafter, self.plan, self.sampler, self.state = drafter, plan, sampler, state
        self.rows, device = state.rows, state.tensors[0].device
        with torch.inference_mode(False):
            self.active = torch.zeros(self.rows, dtype=torch.bool, device=device)
            self._keys = self._asked()
            self.draws = upload(KeyedCoin(0, range(self.rows)).table(self._keys), device).clone()

    def resized(self, rows: int) -> FixedRound:
        """The same round for another number of rows, all inactive."""
        return FixedRound(self.drafter, self.plan, self.sampler, self.state.resized(rows))

    @property
    def buffers(self) -> list[Tensor]:
        """Arguments of a call."""
        return [self.active, self.draws, *self.state.tensors]

    def feed(self, coin: KeyedCoin) -> None:
        """Copy the random numbers of the next round, of all rows, to their buffer."""
        if self._keys:
            self.draws.copy_(upload(coin.table(self._keys), self.draws.device), non_blocking=True)

    def _asked(self) -> list[Any]:
        """Blocks of draws that a round uses, found by running one on copies.

        This also makes all tables and copies of weights that are made once.
        """
        zeros = np.zeros(self.rows, np.int64)
        coin = KeyedCoin(0, range(self.rows)).at(zeros, zeros)
        with torch.inference_mode(), device_only(), refused_reads():
            copies = iter([part.clone() for part in self.state.tensors])
            self._run(torch.ones_like(self.active), coin, self.state.over(copies))
        return coin.asked

    def __call__(self, *buffers: Tensor) -> RoundResult:
        """Run a round; the buffers are changed in place."""
        given = iter(buffers)
        active, draws = next(given), next(given)
        with device_only():
            coin = TableCoin(self._keys, draws, len(active))
            return self._run(active, coin, self.state.over(given))

    def _run(self, active: Tensor, coin: KeyedCoin, texts: RunningTexts) -> RoundResult:
        target, root, before = texts.target, texts.root, tensors_and_stores(texts)
        lengths = lengths_of(before)
        draft, fault = drafted(self.drafter, texts.state, target, self.sampler, coin, self.plan, len(active))
        forward, logits = target_pass(target, root, draft)
        probs = TargetProbs(logits, self.sampler, texts.seen, texts.followed)
        result = verify(self.plan.rule, draft, probs, coin)
        table = result_table(draft, result, broken_slot(logits, draft), fault)
        counts = DeviceInts(result.accepted + 1)
        target.keep(counts, None if draft.is_chain else result.slots)
        tokens, taps = accepted_path(root, draft, result, forward)
        follow(texts, result)
        if self.drafter:
            self.drafter.advance(texts.state, target, tokens, taps, counts, texts.root)
        write_back(before, lengths, texts, active)
        return RoundResult(table, draft.tokens, draft.parents)
