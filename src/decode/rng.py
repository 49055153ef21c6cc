"""Counter-based random numbers: every draw of the decoder is a pure function of a key.

A draw depends only on (seed, request, sample, purpose, counter, slot, number), not on the row of the
batch or on the number of earlier draws. Rules use the `Coin` protocol, so tests can run them with a coin
that enumerates all outcomes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from decode.errors import UserError
from decode.integers import whole_number
from decode.transfer import HostReadError, upload


class Purpose(IntEnum):
    """Decision that a draw makes. Draws of different purposes never share a key."""

    TARGET = 0  # the target's token at a position: plain decoding and the match rule
    PROPOSE = 1  # the drafter's token
    ACCEPT = 2  # whether a sampled draft token is accepted
    RESIDUAL = 3  # the token after a rejection, or after a fully accepted draft


class Key(NamedTuple):
    """Identifies one draw within a round.

    `slot` counts tokens past the root for TARGET and RESIDUAL, nodes in drafting order for PROPOSE, and
    depths of the tree for ACCEPT. A round uses each key once.
    """

    purpose: Purpose
    slot: int
    number: int = 0  # index among several draws for one slot


# Draws are generated ahead in blocks, because the cost of a NumPy call is mostly overhead.
BLOCK = 32  # slots per block
AHEAD = 8  # counter values (rounds or positions) per block
_BlockKey = tuple[bool, int, int]  # (purpose is TARGET, slot // BLOCK, number)
_NO_TABLE = np.empty(0, np.int64)


class Coin(Protocol):
    """Random decisions for all rows at once; results of rows that are not `active` are ignored."""

    def flip(self, accept: Tensor, proposal: Tensor, key: Key, active: Tensor) -> Tensor:
        """(B,) bool, True with probability min(1, accept / proposal); never if accept is 0."""
        ...

    def draw(self, weights: Tensor, key: Key, active: Tensor) -> Tensor:
        """(B,) indices drawn in proportion to (B, V) unnormalised weights.

        (B, n, V) weights with (B, n) `active` give (B, n) draws, of slots key.slot .. key.slot + n - 1.
        """
        ...


class _Block:
    """Draws generated ahead for counters first .. first + AHEAD - 1 of each row.

    Args:
        first: (B,) lowest counter.
        draws: (B, AHEAD, purposes, BLOCK).
    """

    def __init__(self, first: np.ndarray, draws: np.ndarray) -> None:
        self._first, self._draws = first, draws
        self._rows = np.arange(len(first))

    def covers(self, counter: np.ndarray) -> bool:
        """Whether the block has the draws of all (B,) counters."""
        return bool(((counter >= self._first) & (counter < self._first + np.uint64(AHEAD))).all())

    def at(self, counter: np.ndarray) -> np.ndarray:
        """(B, purposes, BLOCK) draws at (B,) counters."""
        return self._draws[self._rows, (counter - self._first).astype(np.int64)]


_Keys = dict[_BlockKey, None]  # in the order of their first use


class _Shared:
    """State shared by the rounds of a coin.

    Attributes:
        blocks: most recently generated blocks.
        newest: blocks that the newest round used. The next round will probably use them too, so they are
            copied to the device together, before its first draw.
    """

    def __init__(self, newest: _Keys | None = None) -> None:
        self.blocks: dict[_BlockKey, _Block] = {}
        self.newest: _Keys = {} if newest is None else newest

    def without_blocks(self) -> _Shared:
        """A copy without blocks, for other rows."""
        return _Shared(self.newest)


class KeyedCoin:
    """The production coin: Philox-4x32-10 (Salmon et al., SC 2011), 53 bits per draw.

    Args:
        seed: of the whole run.
        requests: (B,) identifier of each row's request: text, or an integer of any type.
        samples: (B,) index of the row among the samples of its request; default 0.

    Raises:
        UserError: a seed, request or sample of another type; not one sample per request.
    """

    def __init__(
        self, seed: int, requests: Sequence[int | str], samples: Sequence[int] | None = None
    ) -> None:
        seed = whole_number(seed, "seed")
        names = [str(r if isinstance(r, str) else whole_number(r, "requests")) for r in requests]
        numbers = [0] * len(names) if samples is None else [whole_number(s, "samples") for s in samples]
        if len(numbers) != len(names):
            raise UserError(f"samples: {len(numbers)} for {len(names)} requests; give one for each")
        digests = [
            hashlib.blake2b(repr((seed, r, s)).encode(), digest_size=8).digest()
            for r, s in zip(names, numbers, strict=True)
        ]
        # Two 32-bit words per row: the Philox key.
        key = np.frombuffer(b"".join(digests), "<u4").reshape(-1, 2).astype(np.uint64)
        zero = np.zeros(len(requests), np.uint64)
        self._set(key, zero, zero, _Shared())

    def _set(self, key: np.ndarray, position: np.ndarray, rounds: np.ndarray, shared: _Shared) -> KeyedCoin:
        self._key, self._position, self._round, self._shared = key, position, rounds, shared
        self._expected: _Keys = shared.newest  # blocks that the previous round used
        self._asked: _Keys = {}
        # (B, purposes, BLOCK) draws of this round
        self._current: dict[tuple[torch.device, _BlockKey], Tensor] = {}
        return self

    def at(self, position: np.ndarray, rounds: np.ndarray) -> KeyedCoin:
        """The coin of another round.

        Args:
            position: (B,) position of the token that follows the root.
            rounds: (B,) verification rounds of each request so far.
        """
        coin = object.__new__(type(self))
        # Draws are functions of their keys, so blocks generated earlier stay valid.
        coin._set(self._key, position.astype(np.uint64), rounds.astype(np.uint64), self._shared)
        self._shared.newest = coin._asked
        return coin

    def select(self, rows: Sequence[int]) -> KeyedCoin:
        """Keep these rows, in this order."""
        index = np.asarray(rows, dtype=np.int64)
        coin = object.__new__(type(self))
        return coin._set(
            self._key[index], self._position[index], self._round[index], self._shared.without_blocks()
        )

    def append(self, other: KeyedCoin) -> KeyedCoin:
        """Append the other coin's rows."""
        coin = object.__new__(type(self))
        return coin._set(
            np.concatenate([self._key, other._key]),
            np.concatenate([self._position, other._position]),
            np.concatenate([self._round, other._round]),
            self._shared.without_blocks(),
        )

    def uniform(self, key: Key) -> np.ndarray:
        """(B,) float64 draws in [0, 1)."""
        return self._uniforms(key, 1, torch.device("cpu"))[:, 0].numpy()

    def carry(self, table: np.ndarray, device: torch.device) -> Tensor:
        """Copy an int64 table to the device in one transfer with this round's probable draws."""
        return self._upload(list(self._expected), device, table)

    @property
    def asked(self) -> list[_BlockKey]:
        """Blocks of draws that this round has used."""
        return list(self._asked)

    def table(self, keys: Sequence[_BlockKey]) -> np.ndarray:
        """(n,) draws of these blocks for this round, as `TableCoin` reads them."""
        return np.concatenate([np.empty(0), *(self._block(key).ravel() for key in keys)])

    def _uniforms(self, key: Key, count: int, device: torch.device) -> Tensor:
        """(B, count) draws of slots key.slot .. key.slot + count - 1."""
        block, place = divmod(key.slot, BLOCK)
        if place + count > BLOCK:  # spans two blocks or more
            first = self._uniforms(key, BLOCK - place, device)
            next_key = key._replace(slot=(block + 1) * BLOCK)
            return torch.cat([first, self._uniforms(next_key, count - first.shape[1], device)], 1)
        is_target = key.purpose == Purpose.TARGET
        block_key = (is_target, block, key.number)
        self._asked[block_key] = None
        if (device, block_key) not in self._current:
            self._upload([*self._expected, block_key], device)
        purpose = 0 if is_target else key.purpose - 1  # TARGET has separate blocks
        return self._current[device, block_key].select(1, purpose).narrow(1, place, count)

    def _upload(
        self, keys: Sequence[_BlockKey], device: torch.device, table: np.ndarray = _NO_TABLE
    ) -> Tensor:
        """Copy blocks that the device does not have yet, and an int64 table; returns the table."""
        keys = [key for key in dict.fromkeys(keys) if (device, key) not in self._current]
        blocks = [self._block(key) for key in keys]  # (B, purposes, BLOCK) each
        # Integers are transferred as bits of floats of the same size.
        parts = [table.view(np.float64).ravel(), *(block.ravel() for block in blocks)]
        head, *draws = upload(np.concatenate(parts), device).split([len(part) for part in parts])
        for key, block, flat in zip(keys, blocks, draws, strict=True):
            self._current[device, key] = flat.view(block.shape)
        return head.view(torch.int64).view(table.shape)

    def _block(self, block_key: _BlockKey) -> np.ndarray:
        """(B, purposes, BLOCK) draws of this round, generated if no block covers them."""
        # Each position is drawn from the target once, so TARGET counts positions. A position may be
        # drafted again after a rejection, so the other purposes count rounds.
        counter = self._position if block_key[0] else self._round
        blocks = self._shared.blocks
        if block_key not in blocks or not blocks[block_key].covers(counter):
            blocks[block_key] = _Block(counter, self._draws(*block_key, counter))
        return blocks[block_key].at(counter)

    def _draws(self, is_target: bool, block: int, number: int, first: np.ndarray) -> np.ndarray:
        """(B, AHEAD, purposes, BLOCK) draws of counters first .. first + AHEAD - 1."""
        slots = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.uint64)
        purposes = [Purpose.TARGET] if is_target else [p for p in Purpose if p != Purpose.TARGET]
        zero = np.zeros((len(first), AHEAD, len(purposes), BLOCK), np.uint64)
        counter = zero + (first[:, None] + np.arange(AHEAD, dtype=np.uint64))[..., None, None]
        # Philox counter: (purpose, position or round, slot, number). A TARGET draw is keyed by the
        # absolute position root + slot, so plain and speculative decoding make the same draws.
        words = philox4x32(
            (
                zero + np.array(purposes, np.uint64)[:, None],
                counter + slots if is_target else counter,
                zero if is_target else zero + slots,
                zero + np.uint64(number),
            ),
            (self._key[:, 0, None, None, None], self._key[:, 1, None, None, None]),
        )
        # 32 bits of the first word and 21 of the second make a 53-bit fraction.
        return ((words[0] << np.uint64(21)) | (words[1] >> np.uint64(11))) * 2.0**-53

    def flip(self, accept: Tensor, proposal: Tensor, key: Key, active: Tensor) -> Tensor:
        """See `Coin.flip`. The comparison is strict, so a token with p = 0 is never accepted."""
        del active
        u = self._uniforms(key, 1, accept.device)[:, 0]
        return u * proposal.double() < accept.double()

    def draw(self, weights: Tensor, key: Key, active: Tensor) -> Tensor:
        """See `Coin.draw`. Inverse CDF in fp64; fp32 cannot represent a long tail."""
        cdf = weights.double().cumsum(-1)  # (B, V) or (B, n, V)
        u = self._uniforms(key, 1 if active.ndim == 1 else active.shape[1], weights.device)  # (B, n)
        u = u.reshape(*active.shape, 1)
        index = torch.searchsorted(cdf, u * cdf[..., -1:], right=True)[..., 0]  # skips weights of 0
        return index.clamp_max(weights.shape[-1] - 1)


