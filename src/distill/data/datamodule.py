"""LightningDataModule over rollout stores, which may be replaced during a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
import lightning as L
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from decode.model.target import Target
from distill.data.batches import MicroBatch, ResumeSampler, RolloutBatches
from distill.data.read_ahead import ReadAhead
from distill.data.rows import open_rows
from distill.data.states_ahead import StatesAhead, Stream, read_states
from distill.data.taps_bounded import BoundedTaps, Taps
from distill.data.taps_disk import TapCache
from distill.data.taps_memory import (
    GrowingTaps,
    TapMemory,
    announce,
    keeps_in_memory,
    rows_that_fit,
    tap_memory_bytes,
)
from distill.data.vectors import FORMATS
from distill.distributed.watchdog import Watchdog
from distill.rollouts.store import RolloutStore
from distill.utils.phase_log import STARTING, PhaseLog
from distill.utils.progress import say

AHEAD = 4  # micro-batches that an engine, or a thread that reads files, makes ahead


@dataclass(frozen=True)
class TapStorage:
    """Decides where hidden states of the target are cached: in memory, on disk or not at all.

    If they exceed the limit, the states of the first rows are kept (`BoundedTaps`).

    Args:
        target: target with its taps set.
        taps: see `keeps_in_memory`.
        limit: gigabytes.
        packing: the target reads rows without padding, for the cache and in every step.
        stored: name of the vectors' format on disk.
        held: caches shared by runs of this process on the same rows; they grow with the used rows.
            None: all rows are read before the first step.
    """

    target: Target
    taps: str
    limit: float
    packing: bool = False
    stored: str = "bfloat16"
    held: dict[tuple, TapMemory] | None = None

    def __call__(
        self, rows: datasets.Dataset, store: RolloutStore, max_tokens: int, epochs: float
    ) -> Taps | None:
        """Cache for rows that are used `epochs` times; None: the target computes them in every step."""
        if self.taps in ("cache", "engine"):
            place = (store.cache, store.content(), self.limit)
            cache = TapCache(self.target, rows, max_tokens, *place, self._packed, FORMATS[self.stored])
            return self._bounded(cache, cache.count, cache.share, rows, max_tokens)
        if not keeps_in_memory(self.taps, epochs):
            return None
        need = tap_memory_bytes(self.target, rows, max_tokens)
        count = rows_that_fit(need, self.limit)
        if self.held is not None:
            if count == len(rows):
                return self._shared(rows, store, max_tokens, need.sum() / 2**30)
            count = 0  # short runs would each read a part again
        if count < len(rows):
            announce(need, count, self.limit)
        kept = TapMemory(self.target, rows.select(range(count)), max_tokens, self.packing)
        share = float(need[:count].sum() / need.sum())
        return self._bounded(kept, count, share, rows, max_tokens)

    def _bounded(
        self, kept: TapMemory | TapCache, count: int, share: float, rows: datasets.Dataset, max_tokens: int
    ) -> Taps | None:
        if count == len(rows):
            return kept
        if not count and self.taps != "engine":
            return None
        return BoundedTaps(kept, count, share, self.target, rows, max_tokens, self._packed)

    @property
    def _packed(self) -> bool:
        """Whether rows are read without padding; engines always do so."""
        return self.packing or self.taps == "engine"

    def _shared(self, rows: datasets.Dataset, store: RolloutStore, max_tokens: int, need: float) -> TapMemory:
        """The cache that all runs of this process share for these rows."""
        held = self.held
        assert held is not None
        key = (store.content(), self.target.taps, max_tokens, self.packing)
        cache = held.setdefault(key, GrowingTaps(self.target, rows, max_tokens, self.packing))
        self._make_room(key, need)
        return cache

    def _make_room(self, key: tuple, need: float) -> None:
        """Drop the oldest caches until a cache of `need` gigabytes fits the common limit."""
        held = self.held or {}
        others = [k for k in held if k != key]
        while others and need + sum(held[k].bytes for k in others) / 2**30 > self.limit:
            del held[others.pop(0)]


class PhasedBatches(Dataset[MicroBatch]):
    """Micro-batches of a run that regenerates its rollouts every few steps.

    Args:
        load: step -> batches of its phase, indexed by steps of the whole run.
        every: optimizer steps per phase; 0: a single phase.
        accumulate: micro-batches per step.
        steps: steps of the run.
    """

    def __init__(
        self, load: Callable[[int], RolloutBatches], every: int, accumulate: int, steps: int
    ) -> None:
        self.load, self.every, self.accumulate, self.steps = load, every, accumulate, steps
        self.loading = 0.0  # seconds spent making and reading rollouts
        self._batches: tuple[int, RolloutBatches] | None = None

    def __len__(self) -> int:
        return self.steps * self.accumulate

    @override
    def __getitem__(self, index: int) -> MicroBatch:
        return self.of(index // self.accumulate)[index]

    def phase_end(self, index: int) -> int:
        """The first micro-batch after the phase of an item."""
        size = self.every * self.accumulate or len(self)
        return (index // size + 1) * size

    def of(self, step: int) -> RolloutBatches:
        """The batches of the phase that contains an optimizer step."""
        phase = step // self.every if self.every else 0
        if self._batches is None or self._batches[0] != phase:
            begin = time.perf_counter()
            self._batches = None  # free the cache of the last phase
            self._batches = phase, self.load(step)
            self.loading += time.perf_counter() - begin
        return self._batches[1]


def rollout_data(trainer: Any) -> RolloutData:
    """The data module of a trainer that trains on rollouts."""
    return trainer.datamodule  # set by Lightning at run time, unknown to type checkers


class RolloutData(L.LightningDataModule):
    """Serves rollouts to the trainer.

    Args:
        stores: phase -> its rollouts, made or reused on demand.
        every: optimizer steps per store; 0: one store for the whole run.
        keep: caches hidden states of the target.
        batch_size: rows of one micro-batch.
        max_tokens: longer rows are truncated.
        seed: seed of the order.
        watchdog: notified of the work between two phases.
        phases: phase log of the run, which records the reading of hidden states.
        stream: where hidden states of the next micro-batch come to the device; None: each step waits for its
            own.
    """

    def __init__(
        self,
        stores: Callable[[int], RolloutStore],
        every: int,
        keep: TapStorage,
        batch_size: int,
        max_tokens: int,
        seed: int,
        watchdog: Watchdog,
        phases: PhaseLog,
        stream: Stream | None = None,
    ) -> None:
        super().__init__()
        self.watchdog, self.phases, self.stream = watchdog, phases, stream
        self.stores, self.every, self.keep = stores, every, keep
        self.batch_size, self.max_tokens, self.seed = batch_size, max_tokens, seed
        self._open: tuple[int, datasets.Dataset, Taps | None] | None = None
        self._ahead: ReadAhead[MicroBatch] | None = None
        self._states: StatesAhead | None = None

    def open(self, step: int, trainer: L.Trainer) -> tuple[datasets.Dataset, Taps | None]:
        """The rows of an optimizer step's phase, and the cache of their hidden states.

        Raises:
            UserError: there are no rows.
        """
        phase = step // self.every if self.every else 0
        if self._open and self._open[0] == phase:
            return self._open[1:]
        if self._open and self._open[2]:
            self._open[2].remove()  # these rows are not read again
        self._open = None
        store = self.stores(phase)
        rows = open_rows(store)
        steps = min(self.every, trainer.max_steps) if self.every else trainer.max_steps
        batches = steps * trainer.accumulate_grad_batches * trainer.world_size
        before = self.keep.target.starting_seconds
        with self.phases.time("taps") as part:
            cache = self.keep(rows, store, self.max_tokens, batches * self.batch_size / len(rows))
            if cache and cache.tokens_read:
                part |= {"tokens": cache.tokens_read, "bytes": cache.bytes}
                part[STARTING] = self.keep.target.starting_seconds - before
                if isinstance(cache, BoundedTaps):
                    part["share"] = cache.share
        self.keep.target.join()
        if not isinstance(cache, BoundedTaps):
            self.keep.target.rest()  # nothing more is read
        self._open = phase, rows, cache
        return rows, cache

    @override
    def train_dataloader(self) -> DataLoader:
        trainer = self.trainer
        assert trainer is not None

        def load(step: int) -> RolloutBatches:
            with self.watchdog.working():  # may regenerate rollouts and read taps
                rows, cache = self.open(step, trainer)
            batches = RolloutBatches(
                rows,
                self.batch_size,
                trainer.max_steps,
                trainer.accumulate_grad_batches,
                trainer.global_rank,
                trainer.world_size,
                self.seed,
                self.max_tokens,
                cache,
                self.keep.packing,
            )
            if unused := batches.unused():
                say(f"rollouts: {unused}")
            return batches

        self.batches = PhasedBatches(load, self.every, trainer.accumulate_grad_batches, trainer.max_steps)
        # A resumed run continues at the step that Lightning has restored.
        start = trainer.global_step * trainer.accumulate_grad_batches
        batches: Dataset[MicroBatch] = self.batches
        if self.keep.target.source or self._waits_for_files():
            batches = self._ahead = ReadAhead(self.batches, AHEAD, self.batches.phase_end)
        if self.stream:
            device = trainer.strategy.root_device
            batches = self._states = StatesAhead(
                batches, partial(read_states, self.keep.target), self.batches.phase_end, device, self.stream
            )
        return DataLoader(batches, batch_size=None, sampler=ResumeSampler(start, len(self.batches)))

    def _waits_for_files(self) -> bool:
        """Whether making a micro-batch only reads files, which a thread can do while a GPU trains."""
        cache = self._open[2] if self._open else None
        return self.stream is not None and not self.every and isinstance(cache, TapCache)

    def join(self) -> None:
        """Let the device finish what it reads ahead, before the target is used for something else."""
        if self._states:
            self._states.join()

    @override
    def teardown(self, stage: str) -> None:
        if self._ahead:
            self._ahead.close()
        self.keep.target.rest()

    def memory_bytes(self) -> int:
        """Bytes of hidden states that are cached in memory."""
        cache = self._open[2] if self._open else None
        return cache.memory_bytes if cache else 0

    def micros(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of an optimizer step."""
        first = step * self.batches.accumulate
        return [self.batches[first + i] for i in range(self.batches.accumulate)]
