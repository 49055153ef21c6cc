"""Disk cache of the target's hidden states for all rows, so that a large target runs only once."""

from __future__ import annotations

import fcntl
import json
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.errors import UserError
from decode.hardware import locked
from decode.model.target import LAST, Target, TargetOutput
from distill.data.rows import list_batches
from distill.data.taps_memory import announce, padded, read_rows
from distill.data.vectors import FORMATS, VectorFormat
from distill.utils.atomic_files import clean, read_json, write_json
from distill.utils.progress import bar, rank_and_world, say
from distill.utils.provenance import digest
from drafters.checkpoint.atomic import publish

FILE_BYTES = 2**25  # bytes of vectors of a full file; a limit is rounded down to files
FILE_ROWS = 2048  # maximum rows of a file: lost if a process is killed
FILES = 4096  # approximate maximum; each is mapped into memory
SCHEMA = 3
LAYOUT = "layout.json"
LOCK = "taps.lock"  # in the folder of caches: one process prepares or cleans at a time


class TapPositions(NamedTuple):
    """Positions of each row with hidden states that training uses; (N,) each.

    Attributes:
        taps: number of positions with taps: all up to the last anchor, since drafters attend to the prompt.
        teacher: number of positions that predict a supervised token; they need the last hidden state.
        length: tokens of the truncated row.
    """

    taps: np.ndarray
    teacher: np.ndarray
    length: np.ndarray


