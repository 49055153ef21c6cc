"""The target answers prompts; what it wrote is stored, shard by shard, and never made twice."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from decode.errors import UserError
from distill.files import clean, publish, sha256, write_json
from distill.prompts import Prompt
from drafters.base import Text

SCHEMA = 2
COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("finish_reason", pa.string()),
        ("ids", pa.string()),
        ("weight", pa.float32()),
    ]
)
Row = dict[str, Any]
Make = Callable[[int, list[Prompt], int], list[Row]]  # shard, its prompts, self-written ones -> rows


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Everything that decides what the rows are; its hash names the store.

    Args:
        target: fingerprint of the target.
        tokenizer: fingerprint of the tokenizer.
        dtype: that the target decodes in.
        stop: end tokens.
        template: see `Chat`.
        answers: `write` lets the target answer, `given` takes the records' own last messages.
        server: name of the model that a server answers with; empty where the target is in the process.
        drafter: fingerprint of what drafts the answers, or empty. It changes none, but for rounding.
        prompts: hash of the prompt records.
        samples: answers to each prompt.
        self_prompts: rows that the target writes from nothing.
        until: `answer` ends a row with the answer; `length` lets the target go on, turn after turn,
            to max_new_tokens, and begin its own rows freely: for models trained on packed text.
        sampler: law of the answers, as keyword arguments of `Sampler`.
        prompt_sampler: law of self-written prompts, where they are answered one by one.
        max_prompt_tokens: longer prompts are dropped; self-written ones are cut. Every further turn
            of a conversation may add as many, and an answer.
        max_new_tokens: per answer.
        shard_size: prompts a shard.
        batch_size: answers decoded side by side, those of similar length together.
        seed: of all draws.
    """

    target: str
    tokenizer: str
    dtype: str
    stop: list[int]
    template: str
    answers: str
    server: str
    drafter: str
    prompts: str
    samples: int
    self_prompts: int
    until: str
    sampler: dict[str, Any]
    prompt_sampler: dict[str, Any]
    max_prompt_tokens: int
    max_new_tokens: int
    shard_size: int
    batch_size: int
    seed: int

    @property
    def key(self) -> str:
        """Short hash of all of it."""
        text = json.dumps([SCHEMA, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class RolloutStore:
    """A folder of Parquet shards and a manifest.

    A shard under its final name is whole; anything else is `.tmp` and is made again.
    """

    def __init__(self, root: Path, plan: RolloutPlan, prompts: Sequence[Prompt]) -> None:
        self.folder, self.plan, self.prompts = root / plan.key, plan, list(prompts)
        total = len(self.prompts) + plan.self_prompts
        self.shards = -(-total // plan.shard_size)
        if not total:
            raise UserError("prompts: none given and prompts.self=0; there is nothing to roll out")

    def path(self, shard: int) -> Path:
        """Of a shard, whether or not it exists."""
        return self.folder / f"shard-{shard:05d}.parquet"

    def missing(self) -> list[int]:
        """Shards still to be made."""
        return [i for i in range(self.shards) if not self.path(i).exists()]

    @property
    def complete(self) -> bool:
        """Every shard is there, and the manifest, which comes last."""
        return (self.folder / "manifest.json").exists() and not self.missing()

    def fill(self, make: Make, done: Callable[[int], None]) -> None:
        """Make what is missing; ranks of a launcher share the work, and wait for one another.

        Args:
            make: the rows of a shard.
            done: told how many shards are missing still, whoever makes them.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        mine = [i for i in range(self.shards) if i % world == rank]
        others = [i for i in range(self.shards) if i % world != rank]
        # A shard of a rank that died is taken over once its lock is free.
        made = 0
        while todo := [i for i in mine + others if not self.path(i).exists()]:
            before = made
            for shard in todo:
                if self.make(shard, make):
                    made += 1
                    done(len(self.missing()))
            if made == before:
                done(len(self.missing()))
                time.sleep(0.2)
        done(0)
        with self._lock("manifest", wait=True):
            if made or not self.complete:
                self._manifest()

    def make(self, shard: int, make: Make) -> bool:
        """Make one shard, unless it is there or another process is at it; whether it was made."""
        with self._lock(f"shard-{shard:05d}") as free:
            if not free or self.path(shard).exists():
                return False
            self._write(shard, make(shard, *self._work(shard)))
        return True

    def _work(self, shard: int) -> tuple[list[Prompt], int]:
        size = self.plan.shard_size
        given = self.prompts[shard * size : (shard + 1) * size]
        total = len(self.prompts) + self.plan.self_prompts
        return given, min((shard + 1) * size, total) - shard * size - len(given)

    @contextmanager
    def _lock(self, name: str, wait: bool = False) -> Iterator[bool]:
        with (self.folder / f"{name}.lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
            else:
                yield True

    def _write(self, shard: int, rows: list[Row]) -> None:
        with publish(self.path(shard)) as temporary:
            pq.write_table(pa.Table.from_pylist(rows, schema=COLUMNS), temporary)

    def _manifest(self) -> None:
        shards = []
        for i in range(self.shards):
            table = pq.read_table(self.path(i), columns=["loss_mask"])
            answered = sum(sum(mask) for mask in table["loss_mask"].to_pylist())
            shards.append(
                {
                    "file": self.path(i).name,
                    "rows": table.num_rows,
                    "answered": answered,
                    "sha256": sha256(self.path(i)),
                }
            )
        # All shards are under their final names, so what else is here belongs to dead writers.
        clean(self.folder)
        for lock in self.folder.glob("shard-*.lock"):
            lock.unlink(missing_ok=True)
        write_json(
            self.folder / "manifest.json",
            {"schema": SCHEMA, "key": self.plan.key, "plan": asdict(self.plan), "shards": shards},
        )

    def manifest(self) -> dict[str, Any]:
        """Counts and hashes, once every shard is there."""
        return json.loads((self.folder / "manifest.json").read_text())

    def texts(self) -> Iterator[Text]:
        """All rows, in the order of the prompts."""
        for shard in range(self.shards):
            table = pq.read_table(self.path(shard), columns=["tokens", "loss_mask"])
            yield from (Text(**row) for row in table.to_pylist())

    def check(self) -> None:
        """Compare the shards with the manifest.

        Raises:
            UserError: a shard that was changed since it was made.
        """
        for i, shard in enumerate(self.manifest()["shards"]):
            if sha256(self.path(i)) != shard["sha256"]:
                raise UserError(f"{self.path(i)}: changed since it was made; delete it to have it made again")
