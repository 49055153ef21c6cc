"""Stores of rollouts in a given folder or at a url, and their notes."""

import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from dataclasses import asdict, replace

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from stores import PLAN, fill, make_writer, rows_of
from workbench import fork

from decode.errors import UserError
from distill.rollouts import store as module
from distill.rollouts.remote import Mirror
from distill.rollouts.shard import is_whole, write_shard
from distill.rollouts.store import SCHEMA, RolloutStore

VOCAB = 1000  # above the ids of the stores made here
OTHERS = {
    "target": ("u", r"answers of another target, /m/one \(t\), not of /m/one \(u\)"),
    "config": ("d", "another configuration of the target"),
    "tokenizer": ("l", "another tokenizer"),
    "dtype": ("bfloat16", "another dtype of the target, float32, and bfloat16 is wanted"),
    "sampler": ({"temperature": 0.5}, "another sampler, {'temperature': 1.0, .*, and {'temperature': 0.5}"),
    "prompts": ("q", "other prompts"),
    "stop": ([3, 4], "another rollout setting stop"),
}


@pytest.fixture(scope="module")
def made(parts, tmp_path_factory) -> RolloutStore:
    """An undisturbed store, which stays as it is."""
    store = RolloutStore(tmp_path_factory.mktemp("made"), PLAN, parts[2])
    fill(store, make_writer(parts[0], parts[1], PLAN))
    return store


@pytest.fixture
def straight(made) -> list[list[dict]]:
    """Its rows."""
    return rows_of(made)


@pytest.fixture
def store(made, parts, tmp_path) -> RolloutStore:
    """A copy of it."""
    shutil.copytree(made.folder, tmp_path / PLAN.key)
    return RolloutStore(tmp_path, PLAN, parts[2])


@pytest.fixture
def url(tmp_path) -> str:
    return f"file://{tmp_path / 'url'}"


@pytest.fixture
def at(parts, url):
    """Makes the store at the url, with a copy in a folder."""
    return lambda folder: RolloutStore(folder, PLAN, parts[2], url)


def refuse(*work):
    pytest.fail("a shard was made again")


def parquets(folder) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*.parquet"))}


def remake(store: RolloutStore) -> None:
    fill(store, refuse)
    store.check()


# -- what a store says ---------------------------------------------------------------------------


def test_manifest_counts_and_hashes(parts, writer, tmp_path):
    origin = {"target": "owner/name", "revision": "abc"}
    store = RolloutStore(tmp_path, PLAN, parts[2], origin=origin)
    assert not store.complete
    fill(store, writer)
    assert store.complete
    manifest, shards = store.manifest(), rows_of(store)
    for shard, made in zip(manifest["shards"], shards, strict=True):
        assert shard["rows"] == len(made)
        assert shard["answer_tokens"] == sum(sum(row["loss_mask"]) for row in made)
        assert shard["sha256"] == hashlib.sha256((store.folder / shard["file"]).read_bytes()).hexdigest()
    rows = [row for shard in shards for row in shard]
    answered = sum(sum(r["loss_mask"]) for r in rows)
    assert manifest["counts"] == {
        "rows": len(rows),
        "prompt_tokens": sum(len(r["tokens"]) for r in rows) - answered,
        "answer_tokens": answered,
        "finish_reason": Counter(row["finish_reason"] for row in rows),
        "ids": {"exact": len(rows)},
    }
    assert (manifest["key"], manifest["origin"]) == (PLAN.key, origin)
    assert manifest["plan"] == json.loads(json.dumps(asdict(PLAN)))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    assert versions.items() <= manifest["versions"].items()
    texts = [(t.tokens.tolist(), t.loss_mask.tolist()) for t in store.texts()]
    assert texts == [(r["tokens"], r["loss_mask"]) for r in rows]


def test_shards_are_read_by_datasets(store, straight, tmp_path):
    files = sorted(str(p) for p in store.folder.glob("*.parquet"))
    read = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "c"))
    assert read.to_list() == [row for shard in straight for row in shard]


def test_shard_carries_plan_and_number(store):
    assert is_whole(store.path(1), PLAN.key, 1)
    assert not is_whole(store.path(1), PLAN.key, 2)
    assert not is_whole(store.path(1), replace(PLAN, seed=1).key, 1)
    data = store.path(1).read_bytes()
    store.path(1).write_bytes(data[:-40])
    assert not is_whole(store.path(1), PLAN.key, 1)