class TableCoin(KeyedCoin):
    """Draws of one round that are on the device; other draws are refused.

    Args:
        keys: blocks of the table.
        table: (n,) float64; see `KeyedCoin.table`.
        rows: B.
    """

    def __init__(self, keys: Sequence[_BlockKey], table: Tensor, rows: int) -> None:
        sizes = [rows * (1 if is_target else len(Purpose) - 1) * BLOCK for is_target, _, _ in keys]
        parts = table.split(sizes) if sizes else ()
        self._expected, self._asked = {}, {}
        self._current = {
            (table.device, key): part.view(rows, -1, BLOCK) for key, part in zip(keys, parts, strict=True)
        }

    @override
    def _upload(
        self, keys: Sequence[_BlockKey], device: torch.device, table: np.ndarray = _NO_TABLE
    ) -> Tensor:
        raise HostReadError("a drafter or rule uploads numbers within a round")


_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(
    counter: Sequence[np.ndarray], key: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ten rounds of Philox-4x32 on arrays of 32-bit words, stored as uint64 so products do not overflow."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (b >> _SHIFT) ^ c1 ^ k0, b & _LOW, (a >> _SHIFT) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def to_device(values: Sequence[Any], device: torch.device, coin: Coin | None = None) -> Tensor:
    """Copy integers to the device, for a draft in one transfer with the draws that its round will make.

    Args:
        values: nested lists of equal lengths.
        device: target device.
        coin: coin of the round.
    """
    table = np.array(values, np.int64)
    return coin.carry(table, device) if isinstance(coin, KeyedCoin) else upload(table, device)
