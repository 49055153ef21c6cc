"""Every random decision of the decoder, as a pure function of a key.

A draw depends on (seed, request, sample number, purpose, counter, slot, index) and on nothing
else: not on the batch slot, not on how many draws came before. Rules are written against the
`Coin` protocol, so that tests run the production rules with a coin that enumerates every
outcome instead of tossing one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


class Purpose(IntEnum):
    """What a draw decides. Different purposes never share a key."""

    TARGET = 0  # the target's own token at a position: plain decoding and the match rule
    PROPOSE = 1  # the drafter's token
    ACCEPT = 2  # whether a sampled draft token stands
    RESIDUAL = 3  # the token after a rejection, or after a draft accepted whole


class Key(NamedTuple):
    """Which decision: TARGET and RESIDUAL count slots in tokens past the root, PROPOSE in nodes as
    they are grown, ACCEPT in steps of the rule's walk; a round visits each of them once."""

    purpose: Purpose
    slot: int
    number: int = 0  # of several draws for one slot


BLOCK = 32  # slots whose draws are made together
AHEAD = 8  # rounds for which they are, for all purposes: the generator is mostly overhead
_Page = tuple[bool, int, int]  # whether the target's, slot block, number


class Coin(Protocol):
    """Tosses for all rows at once; entries that are not `active` are never read."""

    def flip(self, accept: Tensor, proposal: Tensor, key: Key, active: Tensor) -> Tensor:
        """(B,) bool, True with probability min(1, accept / proposal); never if accept is 0."""
        ...

    def draw(self, weights: Tensor, key: Key, active: Tensor) -> Tensor:
        """(B,) index drawn in proportion to (B, V) unnormalised weights.

        With (B, n, V) weights and (B, n) `active`, n draws: slots key.slot .. key.slot + n - 1.
        """
        ...


class _Made:
    """Draws made ahead.

    Args:
        first: (B,) counter of the first.
        draws: (B, AHEAD, purposes, BLOCK).
    """

    def __init__(self, first: np.ndarray, draws: np.ndarray) -> None:
        self._first, self._draws = first, draws
        self._rows = np.arange(len(first))

    def covers(self, counter: np.ndarray) -> bool:
        """Whether all rows' counters are among those that were made."""
        return bool(((counter >= self._first) & (counter < self._first + np.uint64(AHEAD))).all())

    def look(self, counter: np.ndarray) -> np.ndarray:
        """(B, purposes, BLOCK) draws at (B,) counters."""
        return self._draws[self._rows, (counter - self._first).astype(np.int64)]


