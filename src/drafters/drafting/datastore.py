"""Texts as a suffix array on disk, memory-mapped: what followed an n-gram (REST, arXiv:2311.08252).

A datastore is a folder named by a hash of its texts and of the tokenizer, in the cache folder of the machine:

    index.json    format, key, bytes of a token, vocabulary, hashes of samples of the files
    tokens.bin    the texts' token ids, big-endian, so that bytes sort as the tokens do; the largest number
                  that fits, `separator`, ends each text, and `DEPTH` more end the file
    order.bin     (n,) uint32, little-endian: all places, sorted by the `DEPTH` tokens from each place on

Processes that open it share its pages. `distill.datastore` makes it. Files are recognised by samples, so
damage elsewhere can remain: it leads to other drafts, which are verified like any, and only to tokens.
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
DEPTH = 16  # tokens by which places are sorted, the most that a match has
SAMPLE = 64  # places that are counted, of an n-gram that has more
REMEMBERED = 4096  # n-grams whose counts are kept: those of a round are looked up again in the next
MOST = 10**9  # tokens of a datastore
BLOCKS, BLOCK = 256, 4096  # number and bytes of the samples that a file is recognised by


def datastore_folder(key: str) -> Path:
    """Where the datastore with a hash is kept on this machine."""
    return cache_folder() / "datastores" / key


def token_type(vocab_size: int) -> np.dtype:
    """Big-endian type of token ids: the smallest that has room for the separator as well."""
    return np.dtype(">u2" if vocab_size < 2**16 else ">u4")


def sample_hash(path: Path) -> str:
    """Hash of a file's size and of blocks of it, evenly spaced: seconds are saved on every start."""
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
        folder: of a finished one.
        vocab_size: of the target; what is no token of it is left out.

    Attributes:
        size: number of tokens, separators included.
        next_tokens: `_next_tokens`, whose newest results are remembered.

    Raises:
        ValueError: the files do not belong together.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._type, self._vocab_size = token_type(vocab_size), vocab_size
        self._separator = int(np.iinfo(self._type).max)
        # Indexing a `mmap` gives bytes, which compare as the tokens do and need no array for each place.
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
        """Open the datastore with a hash.

        Raises:
            UserError: no key, this machine has none, it is damaged, or its tokens are not the target's.
        """
        if not re.fullmatch("[0-9a-f]{16}", key):  # a checkpoint's, which may come from anywhere
            raise UserError(f"{key[:40]!r} is no key of a datastore")
        folder = datastore_folder(key)
        if not folder.is_dir():
            raise UserError(
                f"its datastore is not on this machine ({folder}); a run with these texts makes it here"
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
        except UserError:  # a link, or a description of megabytes
            raise
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"{folder}: damaged datastore ({error or type(error).__name__}); remove it, and a run with "
                "drafter.store=<its texts> makes it again"
            ) from None
        if size != vocab_size:
            raise UserError(f"{folder}: its texts are tokens of a vocabulary of {size}, not of {vocab_size}")
        return opened

    def _next_tokens(self, ngram: tuple[int, ...]) -> dict[int, int]:
        """Token -> how often it followed an n-gram.

        At all of its places or, if there are more, at `SAMPLE` evenly spaced ones of the sorted order.
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
        step = 1  # most n-grams are at few places: look near the first
        while first + step < self.size and at(self._order[first + step]) == pattern:
            step *= 2
        last = bisect_right(self._order, pattern, first + step // 2, min(first + step, self.size), key=at)
        count = max(last - first, 1)
        chosen = first + np.arange(min(count, SAMPLE)) * count // min(count, SAMPLE)
        places = self._places[chosen].astype(np.int64) + len(ngram)
        found = self._tokens[places[places < len(self._tokens)]]
        return Counter(found[found < self._vocab_size].tolist())  # the separator is no token


class _Mapped:
    """A mapped file, kept open: reading what was cut off since would end the process without a word."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        self.bytes = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._size = len(self.bytes)

    def check(self) -> None:
        """Look whether all of it is there.

        Raises:
            UserError: it was cut off.
        """
        if (size := os.fstat(self._file.fileno()).st_size) < self._size:
            raise UserError(
                f"{self.path}: cut off while it was read, {size} of {self._size} bytes are left; remove "
                f"{self.path.parent}, and a run with drafter.store=<its texts> makes it again"
            )
