"""Batches: a pure function of (seed, step, store) for every rank, made in the background, of copied rows."""

from __future__ import annotations

import re
import threading
from contextlib import closing
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from stores import PLAN, fill
from torch.utils.data import Dataset

from decode.errors import UserError
from distill.data import rows as rows_module
from distill.data.batches import BUCKET, RolloutBatches
from distill.data.datamodule import PhasedBatches, RolloutData
from distill.data.read_ahead import ReadAhead
from distill.data.rows import open_rows
from distill.data.taps_disk import TapCache
from distill.distributed.watchdog import Watchdog
from distill.rollouts.shard import write_shard
from distill.rollouts.store import RolloutStore
from distill.utils.atomic_files import sha256
from distill.utils.phase_log import PhaseLog
from drafters.base import supervised_anchors


def store(count: int, seed: int = 0) -> datasets.Dataset:
    """Rows of random lengths whose first token is their number."""
    dice = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        prompt, answer = int(dice.integers(1, 6)), int(dice.integers(1, 20))
        rows.append({"tokens": [i] + [7] * (prompt + answer - 1), "loss_mask": [0] * prompt + [1] * answer})
        if prompt + answer < 3:  # too short for an anchor
            rows[-1] = {"tokens": [i, 7, 7], "loss_mask": [0, 0, 1]}
    return dataset(rows)


def dataset(rows: list[dict]) -> datasets.Dataset:
    return datasets.Dataset.from_list([{"weight": 1.0} | row for row in rows])


def numbers(micro) -> list[int]:
    return micro.tokens[:, 0].tolist()


def test_batch_depends_only_on_seed_and_step():
    rows = store(40)
    straight = list(map(RolloutBatches(rows, 4, steps=30).__getitem__, range(30)))
    backwards = RolloutBatches(rows, 4, steps=30)
    for step in reversed(range(30)):
        again = backwards[step]
        assert torch.equal(again.tokens, straight[step].tokens)
        assert torch.equal(again.loss_mask, straight[step].loss_mask)
        assert again[2:] == straight[step][2:]
    longer = RolloutBatches(rows, 4, steps=300)
    assert numbers(longer[17]) == numbers(straight[17])
    other = RolloutBatches(rows, 4, steps=30, seed=1)
    assert [numbers(other[i]) for i in range(10)] != [numbers(m) for m in straight[:10]]


