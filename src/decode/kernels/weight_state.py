"""Whether decoding may use a copy of a weight, and whether the weight has changed since.

torch counts most in-place changes, but not those through `.data`. So every copied weight is watched by a
checksum of its bits. `notice_changes` compares it at the start of every text, in `CausalLM.start`. This
reads all words of these weights once, which costs at most a few passes over one token. A change through
`.data` in the middle of a text is noticed at the start of the next one.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn

from decode.kernels.checksum import bit_checksum

_SERIAL = count(1)


class WeightState(NamedTuple):
    """A value that changes when a weight is replaced, moved or written to."""

    serial: int  # of the tensor and its content
    pointer: int
    version: int


class _Watched:
    """A weight with copies."""

    def __init__(self, weight: Tensor) -> None:
        key = id(weight)
        self.weight = weakref.ref(weight, lambda _: _WATCHED.pop(key, None))
        self.take(weight, bit_checksum(weight))

    def take(self, weight: Tensor, content: Tensor) -> None:
        """Record new content, which invalidates earlier copies."""
        self.content, self.serial, self.seen = content, next(_SERIAL), counted(weight)


_WATCHED: dict[int, _Watched] = {}  # by id of the weight


def is_frozen(weight: Tensor) -> bool:
    """Whether a weight needs no gradient and its changes can be detected."""
    # Other kinds of tensors are new views in every call, or sharded, or hide their changes.
    return type(weight) is nn.Parameter and not weight.requires_grad and not weight.is_inference()


def may_copy(weight: Tensor) -> bool:
    """Whether decoding may keep a copy of this weight."""
    return is_frozen(weight) and torch.is_inference_mode_enabled()


def weight_state(weight: Tensor) -> WeightState:
    """State of a weight, to store with a copy; watches the weight from the first call on."""
    watched = _WATCHED.get(id(weight))
    if watched is None or watched.weight() is not weight:
        watched = _WATCHED[id(weight)] = _Watched(weight)
    return WeightState(watched.serial, *counted(weight))


def current_state(weight: Tensor) -> WeightState:
    """State of a weight, without watching it: the serial is 0 if nothing was copied from it."""
    watched = _WATCHED.get(id(weight))
    serial = 0 if watched is None or watched.weight() is not weight else watched.serial
    return WeightState(serial, *counted(weight))


def notice_changes() -> None:
    """Compare all watched weights with their recorded checksums; copies of changed ones are rebuilt."""
    same: dict[torch.device, list[tuple[_Watched, Tensor, Tensor]]] = {}
    for watched in list(_WATCHED.values()):
        weight = watched.weight()
        if weight is None or weight.is_meta:
            continue
        content = bit_checksum(weight)
        if watched.seen != counted(weight) or watched.content.device != content.device:
            watched.take(weight, content)
        else:
            same.setdefault(content.device, []).append((watched, weight, content))
    for group in same.values():  # one synchronisation per device
        before, after = (
            torch.stack(parts) for parts in ([w.content for w, *_ in group], [c for *_, c in group])
        )
        for (watched, weight, content), changed in zip(group, (before != after).tolist(), strict=True):
            if changed:
                watched.take(weight, content)


def counted(weight: Tensor) -> tuple[int, int]:
    """Data pointer and version of a weight, by which torch shows most changes."""
    # private API: torch has no public way to ask whether a tensor was changed in place. Inference tensors
    # have no count of changes.
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version
