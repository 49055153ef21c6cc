"""Disk cache of the target's hidden states for all rows, so that a large target runs only once."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Sequence
from itertools import takewhile
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
from distill.utils.atomic_files import read_json, sha256, write_json
from distill.utils.progress import bar, say
from distill.utils.provenance import digest
from drafters.checkpoint.atomic import publish, rename_into_place

FILE_BYTES = 2**28  # size of one file; also the memory needed to write it
SCHEMA = 1


def tap_positions(loss_mask: Sequence[int], max_tokens: int) -> tuple[int, list[int]]:
    """Positions of a row whose hidden states training uses.

    Returns:
        num_taps: positions with taps, all up to the last anchor, since drafters also attend to the prompt.
        teacher: positions that predict a supervised token, whose last hidden state is the teacher.
    """
    teacher = [i - 1 for i, supervised in enumerate(loss_mask[:max_tokens]) if supervised and i]
    return (teacher[-1] + 1 if teacher else 0), teacher


def tap_cache_gigabytes(target: Target, rows: datasets.Dataset, max_tokens: int) -> float:
    """Size of a `TapCache` in bf16."""
    num_taps = num_teacher = 0
    for mask in rows["loss_mask"]:
        count, teacher = tap_positions(mask, max_tokens)
        num_taps, num_teacher = num_taps + count, num_teacher + len(teacher)
    vectors = num_taps if _only_last(target) else num_taps * len(target.taps) + num_teacher
    return 2 * vectors * target.hidden_size / 2**30


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_whole(path: Path, digest: str) -> bool:
    return path.exists() and sha256(path) == digest


def _only_last(target: Target) -> bool:
    return set(target.taps) == {LAST}


class TapCache:
    """Head inputs and taps of all rows in bf16 safetensors files, written once and memory-mapped.

    The folder gets its final name when it is complete. What a killed writer, or one whose target failed, has
    written in whole files is kept and gone on from. Processes that need the same cache wait for the one that
    writes it.

    Args:
        target: with its taps set.
        rows: with `tokens` and `loss_mask`.
        max_tokens: longer rows are cut.
        root: folder of caches.
        store: hash of the rows.
        limit: largest size in gigabytes.
        packing: rows are read without padding, up to their last position that training uses.

    Raises:
        UserError: the cache exceeds the limit or the free disk space, or its files were changed.
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
        self._positions = [tap_positions(mask, max_tokens) for mask in rows["loss_mask"]]
        self._lengths = [min(len(mask), max_tokens) for mask in rows["loss_mask"]]
        key = [SCHEMA, store, target.fingerprint(), str(target.dtype), list(target.taps), max_tokens]
        key += ["packed"] * packing + [target.source] * bool(target.source)  # which change rounding
        self.folder = root / f"taps-{digest(json.dumps(key))[:12]}"
        root.mkdir(parents=True, exist_ok=True)
        with (root / "taps.lock").open("w") as lock:
            while not _locked(lock):
                target.idle(0.2)  # no blocking flock: a sharded target may need this process
            if self.folder.exists():
                say(f"taps: reusing {self.folder}")
                self._check()
            else:
                partial = self.folder.with_suffix(".tmp")
                for other in set(root.glob("taps-*.tmp")) - {partial}:
                    shutil.rmtree(other)
                self._make_room(tap_cache_gigabytes(target, rows, max_tokens), limit, partial, target.source)
                self._write(target, rows["tokens"], partial)
        index = self._index(self.folder)
        self._places: list[tuple[int, int, int]] = [tuple(place) for place in index["rows"]]
        self._files: list[Any] = [
            safe_open(self.folder / file["name"], framework="pt").__enter__() for file in index["files"]
        ]

    def _make_room(self, need: float, limit: float, partial: Path, source: str) -> None:
        free = shutil.disk_usage(self.folder.parent).free / 2**30
        free += sum(file.stat().st_size for file in partial.glob("*")) / 2**30
        layers = "the head's input" if self._only_last else f"{self._count} layers and the head's input"
        say(f"taps: {need:.2f} GB of {layers}, in bf16, go to {self.folder}")
        option = "taps=engine" if source else "taps=cache"
        if need > limit:
            advice = "" if source else ", or use taps=online"
            raise UserError(f"{option} would write {need:.2f} GB; raise taps_gb{advice}")
        if need > free:
            advice = "make room" if source else "use taps=online"
            raise UserError(f"{option} would write {need:.2f} GB, and {free:.2f} are free; {advice}")

    def _write(self, target: Target, texts: Sequence[list[int]], partial: Path) -> None:
        files, places = self._begun(partial)
        # A packed row costs what is read of it; one without a tap has no use for its only token.
        ends = [max(1, num) for num, _ in self._positions] if self._packing else self._lengths
        cut = [text[:end] for text, end in zip(texts, ends, strict=True)]
        reads = read_rows(target, cut, self._packing, len(places))
        with bar(len(cut), "taps", "rows", len(places)) as progress:
            for number, part in enumerate(self._parts(reads, len(places)), len(files)):
                name = f"taps-{number:05d}.safetensors"
                places += [(number, *start) for start in part.pop("starts")]
                with publish(partial / name) as temporary:
                    save_file({key: torch.cat(values) for key, values in part.items()}, temporary)
                files.append({"name": name, "sha256": sha256(partial / name)})
                write_json(partial / "index.json", {"files": files, "rows": places})
                progress.update(len(places) - progress.n)
        rename_into_place(partial, self.folder)

    def _begun(self, partial: Path) -> tuple[list[Any], list[Any]]:
        """Whole files of a writer before this one, and the places of rows in them; others are removed."""
        partial.mkdir(exist_ok=True)
        try:
            index = read_json(partial / "index.json", "", files=list, rows=list) or {"files": [], "rows": []}
        except UserError:  # damaged
            index = {"files": [], "rows": []}
        files = list(takewhile(lambda f: _is_whole(partial / f["name"], f["sha256"]), index["files"]))
        places = [place for place in index["rows"] if place[0] < len(files)]
        for path in set(partial.iterdir()) - {partial / file["name"] for file in files}:
            path.unlink()
        if places:
            say(f"taps: going on after {len(places)} of {len(self._lengths)} rows in {partial}")
        return files, places

    def _parts(self, reads: Iterator[tuple[Tensor, Tensor]], first: int) -> Iterator[dict[str, list[Any]]]:
        """Contents of each file: vectors of several rows, and the offsets (taps, last) of each row.

        Where reading fails, what was read before comes first.
        """
        part, size = self._empty(), [0, 0]
        try:
            for (last, taps), (num_taps, teacher) in zip(reads, self._positions[first:], strict=True):
                part["starts"].append(tuple(size))
                part["taps"].append(taps[:num_taps].to("cpu", torch.bfloat16))  # (n, L, D)
                if not self._only_last:
                    part["last"].append(last[teacher].to("cpu", torch.bfloat16))  # (m, D)
                size = [size[0] + num_taps, size[1] + len(teacher)]
                if 2 * self._hidden * (size[0] * self._count + size[1]) >= FILE_BYTES:
                    yield part
                    part, size = self._empty(), [0, 0]
        except UserError:
            if part["starts"]:
                yield part
            raise
        if part["starts"]:
            yield part

    def _empty(self) -> dict[str, list[Any]]:
        return {"starts": [], "taps": []} | ({} if self._only_last else {"last": []})

    def _index(self, folder: Path) -> dict[str, Any]:
        advice = f"delete {folder} to have it made again"
        index = read_json(folder / "index.json", advice, files=list, rows=list)
        if index is None:
            raise UserError(f"{folder}: has no index.json; {advice}")
        return index

    def _check(self) -> None:
        for file in self._index(self.folder)["files"]:
            path = self.folder / file["name"]
            if not _is_whole(path, file["sha256"]):
                raise UserError(
                    f"{path}: changed since it was made; delete {self.folder} to have it made again"
                )

    def batch(self, rows: Sequence[int]) -> TargetOutput:
        """Right-padded (B, T, D) head inputs and (B, T, L, D) taps of rows; 0 where training uses none."""
        pairs = [self._row(row) for row in rows]
        last = pad_sequence([pair[0] for pair in pairs], batch_first=True)
        return TargetOutput(last, pad_sequence([pair[1] for pair in pairs], batch_first=True))

    def _row(self, row: int) -> tuple[Tensor, Tensor]:
        """(T, D) head inputs and (T, L, D) taps of a row."""
        file, start, last_start = self._places[row]
        num_taps, teacher = self._positions[row]
        taps = torch.zeros(self._lengths[row], self._count, self._hidden, dtype=self.dtype)
        taps[:num_taps] = self._files[file].get_slice("taps")[start : start + num_taps]
        if self._only_last:
            return taps[:, 0], taps
        last = taps.new_zeros(len(taps), self._hidden)
        vectors = self._files[file].get_slice("last")[last_start : last_start + len(teacher)]
        last[teacher] = vectors.to(self.dtype)
        return last, taps

    def remove(self) -> None:
        """Delete the files; processes that have them open can still read."""
        shutil.rmtree(self.folder, ignore_errors=True)
