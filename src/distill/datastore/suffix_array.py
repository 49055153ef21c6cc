"""Sort the places of a text by the tokens from each place on, in pieces: what is sorted may exceed memory.

Places are first distributed by their next 8 bytes into buckets of about `BUCKET` places, whose bounds are
quantiles of a sample. Each bucket is then sorted by itself: by these bytes and, where some are tied, by the
next 4, again and again. Beyond `depth` tokens ties are broken by place, so the order is a function of the
text alone. (pydivsufsort 0.0.20 sorts to the ends of the suffixes and needs all of them in memory.)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

BUCKET = 2**23  # places that are sorted at once, at about 40 bytes each
SAMPLES = 2**16  # places that choose the bounds of buckets
KEY = 8  # bytes that places are compared by first
PART = 4  # bytes that tied ones are compared by, again and again


def sort_places(text: np.ndarray, order: np.ndarray, depth: int, bucket: int = BUCKET) -> Iterator[int]:
    """Write all places of a text into `order`, sorted; yields after each bucket how many places it had.

    Args:
        text: (n + depth,) big-endian unsigned tokens, the last `depth` of them fill.
        order: (n,) uint32, written piece by piece.
        depth: in tokens; at least 8 bytes.
        bucket: places of one.
    """
    keys = _keys(text, KEY)[: len(order)]
    bounds = _bounds(keys, max(1, -(-len(order) // bucket)))
    starts = _distribute(keys, bounds, order, bucket)
    for start, end in pairwise(starts.tolist()):
        if start < end:
            order[start:end] = _sorted(text, order[start:end].astype(np.int64), depth)
            yield end - start


def _keys(text: np.ndarray, size: int) -> np.ndarray:
    """The next `size` bytes from every place on, as one number that sorts as the tokens do."""
    width = text.itemsize
    return np.ndarray((len(text) - size // width + 1,), f">u{size}", text, strides=(width,))


def _bounds(keys: np.ndarray, buckets: int) -> np.ndarray:
    """(buckets - 1 or fewer,) keys that divide the places into parts of about one size."""
    if buckets == 1:
        return np.empty(0, np.uint64)
    sample = np.sort(keys[:: max(1, len(keys) // SAMPLES)].astype(np.uint64))
    return np.unique(sample[np.arange(1, buckets) * len(sample) // buckets])


def _distribute(keys: np.ndarray, bounds: np.ndarray, order: np.ndarray, chunk: int) -> np.ndarray:
    """Write every place into the part of `order` that belongs to its bucket; (buckets + 1,) their starts."""
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
    """The indices whose keys, in ascending order, are not unique, and the number of each one's group."""
    new = np.append(True, keys[1:] != keys[:-1])  # first of its group
    tied = ~(new & np.append(new[1:], True))
    return indices[tied], new.cumsum()[tied].astype(np.uint64)
