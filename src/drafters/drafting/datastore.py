"""Texts as a suffix array on disk, memory-mapped: what followed an n-gram (REST, arXiv:2311.08252).

A datastore is a folder named by a hash of its texts and of the tokenizer, in the cache folder of the machine:

    index.json    format, key, bytes of a token, vocabulary, hashes of samples of the files
    tokens.bin    the texts' token ids, big-endian, so that bytes sort as the tokens do; the largest number
                  that fits, `separator`, ends each text, and `DEPTH` more end the file
    order.bin     (n,) uint32, little-endian: all places, sorted by the `DEPTH` tokens from each place on

Processes that open it share its pages. `distill.datastore` makes it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np

from decode.errors import UserError
from decode.hardware import cache_folder

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
        token_bytes: of a token on file.

    Attributes:
        size: number of tokens, separators included.
        next_tokens: `_next_tokens`, whose newest results are remembered.

    Raises:
        ValueError: the files do not belong together.
    """

    def __init__(self, folder: Path, token_bytes: int) -> None:
        self._type = np.dtype(f">u{token_bytes}")
        self._separator = int(np.iinfo(self._type).max)
        # Indexing a `mmap` gives bytes, which compare as the tokens do and need no array for each place.
        self._bytes = _mapped(folder / TOKENS)
        self._order = memoryview(_mapped(folder / ORDER)).cast("I")
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
            meta = json.loads((folder / META).read_text())
            if meta["format"] != FORMAT or meta["key"] != key:
                raise ValueError(f"format {meta['format']}, {meta['key']}")
            for name in (TOKENS, ORDER):
                if sample_hash(folder / name) != meta["samples"][name]:
                    raise ValueError(f"{name} has changed")
            size = meta["vocab_size"]
            opened = cls(folder, meta["token_bytes"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"{folder}: damaged datastore ({error or type(error).__name__}); remove it, and a run with "
                "drafter.store=<its texts> makes it anew"
            ) from None
        if size != vocab_size:
            raise UserError(f"{folder}: its texts are tokens of a vocabulary of {size}, not of {vocab_size}")
        return opened

    def _next_tokens(self, ngram: tuple[int, ...]) -> dict[int, int]:
        """Token -> how often it followed an n-gram.

        At all of its places or, if there are more, at `SAMPLE` evenly spaced ones of the sorted order.
        """
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
        count = last - first
        chosen = first + np.arange(min(count, SAMPLE)) * count // min(count, SAMPLE)
        places = self._places[chosen].astype(np.int64) + len(ngram)
        counts = Counter(self._tokens[places].tolist())
        del counts[self._separator]
        return counts


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
