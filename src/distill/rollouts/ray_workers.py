"""Generate shards in many processes: Ray Data maps shard numbers over actors with one target each.

Ray schedules and retries the work. Workers use the same `Writer` as a single process. If a worker is lost,
only its current shard is generated again.
"""

from __future__ import annotations

import copy
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from decode.errors import UserError
from distill.options.answers import FleetOptions
from distill.rollouts.store import Make, RolloutStore
from distill.utils.progress import rank_and_world

TRIES = 6  # attempts for one shard; Ray itself has no limit
OBJECTS = 80 * 2**20  # shared memory of a local Ray in bytes: the minimum, since shard numbers are small
SEEN = 10.0  # seconds to wait for a remote file to appear
# Set before Ray starts: disables telemetry and daemon messages.
SILENCE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class Worker:
    """Ray actor that generates shards by number.

    Args:
        store: an opened store for the shards.
        load: loads the function that makes rows, once, at the first shard.
    """

    def __init__(self, store: RolloutStore, load: Callable[[], Make]) -> None:
        self.store, self.load = store, load
        self.make: Make | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Make one shard; the outcome is `whole`, `busy` (made by another process), or an error's text."""
        number = int(batch["item"][0])
        errno = 0
        try:
            self.store.folder.mkdir(parents=True, exist_ok=True)
            with self._tried(number):
                self.make = self.make or self.load()
                self.store.make(number, self.make)
            outcome = "whole" if self.store.path(number).exists() else "busy"
        except UserError as error:
            outcome = str(error)
        except OSError as error:  # a full disk
            outcome, errno = f"{error.strerror or error} ({error.filename})", error.errno or 0
        return {"item": [number], "outcome": [outcome], "errno": [errno]}

    @contextmanager
    def _tried(self, number: int) -> Iterator[None]:
        """Count how often workers died at a shard."""
        path = self.store.path(number)
        tries = path.with_name(f"{path.name}.tries.tmp")
        with tries.open("a") as file:
            file.write("x")
        try:
            if tries.stat().st_size > TRIES:
                raise UserError(
                    f"rollout=ray: workers died {TRIES} times at {path.name}; is there too little memory? "
                    "The same command continues with what is missing"
                )
            yield
        finally:  # not reached if the worker is killed
            tries.unlink(missing_ok=True)


class Fleet:
    """Pool of Ray workers.

    Args:
        options: number of workers, cluster address, and resources of each worker.
        load: called on each worker's machine to load its writer.

    Raises:
        UserError: Ray is not installed.
    """

    def __init__(self, options: FleetOptions, load: Callable[[], Make]) -> None:
        self.options, self.load = options, load
        for name, value in SILENCE.items():
            os.environ.setdefault(name, value)
        try:
            import_module("ray.data")  # an optional extra
        except ImportError:
            raise UserError("rollout=ray: Ray is not installed; pip install 'foredraft[ray]'") from None

    def fill(self, store: RolloutStore, done: Callable[[int], None]) -> None:
        """Generate the missing shards; the first of a launcher's ranks schedules them, the others wait.

        Args:
            store: an opened store.
            done: called with the number of missing shards.

        Raises:
            UserError: a worker reports an error, or writes where this machine cannot read.
        """
        first = rank_and_world()[0] == 0
        with self.connected() if first else _nothing():
            while todo := store.missing():
                for number, outcome in self.results(store, todo) if first else ():
                    if outcome == "whole":
                        self._collect(store, number)
                        store.made.append(number)
                    done(len(store.missing()))
                if store.missing():
                    store.wait(done)
        done(0)
        store.seal(replace=first)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Start Ray or join a cluster; at the end, shut down only a Ray that was started here."""
        import ray

        if ray.is_initialized():
            yield
            return
        address = self.options.address or os.environ.get("RAY_ADDRESS")
        gpus, there = self.options.workers * self.options.gpus_per_worker, torch.cuda.device_count()
        if not address and gpus > there:
            raise UserError(
                f"rollout.gpus_per_worker: {self.options.workers} workers want {gpus} GPUs, and this machine "
                f"has {there}"
            )
        local: dict[str, Any] = {
            "num_cpus": max(1, self.options.workers * self.options.cpus_per_worker),
            "object_store_memory": OBJECTS,
            "include_dashboard": False,
        }
        signals = (signal.SIGINT, signal.SIGTERM)
        handlers = [signal.getsignal(number) for number in signals]  # Ray replaces them
        try:
            with _mute(), _refused(address):
                # "local" keeps Ray from joining the session of a left-over file
                options = {} if address else local
                ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **options)
            yield
        finally:
            ray.shutdown()
            for number, handler in zip(signals, handlers, strict=True):
                signal.signal(number, handler)

    def results(self, store: RolloutStore, todo: list[int]) -> Iterator[tuple[int, str]]:
        """Yield number and outcome of each finished shard."""
        import ray.data

        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_no_progress_timeout_s = -1  # a shard may take hours
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        away = copy.copy(store)
        away.folder = store.folder.absolute()
        shards = ray.data.from_items(todo, override_num_blocks=len(todo)).map_batches(
            Worker,
            fn_constructor_args=(away, self.load),
            compute=ray.data.ActorPoolStrategy(size=self.options.workers, max_tasks_in_flight_per_actor=1),
            batch_size=1,
            num_cpus=self.options.cpus_per_worker,
            num_gpus=self.options.gpus_per_worker,
        )
        for row in shards.iter_rows():
            if row["errno"]:
                raise OSError(row["errno"], row["outcome"])
            if row["outcome"] not in ("whole", "busy"):
                raise UserError(row["outcome"])
            yield row["item"], row["outcome"]

    def _collect(self, store: RolloutStore, number: int) -> None:
        """Wait until a worker's shard is visible on this machine."""
        end = time.monotonic() + SEEN
        while not store.path(number).exists():
            store.pull()
            if time.monotonic() > end:
                raise UserError(
                    f"rollout=ray: a worker wrote to {store.folder}, but this machine does not see the file; "
                    "without a common disk, give rollout.store=<url>"
                )
            time.sleep(0.05)


@contextmanager
def _refused(address: str | None) -> Iterator[None]:
    try:
        yield
    except (ConnectionError, ValueError) as error:
        raise UserError(f"rollout.address={address}: {' '.join(str(error).split())}") from None


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _mute() -> Iterator[None]:
    """Silence stderr of C++ code during Ray's start."""
    stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)
