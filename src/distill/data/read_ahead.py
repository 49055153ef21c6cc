"""Make items of a dataset in the background."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from torch.utils.data import Dataset
from typing_extensions import override

T_co = TypeVar("T_co", covariant=True)


class ReadAhead(Dataset[T_co], Generic[T_co]):
    """A sequentially read dataset with a thread that makes the next items.

    Useful if making an item means waiting for another program. Exceptions are raised where the item is
    requested.

    Args:
        items: dataset with items that do not depend on when they are made.
        count: maximum number of items ahead.
        end: index -> first index that must not be made before this one has been used.
    """

    def __init__(self, items: Dataset[T_co], count: int, end: Callable[[int], int]) -> None:
        self._items, self._count, self._end = items, count, end
        self._threads = ThreadPoolExecutor(1, "read-ahead")
        self._made: dict[int, Future[T_co]] = {}

    def __len__(self) -> int:
        return len(self._items)  # pyright: ignore[reportArgumentType]  (of any dataset with a length)

    @override
    def __getitem__(self, index: int) -> T_co:
        item = self._made.pop(index, None)
        value = self._items[index] if item is None else item.result()
        for later in range(index + 1, min(index + 1 + self._count, self._end(index))):
            if later not in self._made:
                self._made[later] = self._threads.submit(self._items.__getitem__, later)
        return value

    def close(self) -> None:
        """Stop; waits for the item in progress."""
        self._threads.shutdown(cancel_futures=True)