# -- a folder of the user's own ------------------------------------------------------------------


def test_given_folder_is_continued_and_reused(parts, writer, straight, tmp_path):
    mine, made = tmp_path / "mine", []
    fill(RolloutStore(tmp_path / "root", PLAN, parts[2], str(mine)), writer)
    assert {p.name for p in mine.glob("*.[jp]*")} == {"plan.json", "manifest.json", *parquets(mine)}
    (mine / "shard-00002.parquet").unlink()
    again = RolloutStore(tmp_path / "elsewhere", PLAN, parts[2], str(mine))
    fill(again, lambda shard, *work: made.append(shard) or writer(shard, *work))
    assert made == [2]
    assert again.complete
    assert rows_of(again) == straight
    assert not (tmp_path / "elsewhere").exists()


def test_store_with_an_older_kind_of_fingerprint_is_refused(parts, writer, tmp_path):
    store = RolloutStore(tmp_path, PLAN, parts[2], str(tmp_path / "mine"), {"target": "/m/one"})
    fill(store, writer)
    path = store.folder / "plan.json"
    path.write_text(path.read_text().replace(f'"schema": {SCHEMA}', f'"schema": {SCHEMA - 1}'))
    with pytest.raises(UserError, match=r"made by another version.*to make the answers again"):
        store.open()


@pytest.mark.parametrize(
    ("name", "begun"), [*((name, "finished") for name in OTHERS), ("target", "just begun")]
)
def test_store_of_another_plan_is_refused(name, begun, parts, writer, tmp_path):
    value, why = OTHERS[name]
    mine, origin = tmp_path / "mine", {"target": "/m/one", "revision": None}
    store = RolloutStore(tmp_path, PLAN, parts[2], str(mine), origin)
    store.open()
    if begun == "finished":
        fill(store, writer)
    before = parquets(mine)
    other = RolloutStore(tmp_path, replace(PLAN, **{name: value}), parts[2], str(mine), origin)
    with pytest.raises(UserError, match=rf"^{mine}: .*{why}.*give another rollout\.store$"):
        fill(other, refuse)
    url = RolloutStore(tmp_path / "b", replace(PLAN, **{name: value}), parts[2], f"file://{mine}", origin)
    with pytest.raises(UserError, match=f"^file://{mine}: .*{why}"):
        fill(url, refuse)
    assert parquets(mine) == before


def test_folder_that_is_no_store_is_refused(parts, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "shard-00000.parquet").write_text("")
    for name, said in (("file", "a file; "), ("old", r"shards without a plan\.json")):
        with pytest.raises(UserError, match=f"{name}: {said}"):
            fill(RolloutStore(tmp_path, PLAN, parts[2], str(tmp_path / name)), refuse)


def test_other_files_of_a_folder_stay(parts, writer, tmp_path):
    (tmp_path / "notes").mkdir()
    for name in ("notes/a.tmp", "b.tmp"):
        (tmp_path / name).write_text("not ours")
    fill(RolloutStore(tmp_path, PLAN, parts[2], str(tmp_path)), writer)
    assert (tmp_path / "notes" / "a.tmp").exists()
    assert (tmp_path / "b.tmp").exists()


@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "shard-00000.parquet"])
def test_link_out_of_a_store_is_refused(store, name, tmp_path):
    file = store.folder / name
    shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"{name}: a link to a file outside its folder"):
        remake(store)


def test_manifest_of_other_shards_is_refused(store):
    manifest, whole = store.folder / "manifest.json", {"rows": 1, "answer_tokens": 1, "sha256": ""}
    for shards, said in (
        ([], ": 0 shards, not "),
        ([whole | {"sha256": 5}], "no hashes or counts of a shard"),
        ([whole | {"rows": "1"}], "no hashes or counts of a shard"),
    ):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"shards": shards}))
        with pytest.raises(UserError, match=said):
            remake(store)


def test_malformed_moment_is_ignored(tmp_path):
    for plan in ([1], "x", {"moment": 5}, {"moment": [1]}, None):
        (tmp_path / "plan.json").write_text(json.dumps({"plan": plan}))
        assert module.moment_of(str(tmp_path)) is None


# -- rows that nobody here wrote -----------------------------------------------------------------


