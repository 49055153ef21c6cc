"""Counts of the tokens after every n-gram of past texts, as sorted arrays of hashes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from decode.draft import PAD

KEPT = 16  # most frequent next tokens kept for an n-gram
MASK = 2**64 - 1
# Odd, so that the hash depends on every token. Collisions only make drafts worse.
MULTIPLIER = 0x9E3779B97F4A7C15


class Following(NamedTuple):
    """The tokens that followed an n-gram."""

    tokens: Sequence[int]  # the most frequent first
    counts: Sequence[int]
    total: int  # occurrences, including tokens that are not kept
    distinct: int  # different tokens


class _Order(NamedTuple):
    """The m n-grams of one length, with k kept tokens in total."""

    hashes: np.ndarray  # (m,) uint64, ascending
    starts: np.ndarray  # (m + 1,) into tokens and counts
    totals: np.ndarray  # (m,)
    distinct: np.ndarray  # (m,)
    tokens: np.ndarray  # (k,)
    counts: np.ndarray  # (k,)


class NgramCounts:
    """Counts of the tokens after n-grams of several lengths.

    Args:
        tokens: (n,) texts, each followed by `PAD`; no n-gram spans a `PAD`.
        orders: lengths of n-grams.
    """

    def __init__(self, tokens: np.ndarray, orders: Sequence[int]) -> None:
        self._orders = {n: _count(tokens, n) for n in orders}

    def after(self, n: int, hashed: int) -> Following | None:
        """The tokens after the n-gram with this hash; None if it never occurred."""
        order = self._orders[n]
        at = bisect_left(order.hashes.data, hashed)
        if at == len(order.hashes) or order.hashes.data[at] != hashed:
            return None
        kept = slice(order.starts.data[at], order.starts.data[at + 1])
        tokens, counts = order.tokens.data[kept].tolist(), order.counts.data[kept].tolist()
        return Following(tokens, counts, order.totals.data[at], order.distinct.data[at])


def hashes(newest: Sequence[int], orders: Sequence[int]) -> list[int]:
    """Hashes of the last n tokens, for each n of `orders` up to the number of tokens; n ascending."""
    found, value, power, want = [], 0, 1, set(orders)
    for n, token in enumerate(reversed(newest), 1):
        value = (value + (token + 1) * power) & MASK
        power = (power * MULTIPLIER) & MASK
        if n in want:
            found.append(value)
    return found


def _count(tokens: np.ndarray, n: int) -> _Order:
    """Count the tokens after each n-gram, by the hash of its n tokens (see `hashes`)."""
    size = max(len(tokens) - n, 0)
    next_token, value = tokens[n:].astype(np.int64), np.zeros(size, np.uint64)
    whole, power = next_token != PAD, 1
    for back in range(1, n + 1):
        before = tokens[n - back : n - back + size].astype(np.int64)
        whole &= before != PAD
        value += (before + 1).astype(np.uint64) * np.uint64(power)  # modulo 2^64
        power = (power * MULTIPLIER) & MASK
    value, next_token = value[whole], next_token[whole]
    by_pair = np.lexsort((next_token, value))
    value, next_token = value[by_pair], next_token[by_pair]
    first = _run_starts(value, next_token)  # of equal pairs
    counts = np.diff(first, append=len(value))
    value, next_token = value[first], next_token[first]
    by_count = np.lexsort((-counts, value))
    value, next_token, counts = value[by_count], next_token[by_count], counts[by_count]
    first = _run_starts(value)  # of n-grams
    distinct = np.diff(first, append=len(value))
    totals = np.add.reduceat(counts, first) if len(first) else counts
    kept = np.arange(len(value)) - np.repeat(first, distinct) < KEPT
    starts = np.concatenate([[0], np.minimum(distinct, KEPT).cumsum()])
    small = (starts, totals, distinct, next_token[kept], counts[kept])
    return _Order(value[first], *(part.astype(np.int32) for part in small))


def _run_starts(*columns: np.ndarray) -> np.ndarray:
    """Indices at which one of the sorted columns changes, 0 included."""
    changed = np.zeros(len(columns[0]), bool)
    changed[:1] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return changed.nonzero()[0]
