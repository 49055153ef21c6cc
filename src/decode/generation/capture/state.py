"""State of rows in tensors of fixed shape: a template of it, and the same state over given tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from decode.generation.capture.fixed_store import FixedStore, Slots
from decode.model.cache import KeptStore, MultiDeviceStore, RowStore
from decode.model.causal_lm import CausalLM


class NotCapturedError(Exception):
    """A round that a graph cannot repeat; the message is the reason, as a predicate of what it is about."""


def replaced(state: Any, tensor: Callable[[Tensor], Any], store: Callable[[RowStore], RowStore]) -> Any:
    """A copy of a state with other tensors and stores.

    Args:
        state: a tensor, a store, a `CausalLM`, a dataclass of these, or a value without rows.
        tensor: returns what replaces a tensor.
        store: returns what replaces a store; also called for the store of a `CausalLM`.

    Raises:
        NotCapturedError: the state has a part that the host reads.
    """
    if isinstance(state, Tensor):
        return tensor(state)
    if isinstance(state, RowStore):
        return store(state)
    if isinstance(state, CausalLM):
        return state.over(store(state.cache.store))
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    if type(state) in (list, tuple) and all(isinstance(part, (bool, int)) for part in state):
        return state
    if not is_dataclass(state) or isinstance(state, type):
        raise NotCapturedError(f"keeps {type(state).__name__} on the host")
    parts = {field.name: replaced(getattr(state, field.name), tensor, store) for field in fields(state)}
    return replace(state, **parts)


def tensors_and_stores(state: Any) -> list[Tensor | RowStore]:
    """All tensors and stores of a state, in the order of `replaced`."""
    found: list[Any] = []

    def note(part: Any) -> Any:
        found.append(part)
        return part

    replaced(state, note, note)
    return found


def without_tensors(state: Any) -> Any:
    """The structure of a state: with empty tensors and stores.

    Raises:
        NotCapturedError: a store has several devices, or holds parts of another one.
    """
    return replaced(state, lambda part: part.new_empty(0), _without_slots)


def clones(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Copies of tensors that may be changed in place in any mode."""
    with torch.inference_mode(False), torch.no_grad():
        return iter([part.clone() for part in tensors])


class StateBuffers:
    """Tensors that hold the state of `rows` rows at fixed addresses.

    Args:
        state: any state of the same kind, after a prefill.
        rows: rows to hold.
        capacity: slots of each row in every store.

    Attributes:
        tensors: all of them.
        active: (B,) rows that decode; the others do not change.

    Raises:
        NotCapturedError: the state has a part that the host reads, or that is not there yet.
    """

    def __init__(self, state: Any, rows: int, capacity: int) -> None:
        self.rows, self.tensors = rows, list[Tensor]()
        # In a graph, tensors made in inference mode could not be changed in place outside of it.
        with torch.inference_mode(False), torch.no_grad():
            for part in tensors_and_stores(state):
                if isinstance(part, Tensor):
                    self.tensors.append(part.new_zeros(rows, *part.shape[1:]))
                else:
                    slots = Slots.like(part, rows, capacity)
                    self.tensors += [slots.lengths, slots.dropped, *slots.parts]
            self.active = torch.zeros(rows, dtype=torch.bool, device=self.tensors[0].device)
        # Without the tensors of `state`, whose memory is free after its rows are loaded.
        self.template = without_tensors(state)

    def resized(self, rows: int) -> StateBuffers:
        """Empty buffers of the same kind for another number of rows."""
        other = copy.copy(self)
        with torch.inference_mode(False), torch.no_grad():
            other.tensors = [part.new_zeros(rows, *part.shape[1:]) for part in self.tensors]
            other.active = self.active.new_zeros(rows)
        other.rows = rows
        return other

    def load(self, state: Any, row: int, source: int) -> None:
        """Copy row `source` of a state to row `row` of the buffers, which then decodes.

        Raises:
            NotCapturedError: the state has other shapes.
        """
        given = iter(self.tensors)
        for part in tensors_and_stores(state):
            if isinstance(part, Tensor):
                buffer = next(given)
                if buffer.shape[1:] != part.shape[1:]:
                    raise NotCapturedError("has a state that grows")
                buffer[row] = part[source]
            else:
                _slots(part, given).load(part, row, source)
        self.active[row] = True

    def over(self, given: Iterator[Tensor]) -> Any:
        """The state over given tensors, which are like `tensors`."""

        def store(like: RowStore) -> FixedStore:
            return FixedStore(_slots(like, given), like.window, like.sinks)

        return replaced(self.template, lambda _: next(given), store)


def _without_slots(store: RowStore) -> RowStore:
    """A store with the same layers and windows.

    Raises:
        NotCapturedError: the store has several devices, or holds parts of another one.
    """
    if isinstance(store, (KeptStore, MultiDeviceStore)):
        raise NotCapturedError(f"keeps keys and values in a {type(store).__name__}")
    bare = RowStore(store.layers, 0, 0)
    bare.window, bare.sinks = store.window, store.sinks
    return bare


def _slots(store: RowStore, given: Iterator[Tensor]) -> Slots:
    return Slots(next(given), next(given), [next(given) for _ in range(2 * store.layers)])


def write_back(before: list[Tensor | RowStore], lengths: list[Tensor], state: Any, active: Tensor) -> None:
    """Copy a state that has changed into the tensors that it was made of, for active rows.

    Args:
        before: `tensors_and_stores` of the state before the change.
        lengths: `lengths_of` it, before the change.
        state: the same state after the change.
        active: (B,) bool; the other rows keep what they had.

    Raises:
        NotCapturedError: a tensor has another shape.
    """
    old, after = iter(lengths), tensors_and_stores(state)
    if len(after) != len(before):
        raise NotCapturedError("has a state with parts that begin later")
    for buffer, value in zip(before, after, strict=True):
        if isinstance(buffer, FixedStore):
            count = buffer.slots.lengths
            count.copy_(torch.where(active, count, next(old)))
        elif value is not buffer:
            assert isinstance(buffer, Tensor)
            assert isinstance(value, Tensor)
            if value.shape != buffer.shape:
                raise NotCapturedError("has a state that grows")
            buffer.copy_(torch.where(active.view(-1, *[1] * (buffer.ndim - 1)), value, buffer))


def lengths_of(parts: list[Tensor | RowStore]) -> list[Tensor]:
    """Copies of the lengths of all stores."""
    return [part.slots.lengths.clone() for part in parts if isinstance(part, FixedStore)]
