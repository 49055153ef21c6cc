"""Batches of stored rollouts; each is a pure function of (seed, step, store).

Shapes: B rows of a micro-batch, T tokens, A micro-batches per step (accumulation), W ranks, S steps.
"""

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
from decode.model.target import TargetOutput
from distill.data.rows import list_batches
from distill.data.taps_bounded import Taps

BUCKET = 8  # batches sorted by length together: less padding, less randomness


class MicroBatch(NamedTuple):
    """One micro-batch on one rank.

    Attributes:
        tokens: (B, T) right-padded.
        loss_mask: (B, T) bool.
        anchors: number of supervised anchors of the whole optimizer step, over micro-batches and ranks.
        step: optimizer step.
        seed: seed of the drafter's noise; independent of the split of rows over ranks.
        target_states: cached hidden states of the target on these tokens, if any.
        on_policy: number of supervised anchors in answers that the drafter wrote.
        weight: (B,) weights of the rows in the loss; None if all are 1.
        lengths: lengths of the rows, if the target reads them packed (without padding).
    """

    tokens: Tensor
    loss_mask: Tensor
    anchors: int
    step: int
    seed: int
    target_states: TargetOutput | None = None
    on_policy: int = 0
    weight: Tensor | None = None
    lengths: Sequence[int] | None = None


