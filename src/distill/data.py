"""Stored rollouts as batches, each a pure function of (seed, step, store)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from typing_extensions import override

from decode.errors import UserError
from decode.target import Read
from distill.tap_cache import TapCache
from distill.taps import TapMemory

BUCKET = 8  # batches that are sorted by length together


class Micro(NamedTuple):
    """One micro-batch on one rank.

    Attributes:
        tokens: (B, T) right-padded.
        loss_mask: (B, T) bool.
        anchors: supervised anchors of the whole optimizer step, over micro-batches and ranks.
        step: optimizer step.
        seed: of the drafter's noise; the same rows get the same, however ranks share them out.
        read: what the target says of these tokens, where it is kept in memory.
        on_policy: supervised anchors in answers of the drafter's own.
        weight: (B,) of the rows in the loss; None where all are 1.
        lengths: of the rows, where the target reads them packed.
    """

    tokens: Tensor
    loss_mask: Tensor
    anchors: int
    step: int
    seed: int
    read: Read | None = None
    on_policy: int = 0
    weight: Tensor | None = None
    lengths: Sequence[int] | None = None


class RolloutBatches(Dataset[Micro]):
    """Micro-batch m of optimizer step k on rank r is item k * accumulate + m.

    Rows are shuffled every epoch and grouped by length, so that little is padding. An epoch meets
    a row at most once; the few that do not fill a last step are others every time.

    Args:
        rows: with `tokens`, `loss_mask` and `weight`.
        batch_size: rows of one micro-batch.
        steps: optimizer steps.
        accumulate: micro-batches a step.
        rank: of this process.
        world: processes.
        seed: of the order.
        max_tokens: longer rows are cut.
        memory: what the target says of the rows, or None.
        packing: the target reads rows without padding.
    """

    def __init__(
        self,
        rows: datasets.Dataset,
        batch_size: int,
        steps: int,
        accumulate: int = 1,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        max_tokens: int = 2048,
        memory: TapMemory | TapCache | None = None,
        packing: bool = False,
    ) -> None:
        self.memory, self.packing = memory, packing
        self.rows, self.batch_size, self.steps = rows, batch_size, steps
        self.accumulate, self.rank, self.world = accumulate, rank, world
        self.seed, self.max_tokens = seed, max_tokens
        self._order: tuple[int, np.ndarray] | None = None
        self._length, self._anchors = _measure(rows, max_tokens)
        self._usable = np.flatnonzero(self._anchors)
        if not self._usable.size:
            raise UserError("rollouts: no row has a supervised token; check the loss masks")

    def __len__(self) -> int:
        return self.steps * self.accumulate

    @override
    def __getitem__(self, index: int) -> Micro:
        step, micro = divmod(index, self.accumulate)
        shards = self._step_rows(step).reshape(self.accumulate, self.world, self.batch_size)
        chosen = [self.rows[int(i)] for i in shards[micro, self.rank]]
        lengths = [min(len(row["tokens"]), self.max_tokens) for row in chosen]
        length = max(lengths)
        tokens = torch.zeros(self.batch_size, length, dtype=torch.long)
        mask = torch.zeros(self.batch_size, length, dtype=torch.bool)
        for i, (row, n) in enumerate(zip(chosen, lengths, strict=True)):
            tokens[i, :n] = torch.as_tensor(row["tokens"][:n])
            mask[i, :n] = torch.as_tensor(row["loss_mask"][:n], dtype=torch.bool)
        read = self.memory.batch(shards[micro, self.rank]) if self.memory else None
        key = np.random.SeedSequence([self.seed, step, micro * self.world + self.rank])
        noise = int(key.generate_state(1)[0])
        weight = torch.tensor([row["weight"] for row in chosen])
        return Micro(
            tokens,
            mask,
            int(self._anchors[shards].sum()),
            step,
            noise,
            read,
            weight=None if (weight == 1).all() else weight,
            lengths=lengths if self.packing else None,
        )

    def _step_rows(self, step: int) -> np.ndarray:
        """Row numbers of an optimizer step, over all its micro-batches and ranks."""
        size = self.batch_size * self.accumulate * self.world
        per_epoch = max(1, self._usable.size // size)
        epoch, place = divmod(step, per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._shuffle(epoch, size, per_epoch))
        return self._order[1][place]

    def _shuffle(self, epoch: int, size: int, per_epoch: int) -> np.ndarray:
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(self._usable)
        order = np.resize(order, per_epoch * size)  # repeats rows only if there are fewer than one batch
        batches = []
        for start in range(0, order.size, BUCKET * size):
            bucket = order[start : start + BUCKET * size]
            bucket = bucket[np.argsort(self._length[bucket], kind="stable")].reshape(-1, size)
            batches.append(bucket[random.permutation(len(bucket))])
        return np.concatenate(batches)


def _measure(rows: datasets.Dataset, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Length of each row, and its anchors: t counts where token t + 2 is supervised."""
    length, anchors = [], []
    for number, mask in enumerate(rows["loss_mask"]):
        if all(mask):
            raise UserError(
                f"rollouts: row {number} says that the target wrote all of it, its first token included; "
                "check the loss masks"
            )
        cut = mask[:max_tokens]
        length.append(len(cut))
        anchors.append(sum(cut[2:]))
    return np.array(length), np.array(anchors)


class From(Sampler[int]):
    """Items from `start` on; the order has no state to restore.

    The length stays the whole run's: Lightning restores how many batches it has seen, and would
    end the epoch early, and step too soon, on a loader that only had the rest.
    """

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __len__(self) -> int:
        return self.stop
