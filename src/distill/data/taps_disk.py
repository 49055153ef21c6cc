"""What the frozen target says of every stored row, on disk: for targets that should be read once."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import datasets
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.errors import UserError
from decode.model.target import LAST, Target, TargetOutput
from distill.data.taps_memory import read_rows
from distill.utils.atomic_files import sha256, write_json
from distill.utils.progress import bar, say
from distill.utils.provenance import digest
from drafters.checkpoint.atomic import publish

FILE_BYTES = 2**28  # of one file; what is read to check it, and held while it is written
SCHEMA = 1


def kept(loss_mask: Sequence[int], max_tokens: int) -> tuple[int, list[int]]:
    """Which positions of a row training looks at.

    Returns:
        How many positions have taps: all up to the last anchor, since drafters attend to the prompt as
        well. And the positions whose rows teach: those before a supervised token, up to the last one.
    """
    teach = [i - 1 for i, wrote in enumerate(loss_mask[:max_tokens]) if wrote and i]
    return (teach[-1] + 1 if teach else 0), teach


def cache_gigabytes(target: Target, rows: datasets.Dataset, max_tokens: int) -> float:
    """What a `TapCache` would hold, in bf16."""
    read = teach = 0
    for mask in rows["loss_mask"]:
        reach, own = kept(mask, max_tokens)
        read, teach = read + reach, teach + len(own)
    vectors = read if _only_last(target) else read * len(target.taps) + teach
    return 2 * vectors * target.hidden_size / 2**30


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _only_last(target: Target) -> bool:
    return set(target.taps) == {LAST}


class TapCache:
    """Head inputs and taps of all rows in bf16 files, written once and mapped into memory.

    Files and their hashes are under their final name, or not there: a killed writer leaves a folder
    that is removed. Processes that want the same cache wait for the one that writes it.

    Args:
        target: with its taps set.
        rows: with `tokens` and `loss_mask`.
        max_tokens: longer rows are cut.
        root: folder of caches.
        store: hash of the rows.
        limit: gigabytes that a cache may have.
        packing: rows are read without padding.

    Raises:
        UserError: more is needed than the limit or the disk allows; a cache that was changed.
    """

    def __init__(
        self,
        target: Target,
        rows: datasets.Dataset,
        max_tokens: int,
        root: Path,
        store: str,
        limit: float,
        packing: bool = False,
    ) -> None:
        self._packing = packing
        self.dtype, self._hidden = target.dtype, target.hidden_size
        self._only_last = _only_last(target)
        self._count = 1 if self._only_last else len(target.taps)
        self._kept = [kept(mask, max_tokens) for mask in rows["loss_mask"]]
        self._lengths = [min(len(mask), max_tokens) for mask in rows["loss_mask"]]
        what = [SCHEMA, store, target.fingerprint(), str(target.dtype), list(target.taps), max_tokens]
        what += ["packed"] * packing  # which rounds otherwise
        self.folder = root / f"taps-{digest(json.dumps(what))[:12]}"
        root.mkdir(parents=True, exist_ok=True)
        with (root / "taps.lock").open("w") as lock:
            while not _locked(lock):
                target.idle(0.2)  # not in the lock: who writes may need this process's part of the target
            if self.folder.exists():
                say(f"taps: reusing {self.folder}")
                self._check()
            else:
                for left in root.glob("taps-*.tmp"):
                    shutil.rmtree(left)
                self._make_room(cache_gigabytes(target, rows, max_tokens), limit)
                self._write(target, rows, max_tokens)
        index = self._index()
        self._places: list[tuple[int, int, int]] = [tuple(place) for place in index["rows"]]
        self._files: list[Any] = [
            safe_open(self.folder / file["name"], framework="pt").__enter__() for file in index["files"]
        ]

    def _make_room(self, need: float, limit: float) -> None:
        free = shutil.disk_usage(self.folder.parent).free / 2**30
        layers = "the head's input" if self._only_last else f"{self._count} layers and the head's input"
        say(f"taps: {need:.2f} GB of {layers}, in bf16, go to {self.folder}")
        if need > limit:
            raise UserError(f"taps=cache would write {need:.2f} GB; raise taps_gb, or use taps=online")
        if need > free:
            raise UserError(f"taps=cache would write {need:.2f} GB, and {free:.2f} are free; use taps=online")

    def _write(self, target: Target, rows: datasets.Dataset, max_tokens: int) -> None:
        files, places = [], []
        read = read_rows(target, rows, max_tokens, self._packing)
        with publish(self.folder) as temporary, bar(len(rows), "taps", "rows") as progress:
            temporary.mkdir()
            for number, part in enumerate(self._parts(read)):
                name = f"taps-{number:05d}.safetensors"
                places += [(number, *start) for start in part.pop("starts")]
                save_file({key: torch.cat(values) for key, values in part.items()}, temporary / name)
                files.append({"name": name, "sha256": sha256(temporary / name)})
                progress.update(len(places) - progress.n)
            write_json(temporary / "index.json", {"files": files, "rows": places})

    def _parts(self, reads: Iterator[tuple[Tensor, Tensor]]) -> Iterator[dict[str, list[Any]]]:
        """What one file holds: vectors of several rows, and where each row's begin."""
        part, size = self._empty(), [0, 0]
        for (last, taps), (reach, teach) in zip(reads, self._kept, strict=True):
            part["starts"].append(tuple(size))
            part["taps"].append(taps[:reach].to("cpu", torch.bfloat16))  # (n, L, D)
            if not self._only_last:
                part["last"].append(last[teach].to("cpu", torch.bfloat16))  # (m, D)
            size = [size[0] + reach, size[1] + len(teach)]
            if 2 * self._hidden * (size[0] * self._count + size[1]) >= FILE_BYTES:
                yield part
                part, size = self._empty(), [0, 0]
        if part["starts"]:
            yield part

    def _empty(self) -> dict[str, list[Any]]:
        return {"starts": [], "taps": []} | ({} if self._only_last else {"last": []})

    def _index(self) -> dict[str, Any]:
        return json.loads((self.folder / "index.json").read_text())

    def _check(self) -> None:
        for file in self._index()["files"]:
            path = self.folder / file["name"]
            if not path.exists() or sha256(path) != file["sha256"]:
                raise UserError(
                    f"{path}: changed since it was made; delete {self.folder} to have it made again"
                )

    def batch(self, rows: Sequence[int]) -> TargetOutput:
        """Right-padded (B, T, D) and (B, T, L, D) of these rows; what training never looks at is 0."""
        pairs = [self._row(row) for row in rows]
        last = pad_sequence([pair[0] for pair in pairs], batch_first=True)
        return TargetOutput(last, pad_sequence([pair[1] for pair in pairs], batch_first=True))

    def _row(self, row: int) -> tuple[Tensor, Tensor]:
        file, start, own = self._places[row]
        reach, teach = self._kept[row]
        taps = torch.zeros(self._lengths[row], self._count, self._hidden, dtype=self.dtype)
        taps[:reach] = self._files[file].get_slice("taps")[start : start + reach]
        if self._only_last:
            return taps[:, 0], taps
        last = taps.new_zeros(len(taps), self._hidden)
        last[teach] = self._files[file].get_slice("last")[own : own + len(teach)].to(self.dtype)
        return last, taps

    def remove(self) -> None:
        """Give the disk back; processes that still read keep what they have open."""
        shutil.rmtree(self.folder, ignore_errors=True)
