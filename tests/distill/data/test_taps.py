"""Taps that are kept, in memory or on disk, are what the target says of each row."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from workbench import fork, spawn

from decode.errors import UserError
from decode.hardware import locked
from decode.model.target import LAST, Target
from distill.data import taps_disk as tap_cache
from distill.data import taps_memory
from distill.data.batches import RolloutBatches
from distill.data.datamodule import TapStorage
from distill.data.taps_bounded import BoundedTaps
from distill.data.taps_disk import TapCache
from distill.data.taps_memory import GrowingTaps, TapMemory, keeps_in_memory, tap_memory_bytes
from distill.data.vectors import FORMATS
from distill.losses.divergences import kl
from distill.losses.objective import Objective
from distill.losses.weights import constant
from drafters.base import Batch


@pytest.fixture
def target():
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32}
    return Target(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, num_attention_heads=2)).double())


@pytest.fixture(autouse=True)
def _small_files(monkeypatch):
    """A file a row, but for one that has nothing."""
    monkeypatch.setattr(tap_cache, "FILE_BYTES", 1)


@pytest.fixture
def rows():
    random = np.random.default_rng(0)
    tokens = [random.integers(0, 50, n).tolist() for n in (5, 9, 3, 12, 7)]
    return datasets.Dataset.from_list(
        [{"tokens": t, "loss_mask": [0] + [1] * (len(t) - 1), "weight": 1.0} for t in tokens]
    )


def answered(lengths=((3, 2), (5, 4), (2, 0), (4, 8), (6, 1))) -> datasets.Dataset:
    """Rows with a prompt, an answer and a last token that nobody wrote."""
    random = np.random.default_rng(1)
    rows = []
    for prompt, answer in lengths:
        tokens = random.integers(0, 50, prompt + answer + 1).tolist()
        rows.append({"tokens": tokens, "loss_mask": [0] * prompt + [1] * answer + [0], "weight": 1.0})
    return datasets.Dataset.from_list(rows)


def cache_of(target, folder, limit=1.0, length=11, key="key", packing=False, **more) -> TapCache:
    """A cache of those rows, of at most so many GiB."""
    return TapCache(target, answered(), length, folder, key, limit, packing, **more)


def store_in(folder=None, content="key") -> SimpleNamespace:
    return SimpleNamespace(cache=folder, content=lambda: content)


def files_of(cache: TapCache) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(cache.folder.glob("*.safetensors"))}


@pytest.mark.parametrize("kind", [TapMemory, GrowingTaps])
@pytest.mark.parametrize("taps", [(LAST,), (0, 2), (LAST, 1)])
@pytest.mark.covering
def test_memory_gives_what_a_plain_read_of_the_row_gives(target, rows, taps, kind):
    target.tap(taps)
    memory = kind(target, rows, max_tokens=10)
    memory.batch([1, 3])
    read = memory.batch([3, 0])
    for place, row in enumerate([3, 0]):
        want = target.read(torch.tensor([rows[row]["tokens"][:10]]))
        n = want.last.shape[1]
        torch.testing.assert_close(read.last[place, :n], want.last[0], atol=1e-12, rtol=0)
        torch.testing.assert_close(read.taps[place, :n], want.taps[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("taps", [(LAST,), (0, 2)])
def test_estimate_is_what_memory_holds(target, rows, taps):
    target.tap(taps)
    memory = TapMemory(target, rows, 10)
    pairs = [memory.row(n) for n in range(len(rows))]
    held = sum(last.nbytes + (0 if taps == (LAST,) else tapped.nbytes) for last, tapped in pairs)
    assert tap_memory_bytes(target, rows, 10).sum() == held == memory.bytes
    growing = GrowingTaps(target, rows, 10)
    assert not growing.bytes
    growing.batch(range(len(rows)))
    assert growing.bytes == memory.bytes


@pytest.mark.parametrize("change", [{"content": "other"}, {"length": 9}, {"packing": True}], ids=str)
def test_runs_share_no_taps_of_other_rows_lengths_or_reads(target, rows, change):
    held = {}
    for case in ({}, change):
        keep = TapStorage(target, "memory", 1.0, case.get("packing", False), held=held)
        keep(rows, store_in(content=case.get("content", "key")), case.get("length", 10), 9.0)
    assert len(held) == 2


def test_target_reads_no_more_tokens_at_once_than_it_may(target, rows, monkeypatch):
    """Padding included; a longer row is read by itself."""
    monkeypatch.setattr(taps_memory, "TOKENS", 20)
    read, sizes = Target.read, []
    monkeypatch.setattr(Target, "read", lambda self, t, n=None: sizes.append(t.shape) or read(self, t, n))
    TapMemory(target, datasets.concatenate_datasets([rows, rows.select([1, 2, 2])]), 40)
    assert [tuple(size) for size in sizes] == [(2, 9), (1, 3), (1, 12), (2, 9), (2, 3)]


def test_what_runs_share_fits_into_the_limit_together(target, rows):
    """Three drafters that read as much each, and room for two; the last one begins with nothing yet."""
    target.tap((0,))
    need, held = tap_memory_bytes(target, rows, 10).sum() / 2**30, {}
    keep = TapStorage(target, "memory", 2.5 * need, held=held)
    for taps in ((0,), (1,), (0,), (2,)):
        target.tap(taps)
        keep(rows, store_in(), 10, 9.0).batch(range(len(rows)))
        assert sum(k.bytes for k in held.values()) <= keep.limit * 2**30
    assert [key[1] for key in held] == [(1,), (2,)]


def test_short_runs_that_share_keep_all_rows_or_none(target, rows, capsys):
    """Each of them would read a part again; a line says so."""
    target.tap((0,))
    need, held = tap_memory_bytes(target, rows, 10).sum() / 2**30, {}
    assert TapStorage(target, "memory", 0.5 * need, held=held)(rows, store_in(), 10, 9.0) is None
    assert not held
    assert "hidden states of 0 of 5 rows are kept" in capsys.readouterr().out


def test_auto_keeps_taps_only_where_they_are_used_again():
    kept = [keeps_in_memory("auto", epochs) for epochs in (0.9, 1.0, 2.0)]
    assert kept == [False, False, True], "up to one epoch it is one read each, either way"
    assert keeps_in_memory("memory", 0.1)
    assert not keeps_in_memory("online", 9.0)
    with pytest.raises(UserError, match="auto, online, memory, cache or engine"):
        keeps_in_memory("disk", 1.0)


@pytest.mark.parametrize("taps", [(LAST,), (0, 2), (LAST, 1)])
def test_cache_gives_what_training_looks_at_rounded_to_bf16(target, tmp_path, taps):
    target.tap(taps)
    rows, cache, again = answered(), cache_of(target, tmp_path), cache_of(target, tmp_path)
    for chosen in ([3, 0], [1, 4], [2]):
        read, second = cache.batch(chosen), again.batch(chosen)
        assert torch.equal(read.taps, second.taps)
        assert read.last.dtype == target.dtype
        assert read.last.shape[1] == max(min(len(rows[row]["tokens"]), 11) for row in chosen)
        for place, row in enumerate(chosen):
            tokens, mask = rows[row]["tokens"][:11], rows[row]["loss_mask"][:11]
            want = target.read(torch.tensor([tokens]))
            teach = [i for i in range(len(mask) - 1) if mask[i + 1]]
            reach = teach[-1] + 1 if teach else 0
            assert torch.equal(read.taps[place, :reach], want.taps[0, :reach].bfloat16().double())
            assert torch.equal(read.last[place, teach], want.last[0, teach].bfloat16().double())
            assert not read.taps[place, reach:].any()


def test_cache_in_int8_is_half_as_large_and_off_by_half_a_step(target, tmp_path):
    target.tap((0, 2))
    plain, small = cache_of(target, tmp_path), cache_of(target, tmp_path, stored=FORMATS["int8"])
    assert small.folder != plain.folder
    assert small.bytes * 16 == plain.bytes * 9  # of 16 numbers: 16 bytes and a scale, for 32
    for number, row in enumerate(answered()):
        read, want = small.batch([number]), target.read(torch.tensor([row["tokens"][:11]]))
        for got, exact in ((read.taps, want.taps), (read.last, want.last)):
            used = got.any(-1)
            bound = exact.abs().amax(-1, keepdim=True) * (1 / 254 + 2**-9)
            assert ((got - exact).abs() <= bound)[used].all()
        assert used.any() or not any(row["loss_mask"][1:11])


@pytest.mark.parametrize("hidden", [32, 64, 48, 7])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e4])
@pytest.mark.covering
def test_int8_is_off_by_half_a_step_of_its_group(hidden, scale):
    """An error is at most half a step of a number's own group; zeros stay zeros."""
    vectors = scale * torch.randn(5, 3, hidden)
    vectors[0, :, 0] *= 1e3
    vectors[1] = 0
    stored = FORMATS["int8"].encode(vectors)
    again = FORMATS["int8"].decode(stored, torch.float32)
    assert sum(part.nbytes for part in stored) == 15 * FORMATS["int8"].size(hidden)
    group = stored[0].shape[-1] // stored[1].shape[-1]
    largest = vectors.abs().unflatten(-1, (-1, group)).amax(-1, keepdim=True)
    error = (again - vectors).abs().unflatten(-1, (-1, group))
    assert (error <= largest * (1 / 254 + 2**-9)).all()
    assert not again[1].any()


