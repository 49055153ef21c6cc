"""The Arrow copy of a store's rows: hashed when it is made, checked when it is opened, then made again."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from stores import PLAN, fill

from distill.data import rows as module
from distill.data.rows import open_rows
from distill.rollouts.store import RolloutStore
from distill.utils.atomic_files import sha256


@pytest.fixture
def store(tmp_path) -> RolloutStore:
    """Two shards of four rows and one."""

    def rows(shard: int, prompts, count: int) -> list[dict]:
        plain = {"loss_mask": [0, 1, 1], "finish_reason": "stop", "ids": "given", "weight": 1.0}
        return [{"id": f"{shard}-{i}", "tokens": [1000 + shard, 2000 + i, 7]} | plain for i in range(count)]

    store = RolloutStore(tmp_path, PLAN, [])
    fill(store, rows)
    return store


def copy_of(store: RolloutStore) -> Path:
    (path,) = store.cache.glob("rows-*.arrow")
    return path


def stored(store: RolloutStore) -> list:
    return [r for i in range(store.shards) for r in pq.read_table(store.path(i)).to_pylist()]


def test_rows_are_of_the_shards(store, capsys):
    assert list(open_rows(store)) == stored(store)
    copy = copy_of(store)
    before = copy.stat().st_ino
    assert list(open_rows(store)) == stored(store)
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
def test_damaged_copy_is_made_again_with_a_line(name, store, capsys):
    open_rows(store)
    DAMAGE[name](copy_of(store))
    for said in (f"{copy_of(store)}: sha256 differs", ""):
        assert list(open_rows(store)) == stored(store)
        out = capsys.readouterr().out
        assert out.startswith(said)
        assert len(out.splitlines()) == bool(said)


def test_copy_is_hashed_once_in_a_process(store, monkeypatch):
    open_rows(store)
    read = []
    monkeypatch.setattr(module, "sha256", lambda path: read.append(path) or sha256(path))
    for _ in range(3):
        open_rows(store)
    assert len(read) <= 1


def test_copies_of_older_versions_and_of_other_rows_are_removed(store):
    old = [store.cache / "cache" / "parquet" / "x.arrow", store.cache / "rows-0.arrow"]
    for path in old:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    open_rows(store)
    assert not any(path.exists() for path in old)
    assert not (store.cache / "cache").exists()
