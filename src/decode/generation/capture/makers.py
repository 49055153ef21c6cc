"""How a fixed round is run: traced, with `target.compile` compiled, and on a GPU recorded as a graph."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from decode.errors import UserError
from decode.generation.capture.inductor import Run, compiled, packed_products
from decode.generation.capture.round import FixedRound
from decode.generation.capture.state import NotCapturedError, StateBuffers, clones
from decode.generation.capture.trace import trace
from decode.generation.capture.verification import FixedVerification
from decode.model.target import Target

WARM_UPS = 2  # runs before a recording, so that libraries have made their workspaces
MOST, MOST_BYTES = 64, 4 << 30  # buffers of captured rounds that a target keeps
SLOTS = 64  # fewest slots of a row; capacities are this times a power of two, or eighths of it
COMPILED_SLOTS = 256  # likewise where each capacity takes a minute to compile
FORMS = 8  # captured rounds over the same buffers
Made = TypeVar("Made")


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
    """The stages of a fixed round over its buffers; see `FixedVerification` and `FixedRound`.

    Args:
        fixed: the round.
        make: makes stages.

    Attributes:
        draft: its results are the draft that `verify` reads; without a drafter they are set from outside.
        bytes: of the buffers of results.
    """

    def __init__(self, fixed: FixedVerification, make: Maker) -> None:
        self.fixed = fixed
        self.draft, self.advance = Stage(_nothing, fixed.given), Stage(_nothing, [])
        if isinstance(fixed, FixedRound):
            self.draft = make(fixed.draft, fixed.buffers)
        given = [*fixed.buffers, *self.draft.results]
        self.verify = make(fixed.verify, given)
        if isinstance(fixed, FixedRound) and fixed.drafter:
            self.advance = make(fixed.advance, [*given, *self.verify.results])
        self.bytes = sum(part.nbytes for part in [*self.draft.results, *self.verify.results])


def _nothing() -> None:
    """Run no stage."""


@dataclass
class Captured:
    """Buffers of rows, and the rounds that are captured over them.

    Attributes:
        state: the buffers.
        make: how rounds are made.
        owner: the rows whose texts are in the buffers.
        rounds: by the form of their drafts.
    """

    state: StateBuffers
    make: Maker
    owner: object = None
    rounds: dict[Hashable, CapturedRound] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Of all buffers, those of results included."""
        rounds = sum(one.bytes for one in self.rounds.values())
        return rounds + sum(part.nbytes for part in self.state.tensors)

    def round(self, form: Hashable, fixed: Callable[[], FixedVerification]) -> CapturedRound:
        """The captured round for a form of draft, made from `fixed` if there is none.

        Raises:
            NotCapturedError: see `FixedVerification` and `trace`.
            UserError: there are too many.
        """
        if form not in self.rounds:
            if len(self.rounds) == FORMS:
                raise UserError(
                    f"the drafter's drafts have more than {FORMS} forms, each of which would be captured: "
                    "set target.capture=false"
                )
            self.rounds[form] = CapturedRound(fixed(), self.make)
        return self.rounds[form]


class Key(NamedTuple):
    """What a captured round depends on."""

    drafter: Any
    weights: Hashable  # of the target and the drafter
    others: Hashable
    rows: int


def operations(function: Callable[..., list[Tensor]], arguments: list[Tensor], compiles: bool) -> Run:
    """A function of tensors as a list of operations, through Inductor if `compiles`."""
    if not compiles:
        return trace(function, arguments)
    return compiled(trace(function, arguments, packed_products()), arguments)


def traced(function: Callable[..., list[Tensor]], arguments: list[Tensor], compiles: bool = False) -> Stage:
    """Run the operations one after the other: what a graph would repeat, on any device."""
    module = operations(function, arguments, compiles)
    results = [part.clone() for part in module(*clones(arguments))]

    def run() -> None:
        for result, new in zip(results, module(*arguments), strict=True):
            result.copy_(new)

    return Stage(run, results)


def graphed(function: Callable[..., list[Tensor]], arguments: list[Tensor], compiles: bool = False) -> Stage:
    """Record the operations as a CUDA graph, and replay it."""
    module, before = operations(function, arguments, compiles), [*clones(arguments)]
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
        most: number of `Captured` to keep; those not used for longest are dropped.
        most_bytes: that their buffers may take; the newest are kept however large they are.
        slots: fewest slots of a row.
    """

    make: Maker
    slots: int = SLOTS
    most: int = MOST
    most_bytes: int = MOST_BYTES
    _rounds: OrderedDict[Key, Captured] = field(default_factory=OrderedDict)
    _refused: dict[Hashable, str] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    def of(self, key: Key, made: Callable[[Maker], Captured]) -> Captured:
        """The buffers with this key and their rounds, from `made` if there are none.

        Those of the same drafter with other weights are dropped.

        Raises:
            NotCapturedError: `made` did.
        """
        if key not in self._rounds:
            for old in list(self._rounds):
                if old.drafter is key.drafter and old.weights != key.weights:
                    del self._rounds[old]
            self._rounds[key] = made(self.make)
            while len(self._rounds) > max(1, self._room()):
                self._rounds.popitem(last=False)
        self._rounds.move_to_end(key)
        return self._rounds[key]

    def _room(self) -> int:
        """How many of the newest ones may be kept."""
        sizes = accumulate(one.bytes for one in reversed(self._rounds.values()))
        return min(self.most, sum(size <= self.most_bytes for size in sizes))

    def attempt(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Call `make`, unless it raised `NotCapturedError` before: the same error is then raised at once."""
        if key in self._refused:
            raise NotCapturedError(self._refused[key])
        try:
            return make()
        except NotCapturedError as reason:
            if len(self._refused) == self.most:
                self._refused.clear()
            self._refused[key] = str(reason)
            raise

    def say(self, text: str) -> None:
        """Print a line once."""
        if text not in self._said:
            self._said.add(text)
            print(text, file=sys.stderr, flush=True)


def captures_of(target: Target) -> Captures | None:
    """Captured rounds of a target, kept on it and freed with it; None without `capture`."""
    if not target.capture:
        return None
    if target.captures is None:
        maker = graphed if target.device.type == "cuda" else traced
        target.captures = Captures(
            partial(maker, compiles=target.compiles), COMPILED_SLOTS if target.compiles else SLOTS
        )
    return target.captures