def tap_positions(rows: datasets.Dataset, max_tokens: int) -> TapPositions:
    """Count the positions of all rows that training uses."""
    parts = []
    for offsets, mask in list_batches(rows, "loss_mask"):
        start = offsets[:-1]
        end = np.minimum(offsets[1:], start + max_tokens)
        places = np.flatnonzero(mask)  # places of supervised tokens
        before, upto = np.searchsorted(places, start + 1), np.searchsorted(places, end)
        last = places[np.maximum(upto, 1) - 1] if places.size else start  # the row's last supervised token
        parts.append((np.where(upto > before, last - start, 0), upto - before, end - start))
    return TapPositions(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def teacher_positions(loss_mask: Sequence[int], max_tokens: int) -> np.ndarray:
    """(m,) positions of a row that predict a supervised token."""
    return np.flatnonzero(loss_mask[1:max_tokens])


def _row_bytes(target: Target, positions: TapPositions, stored: VectorFormat) -> np.ndarray:
    vectors = positions.taps
    if not _only_last(target):
        vectors = positions.taps * len(target.taps) + positions.teacher
    return stored.size(target.hidden_size) * vectors


def _only_last(target: Target) -> bool:
    return set(target.taps) == {LAST}


def file_starts(row_bytes: np.ndarray) -> np.ndarray:
    """(F + 1,) number of the first row of each file, followed by the number of rows."""
    total = np.concatenate([[0], np.cumsum(row_bytes)])
    most_bytes = max(FILE_BYTES, int(total[-1]) // FILES)
    most_rows = max(FILE_ROWS, len(row_bytes) // FILES)
    starts = [0]
    while starts[-1] < len(row_bytes):
        full = int(np.searchsorted(total, total[starts[-1]] + most_bytes))  # rows until it is full
        starts.append(min(max(full, starts[-1] + 1), starts[-1] + most_rows, len(row_bytes)))
    return np.array(starts)


class TapCache:
    """Head inputs and taps of rows in safetensors files, written once and memory-mapped.

    The rows of a file follow from their lengths, so the processes of a run write different files at the same
    time. Complete files are renamed and used by all processes. If the rows exceed the limit, only the first
    files are written.

    Args:
        target: target with its taps set.
        rows: rows with `tokens` and `loss_mask`.
        max_tokens: longer rows are truncated.
        root: folder of caches.
        store: hash of the rows.
        limit: maximum size in gigabytes.
        packing: rows are read without padding, up to the last position that training uses.
        stored: format of the vectors.

    Attributes:
        count: number of cached rows, from the first on.
        share: their share of the bytes of all rows.

    Raises:
        UserError: it exceeds the free disk space, or its files were changed.
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
        stored: VectorFormat = FORMATS["bfloat16"],
    ) -> None:
        self._packing, self._max_tokens, self._stored = packing, max_tokens, stored
        self.dtype, self._hidden = target.dtype, target.hidden_size
        self._only_last = _only_last(target)
        self._count = 1 if self._only_last else len(target.taps)
        self._positions = tap_positions(rows, max_tokens)
        self._bytes = _row_bytes(target, self._positions, stored)
        self._starts = self._kept(file_starts(self._bytes), limit)  # (F + 1,)
        self.count = int(self._starts[-1])
        self.share = float(self._bytes[: self.count].sum() / max(1, self._bytes.sum()))
        self._bytes = self._bytes[: self.count]
        self._rows = rows.with_format("numpy")
        key = [
            SCHEMA,
            store,
            target.fingerprint(),
            target.config_hash(),
            str(target.dtype),
            list(target.taps),
        ]
        key += [max_tokens]
        key += ["packed"] * packing + [target.source] * bool(target.source)  # both affect rounding
        key += [stored.name] * (stored is not FORMATS["bfloat16"])
        self.folder = root / f"taps-{digest(json.dumps(key))[:12]}"
        missing = self._missing()
        # Positions that the target has to read, over all processes
        parts = [self._positions.taps[self._starts[i] : self._starts[i + 1]] for i in missing]
        self.tokens_read = sum(int(part.sum()) for part in parts)
        # (N + 1,) rows of each stored tensor before a row, over all files
        self._before = {
            name + suffix: np.concatenate([[0], np.cumsum(counts)])
            for name, counts in zip(("taps", "last")[: 2 - self._only_last], self._positions, strict=False)
            for suffix in stored.suffixes
        }
        if missing:
            with self._writing(target.source):
                self._fill(target)
            self._clean()
        elif self.count:
            say(f"taps: reusing {self.folder}")
        self._files = [self._open(number) for number in range(len(self._starts) - 1)]

    def _kept(self, starts: np.ndarray, limit: float) -> np.ndarray:
        """The files that fit the limit."""
        ends = np.concatenate([[0], np.cumsum(self._bytes)])[starts]
        files = int(np.searchsorted(ends, limit * 2**30, side="right"))  # F + 1 ends, so at least one
        if files == len(starts):
            return starts
        announce(self._bytes, int(starts[files - 1]), limit)
        return starts[:files]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return int(self._bytes.sum())

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory: 0, since files are mapped."""
        return 0

    def _path(self, number: int) -> Path:
        return self.folder / f"taps-{number:05d}.safetensors"

    def _missing(self) -> list[int]:
        names = {path.name for path in self.folder.glob("*.safetensors")}
        return [i for i in range(len(self._starts) - 1) if self._path(i).name not in names]

    @contextmanager
    def _writing(self, source: str) -> Iterator[None]:
        """Hold a lock that marks the folder as being written."""
        root = self.folder.parent
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / LOCK):  # keeps other processes from finding the folder before it is locked
            self._prepare(root, source)
            lock = (self.folder / "folder.lock").open("a")
            fcntl.flock(lock, fcntl.LOCK_SH)
        with lock:
            yield

    def _prepare(self, root: Path, source: str) -> None:
        """Make the folder, and check the free space.

        Raises:
            UserError: not enough space.
        """
        for other in set(root.glob("taps-*")) - {self.folder}:
            _remove_unfinished(other)
        need = float(self._bytes.sum()) / 2**30
        written = sum(path.stat().st_size for path in self.folder.glob("*.safetensors")) / 2**30
        free = shutil.disk_usage(root).free / 2**30 + written
        layers = "the head's input" if self._only_last else f"{self._count} layers and the head's input"
        say(f"taps: {need:.2f} GB of {layers}, in {self._stored.name}, go to {self.folder}")
        if need > free:
            option = "taps=engine" if source else "taps=cache"
            raise UserError(f"{option} would write {need:.2f} GB, and {free:.2f} are free; lower taps_gb")
        self.folder.mkdir(exist_ok=True)
        write_json(self.folder / LAYOUT, {"schema": SCHEMA, "files": len(self._starts) - 1})

    def _fill(self, target: Target) -> None:
        """Write the missing files: this process's share first, then shares of ended processes."""
        rank, world = rank_and_world()
        row_counts = np.diff(self._starts)

        def left(missing: Sequence[int]) -> int:
            return int(row_counts[list(missing)].sum())

        missing = self._missing()
        if len(missing) < len(row_counts):
            say(f"taps: {len(self._bytes) - left(missing)} of {len(self._bytes)} rows exist already")
        with bar(len(self._bytes), "taps", "rows", len(self._bytes) - left(missing)) as progress:
            while missing:
                made = False
                for number in sorted(missing, key=lambda number: number % world != rank):
                    with locked(self.folder / f"taps-{number:05d}.lock", wait=False) as free:
                        if free and not self._path(number).exists():
                            self._write(target, number)
                            made = True
                            progress.update(int(row_counts[number]))
                if not made:
                    target.idle(0.2)  # no blocking lock: a sharded target may need this process
                missing = self._missing()
                progress.update(len(self._bytes) - left(missing) - progress.n)

    def _clean(self) -> None:
        """Remove temporary files of killed writers, unless a process is writing."""
        # A process that prepares the folder holds the first lock, but not yet the second.
        with locked(self.folder.parent / LOCK), locked(self.folder / "folder.lock", wait=False) as free:
            if free:
                clean(self.folder)
                for lock in self.folder.glob("taps-*.lock"):
                    lock.unlink(missing_ok=True)

    def _write(self, target: Target, number: int) -> None:
        """Write one file: vectors of its rows in order, and a checksum of each row.

        If an engine fails, the rows read so far are kept in a file next to it.
        """
        first, last = self._starts[number : number + 2].tolist()
        part = self._path(number).with_suffix(".part")
        kept = self._begun(part, first) if target.source else []
        done = first + len(kept)
        rows = self._rows.select(range(done, last))
        # A packed row costs only the read positions; a row without taps does not need its only token.
        ends = np.maximum(1, self._positions.taps) if self._packing else self._positions.length
        texts = [row[:end].tolist() for row, end in zip(rows["tokens"], ends[done:last], strict=True)]
        try:
            for row, (hidden, tapped) in enumerate(read_rows(target, texts, self._packing)):
                parts = self._stored.encode(tapped[: self._positions.taps[done + row]])  # of (n, L, D)
                if not self._only_last:
                    teacher = torch.from_numpy(teacher_positions(rows[row]["loss_mask"], self._max_tokens))
                    parts += self._stored.encode(hidden[teacher.to(hidden.device)])  # of (m, D)
                kept.append(parts)
        except UserError:
            if target.source and kept:
                self._save(part, kept)
            raise
        self._save(self._path(number), kept)
        part.unlink(missing_ok=True)

    def _save(self, path: Path, rows: Sequence[tuple[Tensor, ...]]) -> None:
        columns = zip(self._before, zip(*rows, strict=True), strict=True)
        content = {name: torch.cat(column) for name, column in columns}
        with publish(path) as temporary:
            save_file(content | {"sums": torch.tensor([_checksum(*row) for row in rows])}, temporary)

    def _begun(self, part: Path, first: int) -> list[tuple[Tensor, ...]]:
        """Vectors of the rows from `first` on that were read before an engine failed."""
        try:
            content = load_file(part)
        except (FileNotFoundError, SafetensorError):
            return []
        sums = content["sums"].tolist()
        columns = [
            content[name].split(np.diff(before[first : first + len(sums) + 1]).tolist())
            for name, before in self._before.items()
        ]
        rows = list(zip(*columns, strict=True))
        whole = list(takewhile(lambda row: _checksum(*rows[row]) == sums[row], range(len(rows))))
        if whole:
            say(f"taps: continuing after {first + len(whole)} of {len(self._bytes)} rows in {part}")
        return rows[: len(whole)]

    def _changed(self, number: int) -> UserError:
        return UserError(f"{self._path(number)}: changed since it was made; delete it to have it made again")

    def _open(self, number: int) -> Any:
        try:
            return safe_open(self._path(number), framework="pt").__enter__()
        except (SafetensorError, OSError):  # not whole
            raise self._changed(number) from None

    def batch(self, rows: Sequence[int]) -> TargetOutput:
        """Right-padded (B, T, D) head inputs and (B, T, L, D) taps of rows; 0 where training uses none.

        Raises:
            UserError: vectors of a row were changed after they were written.
        """
        return padded([self.row(int(row)) for row in rows])

    def row(self, row: int) -> tuple[Tensor, Tensor]:
        """(T, D) head inputs and (T, L, D) taps of a row.

        Raises:
            UserError: see `batch`.
        """
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        first, file = self._starts[number], self._files[number]
        stored = [
            file.get_slice(name)[before[row] - before[first] : before[row + 1] - before[first]]
            for name, before in self._before.items()
        ]
        if _checksum(*stored) != int(file.get_slice("sums")[row - first]):
            raise self._changed(number)
        taps = torch.zeros(self._positions.length[row], self._count, self._hidden, dtype=self.dtype)
        count = len(self._stored.suffixes)
        taps[: len(stored[0])] = self._stored.decode(stored[:count], self.dtype)
        if self._only_last:
            return taps[:, 0], taps
        last = taps.new_zeros(len(taps), self._hidden)
        teacher = teacher_positions(self._rows[row]["loss_mask"], self._max_tokens)
        last[torch.from_numpy(teacher)] = self._stored.decode(stored[count:], self.dtype)
        return last, taps

    def remove(self) -> None:
        """Delete the files; processes that have them open can still read."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _checksum(*vectors: Tensor) -> int:
    """CRC-32 of the bytes of tensors."""
    crc = 0
    for part in vectors:
        integers = torch.int16 if part.dtype == torch.bfloat16 else part.dtype  # numpy has no bf16
        crc = zlib.crc32(part.contiguous().view(integers).numpy().data, crc)
    return crc


def _remove_unfinished(folder: Path) -> None:
    """Remove an incomplete cache, unless a process is writing it, and caches of older layouts."""
    try:
        layout = read_json(folder / LAYOUT, "", schema=int, files=int) or {}
    except UserError:  # damaged
        layout = {}
    files = len(list(folder.glob("*.safetensors")))
    if layout.get("schema") != SCHEMA or layout["files"] != files:
        with locked(folder / "folder.lock", wait=False) as free:
            if free:
                shutil.rmtree(folder, ignore_errors=True)
