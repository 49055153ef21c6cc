"""Store of the target's answers: written shard by shard, and reused by later runs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from decode.errors import UserError
from decode.hardware import locked
from distill.prompts.prompt import Prompt
from distill.rollouts.manifest import (
    MANIFEST,
    PLAN,
    REMADE,
    read_manifest,
    refuse_links,
    refuse_other,
    total,
    versions,
)
from distill.rollouts.remote import Mirror
from distill.rollouts.shard import Row, count, is_whole, lists, plan_key, read_rows, write_shard
from distill.utils.atomic_files import read_json, sha256, write_json
from distill.utils.progress import rank_and_world
from distill.utils.provenance import digest
from drafters.base import Text

SCHEMA = 4
OURS = ("shard-*.tmp", "shard-*.lock", "*.json.*.tmp")  # temporary files of writers
EVERY = 1.0  # seconds between checks for shards of other processes
Make = Callable[[int, list[Prompt], int], list[Row]]  # shard, prompts, number of self-written ones


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """All settings that determine the rows; their hash names the store.

    Args:
        target: fingerprint of the target's weights.
        config: hash of the target's settings.
        tokenizer: fingerprint of the tokenizer.
        dtype: dtype in which the target decodes.
        stop: end tokens.
        template: see `Chat`.
        answers: `write` lets the target answer, `given` uses the records' last messages.
        server: model name on a server; empty if the target runs in this process.
        drafter: fingerprint of the drafter used to decode, or empty. Changes answers only by rounding.
        prompts: hash of the prompt records.
        samples: answers per prompt.
        self_prompts: number of rows whose prompt the target writes too.
        until: `answer` ends a row with the answer; `length` lets the target continue, turn after turn,
            to max_new_tokens, for models trained on packed text.
        sampler: sampler of the answers, as keyword arguments of `Sampler`.
        prompt_sampler: sampler of self-written prompts, with `until: answer`.
        max_prompt_tokens: maximum length of a prompt; self-written prompts are also limited to
            max_new_tokens. A further turn may add as many tokens and an answer; a longer conversation ends.
        max_new_tokens: maximum length of an answer.
        shard_size: prompts per shard.
        batch_size: answers decoded together, sorted by length.
        seed: seed of all draws.
        moment: date and time rendered by the chat template; "" if it uses none.
    """

    target: str
    config: str
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
    moment: str = ""

    @property
    def key(self) -> str:
        """Short hash of the plan."""
        text = json.dumps([SCHEMA, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def whole_plan(plan: RolloutPlan, root: Path, place: str | None = None) -> RolloutPlan:
    """Return the plan without `server` if that plan has a complete store; else the plan.

    Args:
        plan: plan of a target that runs in an engine.
        root: see `RolloutStore`.
        place: see `RolloutStore`.
    """
    here = replace(plan, server="")
    note = read_json(Path(place or root / here.key) / MANIFEST, REMADE)
    return here if note and note.get("key") == here.key else plan


class RolloutStore:
    """Folder of Parquet shards with the plan and, once complete, a manifest.

    A shard under its final name is complete; anything else is `.tmp` and is made again.

    Args:
        root: folder of all stores; the plan's key names this one.
        plan: plan of the rows.
        prompts: prompts to answer.
        place: another folder for the store, or a URL that shards are shared through.
        origin: name of the target; never compared.

    Attributes:
        made: numbers of the shards that this process has made.

    Raises:
        UserError: no prompts, or an unusable URL.
    """

    def __init__(
        self,
        root: Path,
        plan: RolloutPlan,
        prompts: Sequence[Prompt],
        place: str | None = None,
        origin: dict[str, Any] | None = None,
    ) -> None:
        self.plan, self.prompts, self.origin = plan, list(prompts), origin or {}
        self.folder = self.cache = root / plan.key
        self.mirror: Mirror | None = None
        self.made: list[int] = []
        total = len(self.prompts) + plan.self_prompts
        self.shards = -(-total // plan.shard_size)
        if not total:
            raise UserError("prompts: none given and prompts.self=0; give prompts, or set prompts.self")
        if place and "://" in place:
            self.mirror = Mirror(place)
        elif place:
            self.folder = Path(place)

    def path(self, shard: int) -> Path:
        """Path of a shard, whether or not it exists."""
        return self.folder / f"shard-{shard:05d}.parquet"

    def missing(self) -> list[int]:
        """Numbers of shards that the folder lacks."""
        there = {path.name for path in self.folder.glob("shard-*.parquet")}
        return [i for i in range(self.shards) if self.path(i).name not in there]

    @property
    def complete(self) -> bool:
        """Whether all shards and the manifest exist."""
        return (self.folder / MANIFEST).exists() and not self.missing()

    def open(self) -> None:
        """Create or reopen the store; download shards that only the URL has.

        Raises:
            UserError: the folder or URL holds something else, or the folder has links out of it.
        """
        note = self._note()
        plan_path = self.folder / PLAN
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder}: a file; rollout.store needs a folder or a url")
        refuse_links(self.folder)
        if not plan_path.exists():
            shards = sorted(self.folder.glob("shard-*.parquet"))
            if any(plan_key(path) != self.plan.key for path in shards):
                raise UserError(f"{self.folder}: shards without a {PLAN}; give another rollout.store")
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._lock("manifest", wait=True):
                if not plan_path.exists():
                    write_json(plan_path, note)
        refuse_other(str(self.folder), read_json(plan_path, REMADE, schema=int) or note, note)
        if self.mirror:
            self.mirror.put(plan_path)
            refuse_other(self.mirror.url, self.mirror.read_json(PLAN), note)
            self.pull()

    def fill(
        self, make: Make, done: Callable[[int], None], pause: Callable[[float], None] = time.sleep
    ) -> None:
        """Generate the missing shards; ranks of a launcher share the work and wait for one another.

        Args:
            make: makes the rows of a shard.
            done: called with the number of shards still missing on all ranks.
            pause: sleeps for some seconds (`Target.idle` if the target is sharded over processes).
        """
        self.open()
        rank, world = rank_and_world()
        begun = len(self.made)
        while todo := self.missing():
            before, left, listed = len(self.made), len(todo), time.monotonic()
            # On a shared disk, other ranks take over a dead rank's shards once its locks are free.
            for shard in sorted(todo, key=lambda i: i % world != rank):
                if (shard % world == rank or not self.mirror) and self.make(shard, make):
                    left -= 1
                    if time.monotonic() - listed > EVERY:  # other ranks also make shards
                        left, listed = len(self.missing()), time.monotonic()
                    done(left)
            if len(self.made) == before:
                self.wait(done, pause)
        done(0)
        self.seal(replace=len(self.made) > begun)

    def wait(self, done: Callable[[int], None], pause: Callable[[float], None] = time.sleep) -> None:
        """Pause, then look for shards that other processes made."""
        pause(1.0 if self.mirror else 0.2)
        self.pull()
        done(len(self.missing()))

    def make(self, shard: int, make: Make) -> bool:
        """Make a shard unless it exists or another process is making it; returns whether it was made here."""
        with self._lock(f"shard-{shard:05d}") as free:
            if not free or self.path(shard).exists():
                return False
            if self.mirror and self.mirror.has(self.path(shard).name):
                self._fetch(shard)
                return False
            write_shard(self.path(shard), make(shard, *self._work(shard)), self.plan.key, shard)
            if self.mirror and not self.mirror.put(self.path(shard)):
                self._fetch(shard)  # another machine was faster; use its rows
            self.made.append(shard)
        return True

    def pull(self) -> None:
        """Synchronize the shards of the folder and the URL."""
        if not self.mirror:
            return
        names, missing = self.mirror.names(), set(self.missing())
        for shard in range(self.shards):
            if (shard in missing) != (self.path(shard).name in names):
                continue
            with self._lock(f"shard-{shard:05d}") as free:
                if free and self.path(shard).exists():  # its writer died before the upload
                    self.mirror.put(self.path(shard))
                elif free:
                    self._fetch(shard)
        if MANIFEST in names and not (self.folder / MANIFEST).exists():
            with self._lock("manifest", wait=True):
                self.mirror.get(MANIFEST, self.folder / MANIFEST)

    def _work(self, shard: int) -> tuple[list[Prompt], int]:
        size = self.plan.shard_size
        prompts = self.prompts[shard * size : (shard + 1) * size]
        total = len(self.prompts) + self.plan.self_prompts
        return prompts, min((shard + 1) * size, total) - shard * size - len(prompts)

    def _lock(self, name: str, wait: bool = False) -> AbstractContextManager[bool]:
        return locked(self.folder / f"{name}.lock", wait)

    def _fetch(self, shard: int) -> None:
        assert self.mirror
        self.mirror.fetch_shard(self.path(shard), self.plan.key, shard)

    def _note(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "key": self.plan.key,
            "origin": self.origin,
            "plan": json.loads(json.dumps(asdict(self.plan))),
        }

    def seal(self, replace: bool = False) -> None:
        """Write the manifest once all shards exist; `replace`: overwrite an existing one."""
        with self._lock("manifest", wait=True):
            if self.mirror and MANIFEST in self.mirror.names():
                self.mirror.get(MANIFEST, self.folder / MANIFEST)
            elif replace or not self.complete:
                for i in () if replace else range(self.shards):  # made by earlier processes
                    if not is_whole(self.path(i), self.plan.key, i):
                        raise _changed(self.path(i))
                shards = [count(self.path(i)) for i in range(self.shards)]
                record = {"versions": versions(), "counts": total(shards), "shards": shards}
                write_json(self.folder / MANIFEST, self._note() | record)
            # All shards have their final names, so temporary files belong to dead writers.
            for old in [old for pattern in OURS for old in self.folder.glob(pattern)]:
                old.unlink(missing_ok=True)
            if self.mirror and self.mirror.put(self.folder / MANIFEST):
                self.mirror.clean()

    def manifest(self) -> dict[str, Any]:
        """Read the manifest of a complete store: plan, counts and hashes."""
        return read_manifest(self.folder / MANIFEST)

    def amounts(self, made: Sequence[int]) -> dict[str, float]:
        """Rows, tokens and bytes of a complete store, and answer tokens of the shards in `made`."""
        manifest = self.manifest()
        counts, shards = manifest["counts"], manifest["shards"]
        return {
            "rows": counts["rows"],
            "answer_tokens": counts["answer_tokens"],
            "row_tokens": counts["prompt_tokens"] + counts["answer_tokens"],
            "bytes": sum(self.path(shard).stat().st_size for shard in range(self.shards)),
            "made": sum(shards[shard]["answer_tokens"] for shard in made),
        }

    def content(self) -> str:
        """Hash of the rows; rows of the same plan can differ by rounding or between servers."""
        return digest(" ".join(shard["sha256"] for shard in self.manifest()["shards"]))

    def texts(self) -> Iterator[Text]:
        """Yield all rows as arrays, in the order of the prompts."""
        for shard in range(self.shards):
            table = pq.read_table(self.path(shard), columns=["tokens", "loss_mask"])
            chunks = zip(lists(table["tokens"]), lists(table["loss_mask"]), strict=True)
            for (offsets, tokens), (_, mask) in chunks:
                for start, end in pairwise(offsets.tolist()):
                    yield Text(tokens[start:end], mask[start:end])

    def check(self) -> None:
        """Compare the shards with the manifest.

        Raises:
            UserError: a shard was changed, or the manifest describes other shards.
        """
        shards = self.manifest()["shards"]
        if len(shards) != self.shards:
            raise UserError(f"{self.folder / MANIFEST}: {len(shards)} shards, not {self.shards}; {REMADE}")
        for i, shard in enumerate(shards):
            if sha256(self.path(i)) != shard["sha256"]:
                raise _changed(self.path(i))

    def check_rows(self, vocab_size: int) -> None:
        """Compare the rows with the target's vocabulary, before anything counts or reads them.

        Raises:
            UserError: see `shard.read_rows`.
        """
        for shard in range(self.shards):
            read_rows(self.path(shard), vocab_size)


def moment_of(place: str | None) -> str | None:
    """`RolloutPlan.moment` of the store at `place`; None without a store or moment.

    Args:
        place: a folder or URL, as in `rollout.store`.
    """
    if place and "://" in place:
        mirror = Mirror(place)
        plan = mirror.read_json(PLAN) if mirror.has(PLAN) else None
    else:
        plan = read_json(Path(place) / PLAN, REMADE) if place else None
    return _moment(plan) or None


def _moment(note: dict[str, Any] | None) -> str:
    """The moment in a plan.json; "" if absent."""
    plan = (note or {}).get("plan")
    moment = plan.get("moment") if isinstance(plan, dict) else ""
    return moment if isinstance(moment, str) else ""


def begun_moments(root: Path, plan: RolloutPlan) -> list[str]:
    """Moments of unfinished stores with otherwise the same plan."""
    ours, found = asdict(plan), list[str]()
    for path in sorted(root.glob(f"*/{PLAN}")):
        if (path.parent / MANIFEST).exists():
            continue
        note = read_json(path, REMADE) or {}
        theirs = note["plan"] if isinstance(note.get("plan"), dict) else {}
        same = all(theirs.get(name) == ours[name] for name in ours.keys() - {"moment", "tokenizer"})
        if same and (moment := _moment(note)) and moment != plan.moment:
            found.append(moment)
    return found


def _changed(shard: Path) -> UserError:
    return UserError(f"{shard}: changed since it was made; delete it to have it made again")


def find(store: str | None, root: str) -> Path:
    """Return the folder of a named store, or of the newest complete one in `root`.

    Raises:
        UserError: no complete store in `root`.
    """
    if store is not None:
        return Path(store)
    manifests = sorted(Path(root).glob("*/manifest.json"), key=lambda path: path.stat().st_mtime)
    if not manifests:
        raise UserError(
            f"store: no finished store in {root}; foredraft train makes one, or name another: store=..."
        )
    return manifests[-1].parent
