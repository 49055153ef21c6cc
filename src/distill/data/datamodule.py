"""The rows of one store after another, served to the trainer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import datasets
import lightning as L
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from decode.errors import UserError
from decode.model.target import Target
from distill.data.batches import From, Micro, RolloutBatches
from distill.data.taps_disk import TapCache
from distill.data.taps_memory import GrowingTaps, TapMemory, gigabytes, wanted
from distill.rollouts.store import RolloutStore
from distill.utils.progress import say


@dataclass(frozen=True)
class Keep:
    """Where what the target says of a row is kept.

    Args:
        target: with its taps set.
        taps: see `taps.wanted`.
        limit: gigabytes.
        packing: the target reads rows without padding, here and in every step.
        held: what runs of this process share that train on the same rows, by what it is of; it grows with
            the rows they meet. None: all rows are read before the first step.
    """

    target: Target
    taps: str
    limit: float
    packing: bool = False
    held: dict[tuple, TapMemory] | None = None

    def __call__(
        self, rows: datasets.Dataset, store: RolloutStore, max_tokens: int, epochs: float
    ) -> TapMemory | TapCache | None:
        """For rows that are trained on `epochs` times; None: they are read in every step."""
        if self.taps == "cache":
            where = (store.cache, store.content(), self.limit)
            return TapCache(self.target, rows, max_tokens, *where, self.packing)
        need = gigabytes(self.target, rows, max_tokens)
        if wanted(self.taps, self.limit, need, epochs):
            if self.held is None:
                return TapMemory(self.target, rows, max_tokens, self.packing)
            key = (store.content(), self.target.taps, max_tokens, self.packing)
            grown = self.held.setdefault(key, GrowingTaps(self.target, rows, max_tokens, self.packing))
            self._make_room(key, need)
            return grown
        return None

    def _make_room(self, key: tuple, need: float) -> None:
        """The limit is for all of them together: the oldest go, until one that may grow to `need` fits in."""
        held = self.held or {}
        others = [k for k in held if k != key]
        while others and need + sum(held[k].bytes for k in others) / 2**30 > self.limit:
            del held[others.pop(0)]


class Phases(Dataset[Micro]):
    """Micro-batches of a run whose rollouts are made anew from time to time.

    Args:
        load: given a step, the batches of its phase, which number all steps of the run.
        every: optimizer steps of a phase; 0: there is but one.
        accumulate: micro-batches a step.
        steps: of the run.
    """

    def __init__(
        self, load: Callable[[int], RolloutBatches], every: int, accumulate: int, steps: int
    ) -> None:
        self.load, self.every, self.accumulate, self.steps = load, every, accumulate, steps
        self.loading = 0.0  # seconds in which rollouts were made and read
        self._batches: tuple[int, RolloutBatches] | None = None

    def __len__(self) -> int:
        return self.steps * self.accumulate

    @override
    def __getitem__(self, index: int) -> Micro:
        return self.of(index // self.accumulate)[index]

    def of(self, step: int) -> RolloutBatches:
        """The batches of the phase that an optimizer step is in."""
        phase = step // self.every if self.every else 0
        if self._batches is None or self._batches[0] != phase:
            begin = time.perf_counter()
            self._batches = None  # frees what is kept of the last phase
            self._batches = phase, self.load(step)
            self.loading += time.perf_counter() - begin
        return self._batches[1]


def served(trainer: Any) -> RolloutData:
    """The data of a Trainer that trains on rollouts."""
    return trainer.datamodule  # which Lightning adds to it, unknown to type checkers


class RolloutData(L.LightningDataModule):
    """Serves rollouts to the trainer.

    Args:
        stores: the rollouts of a phase: made, or found, when they are asked for.
        every: optimizer steps between one store and the next; 0: the first one serves the whole run.
        keep: what the target says of the rows.
        batch_size: rows of one micro-batch.
        max_tokens: longer rows are cut.
        seed: of the order.
    """

    def __init__(
        self,
        stores: Callable[[int], RolloutStore],
        every: int,
        keep: Keep,
        batch_size: int,
        max_tokens: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.stores, self.every, self.keep = stores, every, keep
        self.batch_size, self.max_tokens, self.seed = batch_size, max_tokens, seed
        self._open: tuple[int, datasets.Dataset, TapMemory | TapCache | None] | None = None

    def open(self, step: int, trainer: L.Trainer) -> tuple[datasets.Dataset, TapMemory | TapCache | None]:
        """Rows that an optimizer step is of, and what is kept of them.

        Raises:
            UserError: there are none.
        """
        phase = step // self.every if self.every else 0
        if self._open and self._open[0] == phase:
            return self._open[1:]
        if self._open and isinstance(self._open[2], TapCache):
            self._open[2].remove()  # nobody reads these rows again
        self._open = None
        store = self.stores(phase)
        files: Any = [str(store.path(i)) for i, s in enumerate(store.manifest()["shards"]) if s["rows"]]
        if not files:
            raise UserError(f"{store.folder}: no rows; the target gave no prompt an answer")
        rows = datasets.Dataset.from_parquet(files, cache_dir=str(store.cache / "cache"))
        assert isinstance(rows, datasets.Dataset)
        steps = min(self.every, trainer.max_steps) if self.every else trainer.max_steps
        batches = steps * trainer.accumulate_grad_batches * trainer.world_size
        kept = self.keep(rows, store, self.max_tokens, batches * self.batch_size / len(rows))
        self.keep.target.join()
        self._open = phase, rows, kept
        return rows, kept

    @override
    def train_dataloader(self) -> DataLoader:
        trainer = self.trainer
        assert trainer is not None

        def load(step: int) -> RolloutBatches:
            rows, kept = self.open(step, trainer)
            batches = RolloutBatches(
                rows,
                self.batch_size,
                trainer.max_steps,
                trainer.accumulate_grad_batches,
                trainer.global_rank,
                trainer.world_size,
                self.seed,
                self.max_tokens,
                kept,
                self.keep.packing,
            )
            if unused := batches.unused():
                say(f"rollouts: {unused}")
            return batches

        self.batches = Phases(load, self.every, trainer.accumulate_grad_batches, trainer.max_steps)
        # A resumed run goes on at its step, which Lightning has restored by now.
        start = trainer.global_step * trainer.accumulate_grad_batches
        return DataLoader(self.batches, batch_size=None, sampler=From(start, len(self.batches)))

    def kept_bytes(self) -> int:
        """Of memory that holds what the target says of the rows."""
        kept = self._open[2] if self._open else None
        return kept.bytes if isinstance(kept, TapMemory) else 0

    def micros(self, step: int) -> list[Micro]:
        """This rank's micro-batches of an optimizer step."""
        first = step * self.batches.accumulate
        return [self.batches[first + i] for i in range(self.batches.accumulate)]
