"""Sort the places of a text by the tokens that start there, in pieces: the data may exceed memory.

Places are distributed by their next 8 bytes into buckets of about `BUCKET` places; the bounds are quantiles
of a sample. Each bucket is sorted by these bytes, and ties repeatedly by the next 4 bytes. After `depth`
tokens, ties are broken by place, so the order depends only on the text. (pydivsufsort 0.0.20 sorts whole
suffixes, all in memory.)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

BUCKET = 2**23  # places sorted at once, at about 40 bytes each
SAMPLES = 2**16  # sampled places that determine the bounds of buckets
KEY = 8  # bytes of the first comparison
PART = 4  # bytes of each comparison of ties


def sort_places(text: np.ndarray, order: np.ndarray, depth: int, bucket: int = BUCKET) -> Iterator[int]:
    """Write all places of a text into `order`, sorted; yields the size of each finished bucket.

    Args:
        text: (n + depth,) big-endian unsigned tokens; the last `depth` are fill.
        order: (n,) uint32, written piece by piece.
        depth: in tokens; at least 8 bytes.
        bucket: places per bucket.
    """
    keys = _keys(text, KEY)[: len(order)]
    bounds = _bounds(keys, max(1, -(-len(order) // bucket)))
    starts = _distribute(keys, bounds, order, bucket)
    for start, end in pairwise(starts.tolist()):
        if start < end:
            order[start:end] = _sorted(text, order[start:end].astype(np.int64), depth)
            yield end - start


def _keys(text: np.ndarray, size: int) -> np.ndarray:
    """The next `size` bytes from every place as one number; numbers sort like tokens."""
    width = text.itemsize
    return np.ndarray((len(text) - size // width + 1,), f">u{size}", text, strides=(width,))


def _bounds(keys: np.ndarray, buckets: int) -> np.ndarray:
    """(at most buckets - 1,) keys that divide the places into parts of similar size."""
    if buckets == 1:
        return np.empty(0, np.uint64)
    sample = np.sort(keys[:: max(1, len(keys) // SAMPLES)].astype(np.uint64))
    return np.unique(sample[np.arange(1, buckets) * len(sample) // buckets])


def _distribute(keys: np.ndarray, bounds: np.ndarray, order: np.ndarray, chunk: int) -> np.ndarray:
    """Write every place into its bucket's part of `order`; returns the (buckets + 1,) starts."""
    pieces = [slice(start, min(start + chunk, len(keys))) for start in range(0, len(keys), chunk)]

    def buckets_of(piece: slice) -> np.ndarray:
        return np.searchsorted(bounds, keys[piece].astype(np.uint64), "right").astype(np.uint16)

    counts = np.zeros(len(bounds) + 1, np.int64)
    for piece in pieces:
        counts += np.bincount(buckets_of(piece), minlength=len(counts))
    starts = np.concatenate([[0], counts.cumsum()])
    free = starts[:-1].copy()
    for piece in pieces:
        buckets = buckets_of(piece)
        places = np.argsort(buckets, kind="stable").astype(np.uint32) + np.uint32(piece.start)
        end = 0
        for bucket, count in enumerate(np.bincount(buckets, minlength=len(counts))):
            order[free[bucket] : free[bucket] + count] = places[end : end + count]
            free[bucket] += count
            end += count
    return starts


def _sorted(text: np.ndarray, places: np.ndarray, depth: int) -> np.ndarray:
    """The places of one bucket, sorted by `depth` tokens, then by place."""
    key = _keys(text, KEY)[places].astype(np.uint64)
    by_key = np.argsort(key)
    places, tied, group = places[by_key], *_ties(key[by_key], np.arange(len(places)))
    rest = _keys(text, PART)
    for offset in (*range(KEY // text.itemsize, depth, PART // text.itemsize), None):
        if not len(tied):
            break
        here = places[tied]
        key = group << np.uint64(32) | (here if offset is None else rest[here + offset]).astype(np.uint64)
        by_key = np.argsort(key)
        places[tied] = here[by_key]
        tied, group = _ties(key[by_key], tied)
    return places


def _ties(keys: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices with non-unique keys (keys ascending), and the group number of each."""
    new = np.append(True, keys[1:] != keys[:-1])  # first of its group
    tied = ~(new & np.append(new[1:], True))
    return indices[tied], new.cumsum()[tied].astype(np.uint64)