class KeyedCoin:
    """The production coin: Philox-4x32-10 (Salmon et al., SC 2011), 53 bits a draw.

    Args:
        seed: of the whole run.
        requests: (B,) identifier of each row's request.
        samples: (B,) which sample of that request the row is; 0 where omitted.
    """

    def __init__(
        self, seed: int, requests: Sequence[int | str], samples: Sequence[int] | None = None
    ) -> None:
        samples = [0] * len(requests) if samples is None else samples
        digests = [
            hashlib.blake2b(repr((seed, str(r), s)).encode(), digest_size=8).digest()
            for r, s in zip(requests, samples, strict=True)
        ]
        key = np.frombuffer(b"".join(digests), "<u4").reshape(-1, 2).astype(np.uint64)
        zero = np.zeros(len(requests), np.uint64)
        self._set(key, zero, zero, {})

    def _set(
        self, key: np.ndarray, position: np.ndarray, rounds: np.ndarray, pages: dict[_Page, _Made]
    ) -> KeyedCoin:
        self._key, self._position, self._round, self._pages = key, position, rounds, pages
        self._now: dict[_Page, np.ndarray] = {}  # (B, purposes, BLOCK) of this round
        return self

    def at(self, position: np.ndarray, rounds: np.ndarray) -> KeyedCoin:
        """The same coin in a later round.

        Args:
            position: (B,) position of the token that follows the root.
            rounds: (B,) verification rounds that each request has had.
        """
        coin = object.__new__(KeyedCoin)
        # Draws are functions of their keys, so those of later rounds may be there already.
        return coin._set(self._key, position.astype(np.uint64), rounds.astype(np.uint64), self._pages)

    def select(self, rows: Sequence[int]) -> KeyedCoin:
        """Keep these rows, in this order."""
        index = np.asarray(rows, dtype=np.int64)
        coin = object.__new__(KeyedCoin)
        return coin._set(self._key[index], self._position[index], self._round[index], {})

    def uniform(self, key: Key) -> np.ndarray:
        """(B,) float64 in [0, 1)."""
        return self._uniforms(key, 1)[:, 0]

    def _uniforms(self, key: Key, count: int) -> np.ndarray:
        """(B, count) draws of the slots from `key.slot` on."""
        block, place = divmod(key.slot, BLOCK)
        if place + count > BLOCK:
            first = self._uniforms(key, BLOCK - place)
            rest = self._uniforms(key._replace(slot=(block + 1) * BLOCK), count - first.shape[1])
            return np.concatenate([first, rest], 1)
        drawn = key.purpose == Purpose.TARGET
        page = (drawn, block, key.number)
        if page not in self._now:
            self._now[page] = self._turn_to(page)
        purpose = 0 if drawn else key.purpose - 1
        return self._now[page][:, purpose, place : place + count]

    def _turn_to(self, page: _Page) -> np.ndarray:
        """(B, purposes, BLOCK) draws of this round."""
        # A position is drawn and emitted once, so the target's draws count positions. A position is
        # drafted again after a rejection, so all others count the request's rounds.
        counter = self._position if page[0] else self._round
        if page not in self._pages or not self._pages[page].covers(counter):
            self._pages[page] = _Made(counter, self._draws(*page, counter))
        return self._pages[page].look(counter)

    def _draws(self, drawn: bool, block: int, number: int, first: np.ndarray) -> np.ndarray:
        """(B, AHEAD, purposes, BLOCK) draws of the counters from (B,) `first` on, in one pass."""
        slots = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.uint64)
        purposes = [Purpose.TARGET] if drawn else [p for p in Purpose if p != Purpose.TARGET]
        zero = np.zeros((len(first), AHEAD, len(purposes), BLOCK), np.uint64)
        counter = zero + (first[:, None] + np.arange(AHEAD, dtype=np.uint64))[..., None, None]
        words = philox4x32(
            (
                zero + np.array(purposes, np.uint64)[:, None],
                counter + slots if drawn else counter,
                zero if drawn else zero + slots,
                zero + np.uint64(number),
            ),
            (self._key[:, 0, None, None, None], self._key[:, 1, None, None, None]),
        )
        return ((words[0] << np.uint64(21)) | (words[1] >> np.uint64(11))) * 2.0**-53

    def flip(self, accept: Tensor, proposal: Tensor, key: Key, active: Tensor) -> Tensor:
        """See `Coin.flip`. Strict, so that a token of no mass is never accepted."""
        del active
        u = torch.from_numpy(self.uniform(key)).to(accept.device)
        return u * proposal.double() < accept.double()

    def draw(self, weights: Tensor, key: Key, active: Tensor) -> Tensor:
        """See `Coin.draw`. Inverse CDF in fp64: in fp32 a long tail is unreachable."""
        cdf = weights.double().cumsum(-1)  # (B, V) or (B, n, V)
        u = self._uniforms(key, 1 if active.ndim == 1 else active.shape[1])  # (B, n)
        u = torch.from_numpy(u).to(weights.device).view(*active.shape, 1)
        index = torch.searchsorted(cdf, u * cdf[..., -1:], right=True)[..., 0]
        return index.clamp_max(weights.shape[-1] - 1)


_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(
    counter: Sequence[np.ndarray], key: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ten rounds of Philox-4x32 on arrays of 32-bit words held in uint64."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (b >> _SHIFT) ^ c1 ^ k0, b & _LOW, (a >> _SHIFT) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3