class RolloutBatches(Dataset[MicroBatch]):
    """Micro-batch m of optimizer step k on rank r is item k * accumulate + m.

    Rows are shuffled every epoch and grouped by length to reduce padding. An epoch uses a row at most once;
    the remainder that does not fill a step differs between epochs.

    Args:
        rows: rows with `tokens`, `loss_mask` and `weight`.
        batch_size: rows of one micro-batch.
        steps: number of optimizer steps.
        accumulate: micro-batches per step.
        rank: rank of this process.
        world: number of processes.
        seed: seed of the order.
        max_tokens: longer rows are truncated.
        memory: cached hidden states of the target, or None.
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
        memory: Taps | None = None,
        packing: bool = False,
    ) -> None:
        self.memory, self.packing = memory, packing
        self.rows, self.batch_size, self.steps = rows, batch_size, steps
        self.accumulate, self.rank, self.world = accumulate, rank, world
        self.seed, self.max_tokens = seed, max_tokens
        self._order: tuple[int, np.ndarray] | None = None
        self._length, self._anchors, self._lost = _measure(rows, max_tokens)
        self._usable = np.flatnonzero(self._anchors)
        if not self._usable.size:
            raise UserError("rollouts: no row has a supervised token; check the loss masks")

    def unused(self) -> str:
        """Describe unused tokens and rows in one line; empty if training uses all."""
        cut, unsupervised = int((self._lost > 0).sum()), len(self._anchors) - len(self._usable)
        parts = []
        if cut:
            share = self._lost.sum() / (self._lost.sum() + self._anchors.sum())
            parts.append(
                f"{cut} are cut at max_tokens={self.max_tokens}, {share:.1%} of all supervised tokens"
            )
        if unsupervised:
            parts.append(f"{unsupervised} have no supervised token in reach and are left out")
        return f"of {len(self._anchors)} rows " + ", ".join(parts) if parts else ""

    def __len__(self) -> int:
        return self.steps * self.accumulate

    @override
    def __getitem__(self, index: int) -> MicroBatch:
        step, micro = divmod(index, self.accumulate)
        return self._micro(step, micro, self.rank)

    def _micro(self, step: int, micro: int, rank: int) -> MicroBatch:
        shards = self._shards(step)  # (A, W, B)
        rows = [self.rows[int(i)] for i in shards[micro, rank]]
        lengths = [min(len(row["tokens"]), self.max_tokens) for row in rows]
        length = max(lengths)
        tokens = torch.zeros(self.batch_size, length, dtype=torch.long)  # (B, T), right-padded with 0
        mask = torch.zeros(self.batch_size, length, dtype=torch.bool)
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            tokens[i, :n] = torch.as_tensor(row["tokens"][:n])
            mask[i, :n] = torch.as_tensor(row["loss_mask"][:n], dtype=torch.bool)
        target_states = self.memory.batch(shards[micro, rank]) if self.memory else None
        # micro * world + rank is the place in the step, the same for any split over ranks.
        key = np.random.SeedSequence([self.seed, step, micro * self.world + rank])
        noise = int(key.generate_state(1)[0])
        weight = torch.tensor([row["weight"] for row in rows])  # (B,)
        return MicroBatch(
            tokens,
            mask,
            int(self._anchors[shards].sum()),
            step,
            noise,
            target_states,
            weight=None if (weight == 1).all() else weight,
            lengths=lengths if self.packing else None,
        )

    def rows_of(self, step: int) -> list[list[int]]:
        """Row numbers of this rank's micro-batches."""
        return self._shards(step)[:, self.rank].tolist()

    def tokens_of(self, step: int) -> int:
        """Tokens of an optimizer step's rows over all micro-batches and ranks, without padding."""
        return int(self._length[self._step_rows(step)].sum())

    def largest(self, first: int) -> MicroBatch:
        """The micro-batch of any rank with the longest row, from step `first` to the end of the epoch.

        It is the same on every rank, so that collectives inside a trial run match.
        """
        _, per_epoch = self._epoch()
        steps = range(first, min(self.steps, first + per_epoch - first % per_epoch))
        longest = np.stack([self._length[self._shards(step)].max(2) for step in steps])  # (S, A, W)
        step, micro, rank = np.unravel_index(int(longest.argmax()), longest.shape)
        return self._micro(steps[int(step)], int(micro), int(rank))

    def _shards(self, step: int) -> np.ndarray:
        """(A, W, B) row numbers of an optimizer step."""
        return self._step_rows(step).reshape(self.accumulate, self.world, self.batch_size)

    def _step_rows(self, step: int) -> np.ndarray:
        """(A * W * B,) row numbers of an optimizer step, over all micro-batches and ranks."""
        size, per_epoch = self._epoch()
        epoch, place = divmod(step, per_epoch)
        order = self._order
        if order is None or order[0] != epoch:
            # One assignment, since a thread that reads ahead may be in another epoch.
            order = self._order = (epoch, self._shuffle(epoch, size, per_epoch))
        return order[1][place]

    def _epoch(self) -> tuple[int, int]:
        """Rows per optimizer step, and steps per epoch."""
        size = self.batch_size * self.accumulate * self.world
        return size, max(1, self._usable.size // size)

    def _shuffle(self, epoch: int, size: int, per_epoch: int) -> np.ndarray:
        """(per_epoch, size) row numbers: shuffled, sorted by length within BUCKET steps, steps shuffled."""
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(self._usable)
        order = np.resize(order, per_epoch * size)  # repeats rows only if there are fewer than one batch
        batches = []
        for start in range(0, order.size, BUCKET * size):
            bucket = order[start : start + BUCKET * size]
            bucket = bucket[np.argsort(self._length[bucket], kind="stable")].reshape(-1, size)
            batches.append(bucket[random.permutation(len(bucket))])
        return np.concatenate(batches)


def _measure(rows: datasets.Dataset, max_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(N,) lengths, anchors (t is an anchor if token t + 2 is supervised) and truncated supervised tokens."""
    parts, number = [], 0
    for offsets, mask in list_batches(rows, "loss_mask"):
        start, stop = offsets[:-1], offsets[1:]
        end = np.minimum(stop, start + max_tokens)
        supervised = np.concatenate([[0], np.cumsum(mask != 0)])  # supervised tokens before each place
        whole = supervised[stop] - supervised[start] == stop - start
        if whole.any():
            raise UserError(
                f"rollouts: the loss mask of row {number + int(whole.argmax())} covers the whole row, "
                "including its first token; check the loss masks"
            )
        anchors = supervised[end] - supervised[np.minimum(start + 2, end)]
        parts.append((end - start, anchors, supervised[stop] - supervised[end]))
        number += len(start)
    length, anchors, lost = (np.concatenate(column) for column in zip(*parts, strict=True))
    return length, anchors, lost


class ResumeSampler(Sampler[int]):
    """Yields indices from `start` on; there is no sampler state to restore.

    The length is the whole run's: Lightning restores its batch counter, and would end the epoch early with a
    shorter loader.
    """

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __len__(self) -> int:
        return self.stop
