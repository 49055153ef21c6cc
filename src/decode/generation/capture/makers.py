"""How a fixed round is run: traced, and on a GPU recorded as a graph."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.generation.capture.round import FixedRound
from decode.generation.capture.state import clones
from decode.generation.capture.trace import trace
from decode.model.target import Target

WARM_UPS = 2  # runs before a recording, so that libraries have made their workspaces
MOST, MOST_BYTES = 64, 4 << 30  # captured rounds that a target keeps, and their buffers


class Stage(NamedTuple):
    """A function of tensors at fixed addresses that can be run again.

    Attributes:
        run: changes the arguments and the results in place.
        results: of the newest run.
    """

    run: Callable[[], None]
    results: list[Tensor]


Maker = Callable[[Callable[..., list[Tensor]], list[Tensor]], Stage]


class CapturedRound:
    """The stages of a fixed round over its buffers; see `FixedRound`.

    Args:
        fixed: the round.
        make: makes stages.

    Attributes:
        owner: the rows whose texts are in the buffers.
        bytes: of all buffers, those of results included.
    """

    def __init__(self, fixed: FixedRound, make: Maker) -> None:
        self.fixed = fixed
        self.owner: object = None
        self.draft = make(fixed.draft, fixed.buffers)
        drafted = [*fixed.buffers, *self.draft.results]
        self.verify = make(fixed.verify, drafted)
        nothing = Stage(lambda: None, [])
        self.advance = make(fixed.advance, [*drafted, *self.verify.results]) if fixed.drafter else nothing
        self.bytes = sum(part.nbytes for part in [*drafted, *self.verify.results])


class Key(NamedTuple):
    """What a captured round depends on."""

    drafter: Any
    weights: Hashable  # of the target and the drafter
    others: Hashable
    rows: int


def traced(function: Callable[..., list[Tensor]], arguments: list[Tensor]) -> Stage:
    """Run the traced operations one by one: what a graph would repeat, on any device."""
    module = trace(function, arguments)
    results = [part.clone() for part in module(*clones(arguments))]

    def run() -> None:
        for result, new in zip(results, module(*arguments), strict=True):
            result.copy_(new)

    return Stage(run, results)


def graphed(function: Callable[..., list[Tensor]], arguments: list[Tensor]) -> Stage:
    """Record the traced operations as a CUDA graph, and replay it."""
    module, before = trace(function, arguments), [*clones(arguments)]
    device = arguments[0].device
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            module(*arguments)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [*module(*arguments)]
    for argument, old in zip(arguments, before, strict=True):  # the warm-up runs changed them
        argument.copy_(old)

    def run(held: object = module) -> None:  # the graph reads the module's constants
        del held
        graph.replay()

    return Stage(run, results)


@dataclass
class Captures:
    """Captured rounds of a target, made when they are first used.

    Attributes:
        make: how they are made.
        most: number to keep; the ones not used for longest are dropped.
        most_bytes: that their buffers may take; the newest is kept however large it is.
    """

    make: Maker
    most: int = MOST
    most_bytes: int = MOST_BYTES
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
            self._rounds[key] = CapturedRound(fixed(), self.make)
            while len(self._rounds) > max(1, self._room()):
                self._rounds.popitem(last=False)
        self._rounds.move_to_end(key)
        return self._rounds[key]

    def _room(self) -> int:
        """How many of the newest rounds may be kept."""
        sizes = accumulate(one.bytes for one in reversed(self._rounds.values()))
        return min(self.most, sum(size <= self.most_bytes for size in sizes))

    def say(self, text: str) -> None:
        """Print a line once."""
        if text not in self._said:
            self._said.add(text)
            print(text, file=sys.stderr, flush=True)


def captures_of(target: Target) -> Captures | None:
    """Captured rounds of a target, kept on it and freed with it; None without `capture`."""
    if not target.capture:
        return None
    on_gpu = target.device.type == "cuda"
    if target.captures is None:
        target.captures = Captures(graphed if on_gpu else traced)
    return target.captures
