"""Bring the next micro-batch to a GPU while it trains on this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from decode.model.target import Target, TargetOutput
from distill.data.batches import MicroBatch

T = TypeVar("T")


class Stream(Protocol):
    """Where work runs that the training step does not wait for."""

    def run(self, work: Callable[[], T]) -> T:
        """Start work after what was started so far; its result may be unfinished."""
        ...

    def join(self, *results: Tensor) -> None:
        """Let later work, which uses these results, wait for all that `run` has started."""
        ...


def read_states(target: Target, tokens: Tensor, lengths: Sequence[int] | None) -> TargetOutput:
    """Hidden states of tokens on the target's device, in the precision of decoding."""
    with torch.autocast(target.device.type, enabled=False):
        return target.read(tokens, lengths)


class SideStream:
    """A CUDA stream of its own.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def run(self, work: Callable[[], T]) -> T:
        """See `Stream`. It waits for earlier work: tables that both streams read are made on first use."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return work()

    def join(self, *results: Tensor) -> None:
        """See `Stream`."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in results:
            tensor.record_stream(current)  # else their memory may be used again while a step reads them


class StatesAhead(Dataset[MicroBatch]):
    """A sequentially read dataset whose next item is on its way to the GPU.

    When an item is requested, the next one is copied to the device, and the frozen target reads it unless its
    hidden states are cached, on a stream of its own. The first item of a process or phase is returned as it
    is. Values are those of a step that reads the target itself.

    Args:
        items: micro-batches.
        read: (tokens on the device, lengths of packed rows or None) -> hidden states of the target.
        end: index -> first index that must not be made before this one has been used.
        device: of training.
        stream: of the copies and of `read`.
    """

    def __init__(
        self,
        items: Dataset[MicroBatch],
        read: Callable[..., TargetOutput],
        end: Callable[[int], int],
        device: torch.device,
        stream: Stream,
    ) -> None:
        self._items, self._read, self._end, self._device, self._stream = items, read, end, device, stream
        self._next: tuple[int, MicroBatch] | None = None

    def __len__(self) -> int:
        return len(self._items)  # pyright: ignore[reportArgumentType]  (of any dataset with a length)

    @override
    def __getitem__(self, index: int) -> MicroBatch:
        ready, self._next = self._next, None
        if ready and ready[0] == index:
            batch = ready[1]
            self._stream.join(*_on_device(batch))
        else:
            batch = self._items[index]
        if index + 1 < min(self._end(index), len(self)):
            self._next = index + 1, self._stream.run(lambda: self._bring(self._items[index + 1]))
        return batch

    def join(self) -> None:
        """Let the current stream wait for the target, which is about to be used for something else."""
        self._stream.join()

    def _bring(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch with its tensors on the device; its loss mask stays on the host."""
        tokens, states, weight = self._copy(batch.tokens), batch.target_states, batch.weight
        if states is None:
            states = self._read(tokens, batch.lengths)
        else:
            states = TargetOutput(self._copy(states.last), self._copy(states.taps))
        return batch._replace(
            tokens=tokens, target_states=states, weight=None if weight is None else self._copy(weight)
        )

    def _copy(self, tensor: Tensor) -> Tensor:
        """On the device; from pinned memory, since other copies make the host wait."""
        if tensor.device.type == "cpu" and self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def _on_device(batch: MicroBatch) -> list[Tensor]:
    states = batch.target_states
    assert states is not None, "read ahead"
    return [x for x in (batch.tokens, states.last, states.taps, batch.weight) if x is not None]
