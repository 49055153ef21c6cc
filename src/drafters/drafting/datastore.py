"""Memory-mapped suffix array of texts, to look up the tokens after an n-gram (REST, arXiv:2311.08252).

A datastore is a folder in the machine's cache folder, named by a hash of its texts and the tokenizer:

    index.json    format, key, bytes of a token, vocabulary, hashes of samples of the files
    tokens.bin    the texts' token ids, big-endian, so that bytes sort like tokens; the largest number
                  that fits, the separator, ends each text, and `DEPTH` more end the file
    order.bin     (n,) uint32, little-endian: all positions, sorted by the `DEPTH` tokens from there on

Processes that open it share its pages. `distill.datastore` builds it. Files are checked by samples, so damage
elsewhere can remain. It only changes drafts, which are verified as usual.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np

from decode.errors import UserError
from decode.hardware import cache_folder
from drafters.hub.untrusted_files import check_link, read_json

FORMAT = 1
META, TOKENS, ORDER = "index.json", "tokens.bin", "order.bin"
DEPTH = 16  # tokens that positions are sorted by: the longest match
SAMPLE = 64  # most positions that are counted for an n-gram
REMEMBERED = 4096  # cached n-grams: the next round looks up many of them again
MAX_TOKENS = 10**9  # tokens of a datastore
BLOCKS, BLOCK = 256, 4096  # number and bytes of the samples of a file that are hashed


def datastore_folder(key: str) -> Path:
    """Folder of the datastore with this hash on this machine."""
    return cache_folder() / "datastores" / key


def token_type(vocab_size: int) -> np.dtype:
    """Big-endian type of token ids: the smallest with room for the separator."""
    return np.dtype(">u2" if vocab_size < 2**16 else ">u4")


def sample_hash(path: Path) -> str:
    """Hash of a file's size and of evenly spaced blocks, which is faster than hashing the whole file."""
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for i in range(BLOCKS):
            file.seek(max(0, size - BLOCK) * i // (BLOCKS - 1))
            found.update(file.read(BLOCK))
    return found.hexdigest()[:16]


class Datastore:
    """An open datastore.

    Args:
        folder: of a finished datastore.
        vocab_size: of the target; other ids are ignored.

    Attributes:
        size: number of tokens, separators included.
        next_tokens: `_next_tokens` with a cache.

    Raises:
        ValueError: the files contradict each other.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._type, self._vocab_size = token_type(vocab_size), vocab_size
        self._separator = int(np.iinfo(self._type).max)
        # Slices of a `mmap` are bytes, which compare like tokens and need no array for each position.
        self._files = [_Mapped(folder / name) for name in (TOKENS, ORDER)]
        self._bytes = self._files[0].bytes
        self._order = memoryview(self._files[1].bytes).cast("I")
        self._tokens = np.frombuffer(self._bytes, self._type)
        self._places = np.frombuffer(self._order, np.uint32)
        self.size = len(self._order)
        if len(self._tokens) != self.size + DEPTH:
            raise ValueError(f"{len(self._tokens)} tokens and {self.size} places")
        self.next_tokens = lru_cache(REMEMBERED)(self._next_tokens)

    @classmethod
    def open(cls, key: str, vocab_size: int) -> Self:
        """Open the datastore with this hash.

        Raises:
            UserError: an invalid key, a missing or damaged datastore, or another vocabulary.
        """
        if not re.fullmatch("[0-9a-f]{16}", key):  # from a checkpoint, which is untrusted
            raise UserError(f"{key[:40]!r} is no key of a datastore")
        folder = datastore_folder(key)
        if not folder.is_dir():
            raise UserError(
                f"its datastore is not on this machine ({folder}); a run with these texts builds it"
            )
        try:
            meta = read_json(folder / META)
            if meta["format"] != FORMAT or meta["key"] != key:
                raise ValueError(f"format {meta['format']}, {meta['key']}")
            for name in (TOKENS, ORDER):
                if not check_link(folder / name).is_file():  # opening a pipe waits for a writer
                    raise ValueError(f"no {name}")
                if sample_hash(folder / name) != meta["samples"][name]:
                    raise ValueError(f"{name} has changed")
            size = int(meta["vocab_size"])
            opened = cls(folder, size)
        except UserError:  # a link, or a file that is too large
            raise
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"{folder}: damaged datastore ({error or type(error).__name__}); remove it, and a run with "
                "drafter.store=<its texts> builds it again"
            ) from None
        if size != vocab_size:
            raise UserError(f"{folder}: its texts are tokens of a vocabulary of {size}, not of {vocab_size}")
        return opened

    def _next_tokens(self, ngram: tuple[int, ...]) -> dict[int, int]:
        """Token -> number of times that it followed an n-gram.

        Counts all occurrences or, if there are more, `SAMPLE` evenly spaced ones of the sorted order.
        """
        for file in self._files:
            file.check()
        pattern = np.array(ngram, self._type).tobytes()
        width, length = self._type.itemsize, len(pattern)
        text = self._bytes

        def at(place: int) -> bytes:
            return text[width * place : width * place + length]

        first = bisect_left(self._order, pattern, key=at)
        if first == self.size or at(self._order[first]) != pattern:
            return {}
        step = 1  # most n-grams are rare: search near the first
        while first + step < self.size and at(self._order[first + step]) == pattern:
            step *= 2
        last = bisect_right(self._order, pattern, first + step // 2, min(first + step, self.size), key=at)
        count = max(last - first, 1)
        chosen = first + np.arange(min(count, SAMPLE)) * count // min(count, SAMPLE)
        places = self._places[chosen].astype(np.int64) + len(ngram)
        found = self._tokens[places[places < len(self._tokens)]]
        return Counter(found[found < self._vocab_size].tolist())  # the separator is no token


class _Mapped:
    """A memory-mapped file, kept open to detect truncation, since reading past its end kills the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        self.bytes = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._size = len(self.bytes)

    def check(self) -> None:
        """Check that the file was not truncated.

        Raises:
            UserError: it was.
        """
        if (size := os.fstat(self._file.fileno()).st_size) < self._size:
            raise UserError(
                f"{self.path}: truncated while in use, {size} of {self._size} bytes are left; remove "
                f"{self.path.parent}, and a run with drafter.store=<its texts> builds it again"
            )
