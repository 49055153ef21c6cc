"""Numbers known to both host and device, and copies to the device without synchronisation."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

Key = TypeVar("Key", bound=Hashable)


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device; from pinned memory, so that the host does not wait."""
    host = torch.from_numpy(values)
    if device.type == "cuda":
        host = host.pin_memory()  # freed by torch once the copy is done
    return host.to(device, non_blocking=True)


def upload_together(values: Mapping[Key, Tensor], device: torch.device) -> dict[Key, Tensor]:
    """Copy tensors of the host to a device in one copy; for a CPU they are returned as they are."""
    if device.type == "cpu" or not values:
        return dict(values)
    # Widest numbers first, so that each tensor begins at a multiple of its own width.
    keys = sorted(values, key=lambda key: -values[key].itemsize)
    parts = [values[key].contiguous().flatten().view(torch.uint8) for key in keys]
    sent = upload(torch.cat(parts).numpy(), device).split([len(part) for part in parts])
    named = zip(keys, sent, strict=True)
    return {key: part.view(values[key].dtype).view(values[key].shape) for key, part in named}


class RowInts(list[int]):
    """An integer per row, with a copy on the device; must not be changed in place.

    Arithmetic runs on both, so that only the initial numbers are uploaded.

    Args:
        values: (B,) on the host.
        copy: (B,) the same on a device; None: uploaded when needed.
    """

    def __init__(self, values: Sequence[int], copy: Tensor | None = None) -> None:
        super().__init__(values)
        self._copy = copy

    @classmethod
    def of(cls, values: Sequence[int]) -> RowInts:
        """Convert values; unchanged if they are `RowInts`."""
        return values if isinstance(values, RowInts) else RowInts(values)

    def on(self, device: torch.device) -> Tensor:
        """(B,) tensor on the device; must not be changed in place."""
        if self._copy is None:
            self._copy = upload(np.array(self, np.int64), device)
        return self._copy if self._copy.device == device else self._copy.to(device)

    def plus(self, other: Sequence[int] | int) -> RowInts:
        """Sums by row; uploaded again if `other` is not on the device."""
        if isinstance(other, int):
            return RowInts([a + other for a in self], None if self._copy is None else self._copy + other)
        copy = None
        if self._copy is not None and isinstance(other, RowInts) and other._copy is not None:
            copy = self._copy + other.on(self._copy.device)
        return RowInts([a + b for a, b in zip(self, other, strict=True)], copy)

    def negative(self) -> RowInts:
        """The negated numbers."""
        return RowInts([-a for a in self], None if self._copy is None else -self._copy)

    def select(self, rows: Sequence[int]) -> RowInts:
        """These rows, in this order."""
        return RowInts([self[r] for r in rows], self._select_copy(rows))

    def joined(self, other: RowInts) -> RowInts:
        """These rows followed by the other ones."""
        copies = [self._copy, other._copy]
        copy = None if None in copies else torch.cat([part for part in copies if part is not None])
        return RowInts([*self, *other], copy)

    def _select_copy(self, rows: Sequence[int]) -> Tensor | None:
        return None if self._copy is None else self._copy[RowInts.of(rows).on(self._copy.device)]


class Settled(RowInts):
    """Number of tokens that each row settled, and other results of the round, for drafters.

    Args:
        values: (B,) as in `RowInts`.
        copy: as in `RowInts`.
        texts: new tokens of each row's text, with the new root and without the old one.
        draft_lengths: (B,) of the round's draft; empty after the prefill.
    """

    def __init__(
        self,
        values: Sequence[int],
        copy: Tensor | None,
        texts: Sequence[Sequence[int]],
        draft_lengths: Sequence[int],
    ) -> None:
        super().__init__(values, copy)
        self.texts, self.draft_lengths = texts, draft_lengths

    def select(self, rows: Sequence[int]) -> Self:
        """These rows, in this order."""
        lengths = [self.draft_lengths[r] for r in rows] if self.draft_lengths else ()
        texts = [self.texts[r] for r in rows]
        return type(self)([self[r] for r in rows], self._select_copy(rows), texts, lengths)


_fixed = ContextVar("fixed", default=False)


@contextmanager
def device_only() -> Iterator[None]:
    """Code in this context reads nothing from the device, so that a graph can repeat it."""
    token = _fixed.set(True)
    try:
        yield
    finally:
        _fixed.reset(token)


def on_device_only() -> bool:
    """Whether the caller must not read the device, not even to leave a loop early."""
    return _fixed.get()


class DeviceInts(RowInts):
    """An integer per row that only the device knows; code that asks the host for them fails.

    Args:
        copy: (B,) on the device.
    """

    def __init__(self, copy: Tensor) -> None:
        super().__init__((), copy)

    @override
    def on(self, device: torch.device) -> Tensor:
        assert self._copy is not None
        return self._copy if self._copy.device == device else self._copy.to(device)

    @override
    def plus(self, other: Sequence[int] | int) -> DeviceInts:
        assert self._copy is not None
        more = other if isinstance(other, int) else RowInts.of(other).on(self._copy.device)
        return DeviceInts(self._copy + more)

    @override
    def negative(self) -> DeviceInts:
        assert self._copy is not None
        return DeviceInts(-self._copy)

    def _refuse(self, *_: object) -> Any:
        raise HostReadError("the host asked for a number that only the device knows")

    __iter__ = __len__ = __getitem__ = __eq__ = __ne__ = __lt__ = __contains__ = __bool__ = _refuse
    __hash__ = None

    @override
    def select(self, rows: Sequence[int]) -> RowInts:
        return self._refuse(rows)

    @override
    def joined(self, other: RowInts) -> RowInts:
        return self._refuse(other)


class HostReadError(RuntimeError):
    """Code that must not read the device asked for a result."""


def new_tokens(tokens: Tensor, counts: Sequence[int], root: Tensor, first: bool) -> Sequence[Sequence[int]]:
    """New tokens of each row's text, with the new root and without the old one.

    Args:
        tokens: (B, M) as in `Proposer.advance`, like `counts` and `root`.
        counts: if it is a `Settled`, its `texts` are returned; otherwise tokens are read from the device.
        root: (B,).
        first: whether nothing was settled before; otherwise tokens[:, 0] are the old roots.
    """
    if isinstance(counts, Settled):
        return counts.texts
    rows = zip(tokens.tolist(), counts, root.tolist(), strict=True)
    return [[*row[0 if first else 1 : n], end] for row, n, end in rows]
