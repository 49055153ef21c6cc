"""Items of a dataset, made in the background while those before them are used."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from torch.utils.data import Dataset
from typing_extensions import override

T_co = TypeVar("T_co", covariant=True)


class ReadAhead(Dataset[T_co], Generic[T_co]):
    """A dataset that is read from front to back, whose next items a thread makes meanwhile.

    Worth it where making an item is waiting for another program. What making an item raises is raised where
    it is asked for.

    Args:
        items: whose items do not depend on when they are made.
        count: items ahead, at the most.
        end: index -> the first index that may not be made before this one has been used.
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
        """Make no more; waits for the item that is being made."""
        self._threads.shutdown(cancel_futures=True)
