"""Items that are made in the background: the same items in the same order, and not too many."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
from torch.utils.data import Dataset

from distill.data.datamodule import PhasedBatches
from distill.data.read_ahead import ReadAhead

END = 12
LONG = 20  # seconds that nothing here takes


class Items(Dataset):
    """Says what it makes, and waits where it is told to."""

    def __init__(self) -> None:
        self.made, self.held, self.news = [], {}, threading.Condition()

    def __len__(self) -> int:
        return END

    def __getitem__(self, index: int) -> int:
        if index in self.held:
            assert self.held[index].wait(LONG)
        with self.news:
            self.made.append((index, threading.current_thread() is threading.main_thread()))
            self.news.notify_all()
        if index == 7:
            raise ValueError("seven")
        return 10 * index

    def wait(self, count: int) -> None:
        with self.news:
            assert self.news.wait_for(lambda: len(self.made) >= count, LONG)


@pytest.fixture
def items():
    return Items()


@pytest.fixture
def ahead(items):
    made = ReadAhead(items, 3, lambda index: END)
    yield made
    made.close()


def test_next_items_are_made_while_one_is_used(items, ahead):
    assert ahead[0] == 0
    items.wait(4)  # nobody has asked for them
    assert items.made == [(0, True), (1, False), (2, False), (3, False)]
    assert [ahead[i] for i in range(1, 5)] == [10, 20, 30, 40]
    items.wait(8)
    assert [index for index, _ in items.made] == list(range(8))
    assert len(ahead) == END


def test_reader_may_begin_anywhere_and_an_error_is_raised_at_its_item(items, ahead):
    assert [ahead[i] for i in range(4, 7)] == [40, 50, 60]
    with pytest.raises(ValueError, match="seven"):
        ahead[7]
    assert [ahead[i] for i in range(9, END)] == [90, 100, 110]
    assert max(index for index, _ in items.made) == END - 1, "nothing is made past the end"


def test_no_item_of_the_next_phase_is_made_in_this_one(items):
    phases = PhasedBatches(lambda step: None, every=2, accumulate=2, steps=END // 2)
    assert [phases.phase_end(i) for i in range(9)] == [4] * 4 + [8] * 4 + [12]
    assert PhasedBatches(lambda step: None, 0, 2, END // 2).phase_end(5) == END
    with closing(ReadAhead(items, 3, phases.phase_end)) as ahead:
        assert [ahead[i] for i in range(4)] == [0, 10, 20, 30]
        assert [index for index, _ in items.made] == [0, 1, 2, 3]


def test_nothing_is_made_after_closing(items):
    ahead = ReadAhead(items, 3, lambda index: END)
    items.held[1] = threading.Event()
    assert ahead[0] == 0
    closed = threading.Thread(target=ahead.close)
    closed.start()
    items.held[1].set()
    closed.join(LONG)
    assert [index for index, _ in items.made] in ([0], [0, 1])
