"""How a fixed round is run: traced, and on a GPU recorded as a graph."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from decode.generation.capture.round import FixedRound, RoundResult
from decode.generation.capture.trace import trace
from decode.model.target import Target

WARM_UPS = 2  # runs before a recording, so that libraries have made their workspaces
MOST = 16  # captured rounds that a target keeps


@dataclass(eq=False)
class CapturedRound:
    """A fixed round and the function that runs it over its buffers.

    Attributes:
        owner: the loop whose texts are in the buffers.
    """

    round: FixedRound
    run: Callable[[], RoundResult]
    owner: object = None


Maker = Callable[[FixedRound], Callable[[], RoundResult]]


class Key(NamedTuple):
    """What a captured round depends on."""

    drafter: Any
    weights: Hashable  # of the target and the drafter
    others: Hashable
    rows: int


def traced(fixed: FixedRound) -> Callable[[], RoundResult]:
    """Run the traced operations one by one: what a graph would repeat, on any device."""
    buffers = fixed.buffers
    module = trace(fixed, buffers)
    return lambda: RoundResult(*module(*buffers))


def graphed(fixed: FixedRound) -> Callable[[], RoundResult]:
    """Record the traced operations as a CUDA graph, and replay it."""
    buffers = fixed.buffers
    module, before = trace(fixed, buffers), [part.clone() for part in buffers]
    stream = torch.cuda.Stream(buffers[0].device)
    stream.wait_stream(torch.cuda.current_stream(buffers[0].device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            module(*buffers)
    torch.cuda.current_stream(buffers[0].device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = RoundResult(*module(*buffers))
    for buffer, old in zip(buffers, before, strict=True):  # the warm-up runs moved the rows
        buffer.copy_(old)

    def replay(held: object = module) -> RoundResult:  # the graph reads the module's constants
        del held
        graph.replay()
        return result

    return replay


@dataclass
class Captures:
    """Captured rounds of a target, made when they are first used.

    Attributes:
        make: how they are made.
        most: number to keep; the one not used for longest is dropped.
    """

    make: Maker
    most: int = MOST
    _rounds: OrderedDict[Key, CapturedRound] = field(default_factory=OrderedDict)
    _said: set[str] = field(default_factory=set)

    def of(self, key: Key, fixed: Callable[[], FixedRound]) -> CapturedRound:
        """The captured round with this key, made from `fixed` if there is none.

        Rounds of the same drafter with other weights are dropped.

        Raises:
            NotCapturedError: see `FixedRound` and `trace`.
        """
        if key not in self._rounds:
            for old in list(self._rounds):
                if old.drafter is key.drafter and old.weights != key.weights:
                    del self._rounds[old]
            made = fixed()
            self._rounds[key] = CapturedRound(made, self.make(made))
            while len(self._rounds) > self.most:
                self._rounds.popitem(last=False)
        self._rounds.move_to_end(key)
        return self._rounds[key]

    def say(self, text: str) -> None:
        """Print a line once."""
        if text not in self._said:
            self._said.add(text)
            print(text, file=sys.stderr, flush=True)


_CAPTURES: WeakKeyDictionary[nn.Module, Captures] = WeakKeyDictionary()


def captures_of(target: Target) -> Captures | None:
    """Captured rounds of a target, shared by all objects made of its model; None without `capture`."""
    if not target.capture:
        return None
    on_gpu = target.device.type == "cuda"
    return _CAPTURES.setdefault(target.model, Captures(graphed if on_gpu else traced))