def test_epoch_has_every_row_once_but_for_what_does_not_fill_a_step():
    batches, few = (RolloutBatches(store(count), 4, steps=40) for count in (40, 11))
    epochs = [[numbers(batches[10 * epoch + i]) for i in range(10)] for epoch in range(3)]
    assert all(sorted(chain(*epoch)) == list(range(40)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    left = set()
    for epoch in range(20):
        seen = numbers(few[2 * epoch]) + numbers(few[2 * epoch + 1])
        assert len(set(seen)) == 8
        left |= set(range(11)) - set(seen)
    assert left == set(range(11)), "the same rows are left out every time"


def test_few_rows_are_repeated_and_those_without_an_anchor_left_out():
    rows = [{"tokens": [i, 2, 3], "loss_mask": [0, 1, i % 2]} for i in range(8)]
    batches = RolloutBatches(dataset(rows), 2, steps=8)
    assert {n for i in range(8) for n in numbers(batches[i])} == {1, 3, 5, 7}
    seen = numbers(RolloutBatches(dataset(rows), 8, steps=2)[0])
    assert (len(seen), set(seen)) == (8, {1, 3, 5, 7})


@pytest.mark.parametrize(("accumulate", "world"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_ranks_and_micro_batches_share_out_the_rows_of_a_step(accumulate, world):
    rows = store(64)
    whole = RolloutBatches(rows, 8, steps=8, max_tokens=16)
    size = 8 // (accumulate * world)
    ranks = [RolloutBatches(rows, size, 8, accumulate, rank, world, max_tokens=16) for rank in range(world)]
    for step in range(8):
        parts = [ranks[rank][step * accumulate + m] for m in range(accumulate) for rank in range(world)]
        for rank, mine in enumerate(ranks):
            assert mine.rows_of(step) == [numbers(part) for part in parts[rank::world]]
            tokens = sum(min(16, len(rows[n]["tokens"])) for n in numbers(whole[step]))
            assert mine.tokens_of(step) == tokens, "of every rank's rows"
        seen = [n for part in parts for n in numbers(part)]
        assert len(set(seen)) == 8, "two ranks got the same row"
        assert sorted(seen) == sorted(numbers(whole[step]))
        assert {part.anchors for part in parts} == {whole[step].anchors}
        assert {part.step for part in parts} == {step}


def test_noise_differs_by_step_place_and_seed_and_not_by_rank():
    def seeds(accumulate, world, seed=0):
        ranks = [RolloutBatches(store(64), 2, 8, accumulate, rank, world, seed) for rank in range(world)]
        return [ranks[r][i].seed for i in range(8 * accumulate) for r in range(world)]

    noise = seeds(4, 1)
    assert noise == seeds(2, 2) == seeds(1, 4)
    assert len({*noise, *seeds(4, 1, seed=1)}) == 2 * len(noise) == 64


def test_largest_micro_batch_has_the_longest_row_still_to_come_in_the_epoch():
    rows, steps = store(64), 13  # of 8 an epoch
    ranks = [RolloutBatches(rows, 2, steps, 2, rank, world=2) for rank in (0, 1)]
    for first in range(steps):
        ahead = range(first, min(steps, first + 8 - first % 8))
        places = [rank[2 * step + m] for step in ahead for m in (0, 1) for rank in ranks]
        longest = max(part.tokens.shape[1] for part in places)
        one, other = (rank.largest(first) for rank in ranks)
        assert (one.step, one.seed) == (other.step, other.seed), "every rank tries the same"
        assert [p.tokens.shape[1] for p in places if (p.step, p.seed) == (one.step, one.seed)] == [longest]


def test_anchors_are_counted_as_the_drafters_count_them():
    rows = store(32)
    for longest in (2048, 9):
        batches = RolloutBatches(rows, 4, steps=8, accumulate=2, max_tokens=longest)
        for step in range(4):
            parts = [batches[2 * step], batches[2 * step + 1]]
            counted = sum(int(supervised_anchors(part.loss_mask, 1).sum()) for part in parts)
            assert counted == parts[0].anchors == parts[1].anchors
            assert all(part.tokens.shape[1] <= longest for part in parts)


def test_rows_are_padded_on_the_right_and_cut():
    rows = [([1, 2, 3, 4], [0, 1, 1, 1]), ([5, 6, 7], [0, 0, 1])]
    rows = dataset([{"tokens": tokens, "loss_mask": mask} for tokens, mask in rows])
    micro = RolloutBatches(rows, 2, steps=1)[0]
    assert sorted(micro.tokens.tolist()) == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert sorted(micro.loss_mask.int().tolist()) == [[0, 0, 1, 0], [0, 1, 1, 1]]
    assert micro.anchors == 3
    assert RolloutBatches(rows, 2, steps=1, max_tokens=3)[0].tokens.shape == (2, 3)


def test_rows_of_a_batch_are_of_similar_length():
    rows = store(64 * BUCKET)
    batches = RolloutBatches(rows, 8, steps=64)
    lengths = [len(row) for row in rows["tokens"]]
    spread = [np.ptp([lengths[i] for i in numbers(batches[step])]) for step in range(64)]
    assert np.mean(spread) < 5 < np.ptp(lengths)
    bucket = [np.mean([lengths[i] for i in numbers(batches[step])]) for step in range(BUCKET)]
    assert bucket != sorted(bucket), "short rows come first"


def test_masks_that_cannot_be_meant_are_refused():
    for masks, said in (
        ([[0, 0, 0]] * 3, "no row has a supervised token"),
        ([[0, 1, 1], [1, 1, 1]], "the loss mask of row 1 covers the whole row"),
    ):
        with pytest.raises(UserError, match=said):
            RolloutBatches(dataset([{"tokens": [1, 2, 3], "loss_mask": m} for m in masks]), 1, steps=1)


def test_row_has_its_weight_and_ones_are_left_out():
    rows = [{"tokens": [i, 2, 3], "loss_mask": [0, 1, 1], "weight": i / 2} for i in range(6)]
    micro = RolloutBatches(dataset(rows), 6, steps=1)[0]
    assert micro.weight is not None
    assert micro.weight.tolist() == [number / 2 for number in numbers(micro)]
    plain = [row | {"weight": 1.0} for row in rows]
    assert RolloutBatches(dataset(plain), 6, steps=1)[0].weight is None


def test_rows_that_training_makes_no_use_of_are_counted():
    rows = [{"tokens": [7] * 12, "loss_mask": [0] * 4 + [1] * 8}] * 3
    rows += [{"tokens": [7] * 12, "loss_mask": [0] * 10 + [1] * 2}]
    assert RolloutBatches(dataset(rows), 2, 2, max_tokens=12).unused() == ""
    said = RolloutBatches(dataset(rows), 2, 2, max_tokens=9).unused()
    assert re.match(r"of 4 rows 4 are cut at max_tokens=9, 42\.3% of .* 1 have no supervised token", said)


# -- the data module -------------------------------------------------------------------------------


class Kept(TapCache):
    """A cache that holds nothing and notes its end."""

    tokens_read = 0

    def __init__(self, phase: str, removed: list[str]) -> None:
        self.phase, self.removed = phase, removed

    def remove(self) -> None:
        self.removed.append(self.phase)


class Keep:
    """Notes how often rows will be used."""

    packing = False
    target = SimpleNamespace(join=lambda: None, rest=lambda: None, source="", starting_seconds=0.0)

    def __init__(self) -> None:
        self.epochs, self.removed = [], []

    def __call__(self, rows, kept, max_tokens, epochs):
        self.epochs.append(epochs)
        return Kept(kept.cache.name, self.removed) if epochs < 1 else None


def stored(folder) -> SimpleNamespace:
    """A store of 40 rows, which are others in every folder."""
    folder.mkdir()
    plain = {"id": "", "finish_reason": "stop", "ids": "exact"}
    write_shard(folder / "0.parquet", [row | plain for row in store(40, int(folder.name))], "key", 0)
    path, shards = (lambda shard: folder / "0.parquet"), [{"rows": 40}]
    content, manifest = (lambda: f"of {folder.name}"), (lambda: {"shards": shards})
    return SimpleNamespace(cache=folder, path=path, content=content, manifest=manifest)


def resumed(**changes) -> SimpleNamespace:
    sizes = {"max_steps": 12, "accumulate_grad_batches": 2, "world_size": 2}
    return SimpleNamespace(**sizes | {"global_rank": 1, "global_step": 5} | changes)


def data_of(folder, refresh_every: int) -> RolloutData:
    phases = {"watchdog": Watchdog(0, folder), "phases": PhaseLog(folder)}

    def stores(phase: int) -> RolloutStore:
        return stored(folder / str(phase))

    return RolloutData(stores, refresh_every, Keep(), 2, max_tokens=9, seed=7, **phases)


def test_loader_resumes_at_its_step_with_the_rows_of_its_rank(tmp_path):
    data = data_of(tmp_path, 0)
    data.trainer = resumed()
    loader = data.train_dataloader()
    assert len(loader) == 24, "of the whole run"
    loaded = list(loader)
    want = RolloutBatches(data.open(5, data.trainer)[0], 2, 12, 2, 1, 2, seed=7, max_tokens=9)
    assert [m.seed for m in loaded] == [want[i].seed for i in range(10, 24)]
    assert all(torch.equal(m.tokens, want[i].tokens) for i, m in enumerate(loaded, 10))
    assert [m.seed for m in data.micros(6)] == [want[12].seed, want[13].seed]
    assert data.keep.epochs == [12 * 2 * 2 * 2 / 40]


def test_phase_has_its_own_rows_and_removes_its_cache(tmp_path):
    data = data_of(tmp_path, 3)
    rows = [data.open(step, resumed())[0]["tokens"][:] for step in (0, 2, 3, 5)]
    assert rows == [[row["tokens"] for row in store(40, phase)] for phase in (0, 0, 1, 1)]
    assert data.keep.epochs == [3 * 2 * 2 * 2 / 40] * 2, "of its own steps"
    assert data.keep.removed == ["0"]


# -- batches that are made in the background ------------------------------------------------------

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


# -- the Arrow copy of a store's rows ------------------------------------------------------------


@pytest.fixture
def made(tmp_path) -> RolloutStore:
    """Two shards of four rows and one."""

    def rows(shard: int, prompts, count: int) -> list[dict]:
        plain = {"loss_mask": [0, 1, 1], "finish_reason": "stop", "ids": "given", "weight": 1.0}
        return [{"id": f"{shard}-{i}", "tokens": [1000 + shard, 2000 + i, 7]} | plain for i in range(count)]

    made = RolloutStore(tmp_path, PLAN, [])
    fill(made, rows)
    return made


def copy_of(store: RolloutStore) -> Path:
    (path,) = store.cache.glob("rows-*.arrow")
    return path


def rows_in(store: RolloutStore) -> list:
    return [r for i in range(store.shards) for r in pq.read_table(store.path(i)).to_pylist()]


def test_rows_are_of_the_shards(made, capsys):
    assert list(open_rows(made)) == rows_in(made)
    copy = copy_of(made)
    before = copy.stat().st_ino
    assert list(open_rows(made)) == rows_in(made)
    assert copy.stat().st_ino == before, "made twice"
    assert copy.with_name(f"{copy.name}.sha256").read_text().split() == [sha256(copy), copy.name]
    assert capsys.readouterr().out == ""


def change_a_token(path: Path) -> None:
    data = path.read_bytes()
    token = (2001).to_bytes(4, "little")
    assert data.count(token) == 1
    path.write_bytes(data.replace(token, (2002).to_bytes(4, "little")))


DAMAGE = {
    "a token": change_a_token,
    "half a file": lambda path: path.write_bytes(path.read_bytes()[:400]),
    "nothing": lambda path: path.write_bytes(b""),
    "another hash": lambda path: path.with_name(f"{path.name}.sha256").write_text("0" * 64),
    "half a hash": lambda path: path.with_name(f"{path.name}.sha256").write_bytes(b"\xff"),
    "no hash": lambda path: path.with_name(f"{path.name}.sha256").unlink(),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_copy_is_made_again_with_a_line(name, made, capsys):
    open_rows(made)
    DAMAGE[name](copy_of(made))
    for said in (f"{copy_of(made)}: sha256 differs", ""):
        assert list(open_rows(made)) == rows_in(made)
        out = capsys.readouterr().out
        assert out.startswith(said)
        assert len(out.splitlines()) == bool(said)


def test_copy_is_hashed_once_in_a_process(made, monkeypatch):
    open_rows(made)
    read = []
    monkeypatch.setattr(rows_module, "sha256", lambda path: read.append(path) or sha256(path))
    for _ in range(3):
        open_rows(made)
    assert len(read) <= 1


def test_copies_of_older_versions_and_of_other_rows_are_removed(made):
    old = [made.cache / "cache" / "parquet" / "x.arrow", made.cache / "rows-0.arrow"]
    for path in old:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    open_rows(made)
    assert not any(path.exists() for path in old)
    assert not (made.cache / "cache").exists()