def forged(store: RolloutStore, change) -> None:
    """Change the second row of shard 1, and everything that is a hash of it."""
    rows = pq.read_table(store.path(1)).to_pylist()
    change(rows[1])
    write_shard(store.path(1), rows, PLAN.key, 1)
    (store.folder / "manifest.json").unlink()
    remake(store)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row["tokens"].__setitem__(0, VOCAB), f"token {VOCAB}, and the target has {VOCAB}"),
        (lambda row: row["tokens"].__setitem__(-1, -1), f"token -1, and the target has {VOCAB}"),
        (lambda row: row["tokens"].append(0), "tokens, and a loss mask of"),
        (lambda row: row["loss_mask"].pop(), "tokens, and a loss mask of"),
    ],
)
def test_row_that_is_no_answer_of_the_target_is_named(store, change, said):
    name = pq.read_table(store.path(1))["id"][1].as_py()
    store.check_rows(VOCAB)
    forged(store, change)
    with pytest.raises(UserError, match=rf"shard-00001\.parquet: row '{name}' has .*{said}"):
        store.check_rows(VOCAB)


def test_shard_of_other_columns_is_named(store):
    table = pq.read_table(store.path(1))
    for wrong in (
        table.drop_columns("tokens"),
        table.set_column(1, "tokens", pa.array([["a"]] * len(table))),
        table.set_column(1, "tokens", pa.array([[1, None]] * len(table), pa.list_(pa.int32()))),
    ):
        pq.write_table(wrong, store.path(1))
        with pytest.raises(UserError, match=r"shard-00001\.parquet: no shard of rollouts"):
            store.check_rows(VOCAB)


# -- damaged notes -------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[]", '"text"', "{}", '{"plan": 3, "schema": 3}'])
@pytest.mark.parametrize("name", ["plan.json", "manifest.json"])
def test_damaged_note_is_named_and_written_again_once_removed(name, text, store, straight):
    path = store.folder / name
    whole = path.read_text()
    path.write_text(text)
    with pytest.raises(UserError, match=rf"^{store.folder}\S*: [^\n]*$"):
        remake(store)
    path.unlink()
    remake(store)
    assert path.read_text() == whole
    assert rows_of(store) == straight


def test_manifest_is_written_again_for_unchanged_shards_only(store):
    (store.folder / "manifest.json").unlink()
    table = pq.read_table(store.path(1))
    rows = table.to_pylist()
    rows[0]["tokens"][0] += 1
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), store.path(1))
    with pytest.raises(UserError, match=r"shard-00001\.parquet: changed since it was made; delete it"):
        fill(store, refuse)


@pytest.mark.parametrize("name", ["plan.json", "manifest.json"])
def test_damaged_note_at_a_url_is_named(name, writer, tmp_path, at, url):
    fill(at(tmp_path / "a"), writer)
    (tmp_path / "url" / name).write_text("{")
    with pytest.raises(UserError, match=rf"{name}: damaged"):
        remake(at(tmp_path / "b"))


# -- a url ---------------------------------------------------------------------------------------


def test_machines_without_a_common_disk_share_a_url(writer, straight, tmp_path, at):
    log = tmp_path / "log"

    def machine(rank: int):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")

        def make(shard, *work):
            with log.open("a") as lines:
                lines.write(f"{rank} {shard}\n")
            return writer(shard, *work)

        store = at(tmp_path / str(rank))
        fill(store, make)
        store.check()
        return 0 if rows_of(store) == straight else 1

    child = os.fork()
    if not child:
        os._exit(machine(1))
    assert fork(lambda: machine(0)) == 0
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(log.read_text().split("\n")[:-1]) == ["0 0", "0 2", "1 1", "1 3"]
    here = tmp_path / "0" / PLAN.key
    assert parquets(here) == parquets(tmp_path / "1" / PLAN.key) == parquets(tmp_path / "url")
    names = {p.name for p in (tmp_path / "url").iterdir()}
    assert names == {*parquets(here), "plan.json", "manifest.json"}
    third = at(tmp_path / "third")
    fill(third, refuse)
    assert rows_of(third) == straight


