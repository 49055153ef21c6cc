"""Whether a copy of a weight may stand for it in decoding, and whether the weight has changed since.

torch counts most changes in place, but not those through `.data`. So every weight that a copy was made from
is watched by a checksum of its bits. `notice_changes` compares it at the beginning of every text, in
`CausalLM.start`: all words of these weights are read once, which takes a few passes over one token at most.
A change through `.data` in the middle of a text is seen at the beginning of the next one.
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
    """What differs once a weight was replaced, moved or written to."""

    serial: int  # of the tensor and its content
    pointer: int
    version: int


class _Watched:
    """A weight that a copy was made from."""

    def __init__(self, weight: Tensor) -> None:
        key = id(weight)
        self.weight = weakref.ref(weight, lambda _: _WATCHED.pop(key, None))
        self.take(weight, bit_checksum(weight))

    def take(self, weight: Tensor, content: Tensor) -> None:
        """Remember a content; copies made before are no longer of this weight."""
        self.content, self.serial, self.seen = content, next(_SERIAL), counted(weight)


_WATCHED: dict[int, _Watched] = {}  # by id of the weight


def is_frozen(weight: Tensor) -> bool:
    """Whether a weight needs no gradient and shows changes."""
    # Other kinds of tensors are views made in every call, or sharded, or hide their changes.
    return type(weight) is nn.Parameter and not weight.requires_grad and not weight.is_inference()


def may_copy(weight: Tensor) -> bool:
    """Whether decoding may keep a copy of this weight."""
    return is_frozen(weight) and torch.is_inference_mode_enabled()


def weight_state(weight: Tensor) -> WeightState:
    """State of a weight, to be kept with a copy of it; from its first call on the weight is watched."""
    watched = _WATCHED.get(id(weight))
    if watched is None or watched.weight() is not weight:
        watched = _WATCHED[id(weight)] = _Watched(weight)
    return WeightState(watched.serial, *counted(weight))


def notice_changes() -> None:
    """Compare all watched weights with what they were; copies of those that changed are made again."""
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
    for group in same.values():  # one wait for each device
        before, after = (
            torch.stack(parts) for parts in ([w.content for w, *_ in group], [c for *_, c in group])
        )
        for (watched, weight, content), changed in zip(group, (before != after).tolist(), strict=True):
            if changed:
                watched.take(weight, content)


def counted(weight: Tensor) -> tuple[int, int]:
    """What torch itself tells of changes."""
    # private API: torch has no public way to ask whether a tensor was changed in place. Inference tensors
    # have no count of changes.
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version