@pytest.mark.parametrize("drafter", ["eagle3", "medusa", "lyanna"])
def test_training_from_a_cache_is_training_on_what_it_rounds(drafter, make_drafter, tiny_target, tmp_path):
    target = tiny_target(vocab=50, dtype=torch.bfloat16)
    student, rows = make_drafter(drafter, target), answered(((3, 7), (4, 9)))
    micro = RolloutBatches(rows, 2, 1, memory=TapCache(target, rows, 14, tmp_path, "key", 1.0))[0]
    losses = []
    for read in (micro.target_states, target.read(micro.tokens)):
        steps = student.unroll(Batch(micro.tokens, micro.loss_mask, read.taps, read.last), target)
        weights = student.aux_weights_at(1.0)
        total, _ = Objective(kl, constant)(steps, read.last, target.head, weights, 1.0, micro.tokens, None)
        losses.append(total.item())
    assert losses[0] == losses[1]


def test_cache_that_is_too_large_for_the_disk_is_refused(target, tmp_path, capsys, monkeypatch):
    target.tap((0, 2))
    monkeypatch.setattr(tap_cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(UserError, match="are free; lower taps_gb"):
        cache_of(target, tmp_path)
    assert "GB of 2 layers" in capsys.readouterr().out, "its size is to be said before it is written"
    assert not list(tmp_path.glob("taps-*"))


def test_higher_limit_adds_files_and_a_lower_one_leaves_them(target, tmp_path):
    target.tap((0, 2))
    some, whole = cache_of(target, tmp_path, 1000 / 2**30), cache_of(target, tmp_path)
    assert (some.folder, some.count, whole.count) == (whole.folder, 2, 5)
    assert whole.tokens_read == 10 + 6, "what was there is not read again"
    again = cache_of(target, tmp_path, 1000 / 2**30)
    assert (again.count, again.tokens_read) == (2, 0)
    assert len(files_of(some)) == 4


@pytest.mark.parametrize("kind", ["memory", "cache"])
@pytest.mark.parametrize("taps", [(LAST,), (0, 2)])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.covering(pairs=True)
def test_rows_that_do_not_fit_are_read_when_they_are_used(target, tmp_path, kind, taps, packing, monkeypatch):
    target = Target(target.model.bfloat16())  # a cache is bf16, so that both are the same
    target.tap(taps)
    rows, read = answered(), []
    limit = sum(bytes_of(kind, target, rows)[:3]) / 2**30
    bounded = TapStorage(target, kind, limit, packing)(rows, store_in(tmp_path), 11, 2.0)
    whole = TapStorage(target, kind, 1.0, packing)(rows, store_in(tmp_path / "whole"), 11, 2.0)
    assert isinstance(bounded, BoundedTaps)
    assert bounded.bytes <= limit * 2**30
    assert 0 < bounded.share < 1
    assert bounded.memory_bytes == (bounded.bytes if kind == "memory" else 0)
    plain = target.read
    monkeypatch.setattr(target, "read", lambda rows, *more: read.append(len(rows)) or plain(rows, *more))
    for batch, reads in (([0, 1], 0), ([3, 1, 4], 2), ([4], 1), ([1, 3, 3], 1)):
        read.clear()
        got = bounded.batch(np.array(batch))
        assert sum(read) == reads
        for place, row in enumerate(batch):
            want, taught = whole.batch([row]), teacher_places(rows[row])
            upto = taught[-1] + 1 - (kind == "cache") if len(taught) else 0
            near = {"rtol": 0.02, "atol": 0.02}
            torch.testing.assert_close(got.taps[place, :upto], want.taps[0, :upto], **near)
            torch.testing.assert_close(got.last[place, taught], want.last[0, taught], **near)
            assert not got.taps[place, min(11, len(rows[row]["tokens"])) :].any()
    bounded.remove()
    assert not list(tmp_path.glob("taps-*"))


def teacher_places(row) -> np.ndarray:
    return tap_cache.teacher_positions(row["loss_mask"], 11)


def bytes_of(kind, target, rows) -> list[int]:
    if kind == "memory":
        return tap_memory_bytes(target, rows, 11).tolist()
    vectors = 1 if set(target.taps) == {LAST} else len(target.taps)
    places = [teacher_places(row) for row in rows]
    return [2 * 16 * (vectors * (max(p, default=-1) + 1) + (len(p) if vectors > 1 else 0)) for p in places]


def test_nothing_is_kept_where_no_row_fits(target, rows, tmp_path, capsys):
    target.tap((0, 2))
    for kind, epochs in (("memory", 2.0), ("cache", 2.0), ("auto", 2.0), ("auto", 1.0)):
        assert TapStorage(target, kind, 1e-9)(rows, store_in(tmp_path), 10, epochs) is None
        assert ("states of 0 of 5 rows are kept" in capsys.readouterr().out) == (epochs > 1)


def test_cache_of_a_killed_run_is_finished_and_older_ones_are_removed(target, tmp_path, monkeypatch, capsys):
    target.tap((LAST,))
    save, saved = tap_cache.save_file, []

    def killed_in_the_third(*arguments):
        save(*arguments)
        saved.append(arguments)
        if len(saved) == 3:
            os.kill(os.getpid(), 9)

    unfinished, older = tmp_path / "taps-of-other-rows", tmp_path / "taps-of-the-older-layout"
    for folder, name, about in (
        (unfinished, tap_cache.LAYOUT, {"schema": tap_cache.SCHEMA, "files": 2}),
        (older, "index.json", {}),
    ):
        folder.mkdir()
        (folder / name).write_text(json.dumps(about))
    with monkeypatch.context() as spoilt:
        spoilt.setattr(tap_cache, "save_file", killed_in_the_third)
        assert fork(lambda: cache_of(target, tmp_path) and 0) == 9
    assert not unfinished.exists(), "nobody writes it"
    assert not older.exists()
    assert len(list(tmp_path.glob("taps-*/*.safetensors"))) == 2
    assert list(tmp_path.glob("taps-*/*.tmp")), "the kill came too early to prove anything"
    capsys.readouterr()
    cache = cache_of(target, tmp_path)
    assert "of 5 rows exist already" in capsys.readouterr().out
    assert not list(cache.folder.glob("*.tmp")) + list(cache.folder.glob("taps-*.lock"))
    assert files_of(cache) == files_of(cache_of(target, tmp_path / "whole"))


def test_changed_cache_is_refused(target, tmp_path):
    cache = cache_of(target, tmp_path)
    file = cache.folder / list(files_of(cache))[-1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    changed = cache_of(target, tmp_path)
    changed.batch([0])
    with pytest.raises(UserError, match="changed since it was made; delete it"):
        changed.batch([0, 4])
    file.write_bytes(data[:-1])
    with pytest.raises(UserError, match="changed since it was made; delete it"):
        cache_of(target, tmp_path)


def test_processes_write_a_cache_together(target, tmp_path, monkeypatch):
    target.tap((0, 2))
    single = cache_of(target, tmp_path / "one-process")
    write, written = TapCache._write, []
    monkeypatch.setattr(TapCache, "_write", lambda *a: write(*a) or written.append(a[-1]))

    def work(rank: int) -> int:
        monkeypatch.setattr(tap_cache, "rank_and_world", lambda: (rank, 3))
        cache = cache_of(target, tmp_path)
        (tmp_path / f"rank-{rank}").write_text(" ".join(map(str, written)))
        return int(not torch.equal(cache.batch([0, 3]).taps, single.batch([0, 3]).taps))

    children = [spawn(lambda rank=rank: work(rank)) for rank in range(3)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    shares = [(tmp_path / f"rank-{rank}").read_text().split() for rank in range(3)]
    numbers = sorted(int(number) for share in shares for number in share)
    assert numbers == list(range(len(files_of(single)))), "each file once"
    assert files_of(cache_of(target, tmp_path)) == files_of(single)


def test_file_that_another_process_is_writing_is_not_removed(target, tmp_path):
    cache = cache_of(target, tmp_path)
    half_written = cache.folder / "layout.json.1.tmp"
    begin = tmp_path / "begin"

    def work() -> int:
        while not begin.exists():
            time.sleep(0.01)
        cache._clean()
        return 0

    child = spawn(work)  # before the lock, which it would inherit
    with locked(tmp_path / tap_cache.LOCK):  # as a process does before it writes there
        half_written.touch()
        begin.touch()
        time.sleep(0.3)
        assert half_written.exists()
    assert os.waitpid(child, 0)[1] == 0
    assert not half_written.exists()


def test_removed_cache_can_be_read_by_those_who_have_it_open(target, tmp_path):
    cache = cache_of(target, tmp_path)
    before = cache.batch([3])
    cache.remove()
    assert not cache.folder.exists()
    assert torch.equal(cache.batch([3]).taps, before.taps)


CHANGES = {
    "taps": lambda target: target.tap((1,)),
    "target": lambda target: target.head.weight.data.neg_(),
    "dtype": lambda target: target.model.float(),
    "length": {"length": 10},
    "store": {"key": "k2"},
    "packing": {"packing": True},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_caches_have_other_names_for_other_contents(target, tmp_path, change):
    target.tap((LAST,))
    first = cache_of(target, tmp_path)
    if callable(change):
        change(target)
    other = cache_of(target, tmp_path, **({} if callable(change) else change))
    assert other.folder != first.folder