def test_killed_rank_makes_its_shards_after_the_restart(writer, straight, tmp_path, monkeypatch, at):
    monkeypatch.setenv("WORLD_SIZE", "2")
    store = [at(tmp_path / str(rank)) for rank in (0, 1)]

    def dies(shard, *work):
        if shard == 3:
            os.kill(os.getpid(), 9)
        return writer(shard, *work)

    monkeypatch.setenv("RANK", "1")
    assert fork(lambda: fill(store[1], dies) or 0) == 9
    assert store[1].missing() == [0, 2, 3]
    child = os.fork()  # all ranks begin again, as a launcher sees to
    if not child:
        os.environ["RANK"] = "0"
        fill(store[0], writer)
        os._exit(0)
    made = []
    fill(store[1], lambda shard, *work: made.append(shard) or writer(shard, *work))
    assert os.waitpid(child, 0)[1] == 0
    assert made == [3]
    assert rows_of(store[0]) == rows_of(store[1]) == straight


def test_shard_that_was_made_and_not_uploaded_is_uploaded(writer, straight, tmp_path, monkeypatch, at):
    store = at(tmp_path / "a")
    put, kept = Mirror.put, []

    def cut(self, file):
        if file.name == "shard-00002.parquet":
            kept.append(file)
            raise ConnectionError("gone")
        return put(self, file)

    with monkeypatch.context() as spoilt:
        spoilt.setattr(Mirror, "put", cut)
        with pytest.raises(ConnectionError):
            fill(store, writer)
    assert kept[0].exists()
    (tmp_path / "url" / "shard-00003.parquet.other-1.tmp").write_text("half")
    made = []
    fill(store, lambda shard, *work: made.append(shard) or writer(shard, *work))
    assert made == [3]
    assert parquets(tmp_path / "url") == parquets(store.folder)
    assert not list((tmp_path / "url").glob("*.tmp"))


def test_shard_of_a_faster_machine_is_kept(writer, straight, tmp_path, at):
    first, second = (at(tmp_path / name) for name in "ab")

    def slow(shard, *work):
        if shard == 0:
            fill(first, writer)
        rows = writer(shard, *work)
        rows[0]["weight"] = 0.5  # as rounding on another machine would differ
        return rows

    fill(second, slow)
    second.check()
    assert rows_of(second) == rows_of(first) == straight


def test_shard_that_was_changed_at_the_url_is_not_taken(writer, tmp_path, at, url):
    fill(at(tmp_path / "a"), writer)
    shard = tmp_path / "url" / "shard-00001.parquet"
    shard.write_bytes((tmp_path / "url" / "shard-00000.parquet").read_bytes())
    with pytest.raises(UserError, match=rf"{url}/shard-00001\.parquet: not what was written there"):
        fill(at(tmp_path / "b"), refuse)
    shard.unlink()
    fill(at(tmp_path / "b"), writer)
    assert shard.exists()


def test_object_store_needs_no_rename(parts, writer, straight, tmp_path, monkeypatch):
    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(type(memory), "mv", lambda *a: pytest.fail("a copy, where one PUT is atomic"))
    fill(RolloutStore(tmp_path / "a", PLAN, parts[2], "memory://bucket/store"), writer)
    store = RolloutStore(tmp_path / "b", PLAN, parts[2], "memory://bucket/store/")
    fill(store, refuse)
    assert rows_of(store) == straight
    memory.rm("/bucket", recursive=True)


def test_url_that_cannot_be_used_is_one_line(parts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for url, why in (("s3://b/x", "[Ii]nstall s3fs.*pip install"), ("ftq://b", "ftq")):
        with pytest.raises(UserError, match=rf"^rollout\.store={url}: .*{why}") as caught:
            RolloutStore(tmp_path, PLAN, parts[2], url)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["folder", "url"])
def test_store_is_not_listed_for_every_shard(tmp_path, monkeypatch, place):
    """A million prompts are some 4,000 shards."""
    monkeypatch.setattr(module, "EVERY", 3600.0)
    listed, told = [], []
    for owner, name in ((RolloutStore, "missing"), (Mirror, "names")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, real=real: listed.append(real) or real(self))
    url = f"file://{tmp_path / 'there'}" if place == "url" else None
    store = RolloutStore(tmp_path / "here", replace(PLAN, self_prompts=40, shard_size=1), [], url)
    store.fill(lambda shard, prompts, count: [], told.append)
    assert told == [*range(39, -1, -1), 0]
    assert max(Counter(listed).values()) <= 4
    assert store.complete
    assert {"prompt_tokens": 0, "answer_tokens": 0}.items() <= store.manifest()["counts"].items()
