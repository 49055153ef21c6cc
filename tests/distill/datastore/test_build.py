"""A datastore is made of texts once, is shared, and is complete or not there; its places are sorted."""

import errno
import json
import os
import resource
from contextlib import redirect_stderr
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from workbench import fork, make_target, make_tokenizer, options_of

from decode.errors import UserError
from decode.model.load import load_target
from decode.plan import Plan
from distill.cli.main import one_line_errors, rewrite
from distill.config.compose import compose
from distill.config.validate import check_paths
from distill.datastore import build
from distill.datastore.build import make_datastore
from distill.datastore.suffix_array import sort_places
from distill.utils.atomic_files import reserve
from distill.utils.paths import CONF
from drafters.drafting.datastore import TOKENS, Datastore, datastore_folder


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(str(make_target(tmp_path_factory.mktemp("target"))), "float32", "cpu")


def texts_of(key, tokenizer) -> list[str]:
    """The texts of a datastore, from its file of tokens."""
    tokens = np.fromfile(datastore_folder(key) / TOKENS, ">u2").tolist()
    texts, ids = [], []
    for token in tokens[: Datastore.open(key, tokenizer.vocab_size).size]:
        if token == 2**16 - 1:
            texts.append(tokenizer.decode(ids))
            ids = []
        else:
            ids.append(token)
    assert not ids, "the last text has no end"
    return texts


def lines(folder: Path, *records) -> Path:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_records_files_and_folders_are_read(tmp_path, target):
    folder = tmp_path / "texts"
    (folder / "code").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("not read")
    (folder / "code" / "a.py").write_text("def f():\n    return 1\n")
    (folder / "config.json").write_text('{"depth": 3}')
    (folder / "list.json").write_text('[{"text": "one"}, {"text": "two"}]')
    lines(folder, {"prompt": "hi", "answer": "hello"}, {"text": "plain"})
    pq.write_table(pa.table({"question": ["who?"], "answer": ["me"]}), folder / "table.parquet")
    key = make_datastore(str(folder), target)
    texts = ["def f():\n    return 1\n", '{"depth": 3}', "one", "two", "plain"]
    texts += [f"<|user|>{q}<|assistant|>{a}<|end|>" for q, a in (("hi", "hello"), ("who?", "me"))]
    assert sorted(texts_of(key, make_tokenizer())) == sorted(texts)


def test_without_a_chat_template_messages_are_joined(tmp_path):
    target = load_target(str(make_target(tmp_path / "base", template=None)), "float32", "cpu")
    key = make_datastore(str(lines(tmp_path, {"prompt": "hi", "answer": "hello"})), target)
    assert texts_of(key, make_tokenizer()) == ["hi\nhello"]


def test_long_file_is_read_in_pieces(tmp_path, target, monkeypatch):
    monkeypatch.setattr("distill.datastore.texts.PIECE", 10)
    monkeypatch.setattr(build, "BATCH", 25)
    text = "".join(f"line {i} of a file\n" for i in range(40))
    (tmp_path / "long.md").write_text(text)
    key = make_datastore(str(tmp_path / "long.md"), target)
    assert texts_of(key, make_tokenizer()) == [text]


def test_unreadable_texts_and_fields_are_named(tmp_path, target, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.bin").write_bytes(b"\xff\xfe\x00")
    lines(folder, {"text": "good", "source": "web", "id": 1}, {"nothing": 1}, {"text": 5})
    key = make_datastore(str(folder), target)
    assert texts_of(key, make_tokenizer()) == ["good"]
    said = capsys.readouterr().out
    for part in ("left out: ", "b.bin: not UTF-8", "and 2 more", "field `source` of 1 record was not read"):
        assert part in said


def test_nothing_to_read_is_refused(tmp_path, target):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "other.txt").write_bytes(b"\xff\xff")
    no_text = dict.fromkeys(("empty.txt", "other.txt"), "no text in it")
    for name, said in (no_text | {"gone": "no such file", "folder": "no files in it"}).items():
        with pytest.raises(UserError, match=f"drafter.store=.*{name}: {said}"):
            make_datastore(str(tmp_path / name), target)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix != ".lock" and path.is_file()]


def test_tokens_beyond_the_most_are_left_out(tmp_path, target, capsys):
    key = make_datastore(str(lines(tmp_path, {"text": "abcdef"}, {"text": "ghi"})), target, most=9)
    store = Datastore.open(key, target.vocab_size)
    assert store.size == 9
    assert "9 tokens (the most that one has)" in capsys.readouterr().out


def test_it_is_made_once(tmp_path, target, monkeypatch, capsys):
    path = lines(tmp_path, {"text": "once upon a time"})
    key = make_datastore(str(path), target)
    assert "16 tokens" not in capsys.readouterr().out  # and the separator
    monkeypatch.setattr(build, "sort_places", None)
    assert make_datastore(str(path), target) == key
    assert "17 tokens, indexed before" in capsys.readouterr().out


def test_other_texts_and_another_tokenizer_make_another(tmp_path, target):
    path = lines(tmp_path, {"text": "once"})
    keys = [make_datastore(str(path), target)]
    keys.append(make_datastore(str(path.rename(tmp_path / "renamed.jsonl")), target))
    lines(tmp_path, {"text": "twice"})
    keys.append(make_datastore(str(path), target))
    folder = make_target(tmp_path / "other")
    words = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(words))
    keys.append(make_datastore(str(path), load_target(str(folder), "float32", "cpu")))
    assert len(set(keys)) == 4


def test_damaged_one_is_refused_not_made_again(tmp_path, target):
    path = lines(tmp_path, {"text": "once upon a time"})
    key = make_datastore(str(path), target)
    (datastore_folder(key) / TOKENS).write_bytes(b"")
    with pytest.raises(UserError, match="damaged datastore"):
        make_datastore(str(path), target)


def test_one_that_is_not_finished_is_not_there(tmp_path, target, monkeypatch):
    path = lines(tmp_path, {"text": "once upon a time"})

    def interrupted(*_):
        raise KeyboardInterrupt
        yield

    with monkeypatch.context() as patch:
        patch.setattr(build, "sort_places", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make_datastore(str(path), target)
    root = datastore_folder("x").parent
    assert not [entry for entry in root.iterdir() if entry.is_dir()]
    key = make_datastore(str(path), target)
    (root / key).rename(root / f"{key}.1.tmp")  # of a writer that was killed
    assert make_datastore(str(path), target) == key
    assert [entry.name for entry in root.iterdir() if entry.is_dir()] == [key]


def _make(path, target, ready, results) -> None:
    ready.wait()
    made, write = [], build.write_datastore
    build.write_datastore = lambda *arguments: made.append(1) or write(*arguments)
    results.put((make_datastore(str(path), target), len(made)))


def test_of_two_processes_one_makes_it(tmp_path, target):
    path = lines(tmp_path, *({"text": f"text {i}"} for i in range(500)))
    context = get_context("fork")
    ready, results = context.Barrier(2), context.Queue()
    makers = [context.Process(target=_make, args=(path, target, ready, results)) for _ in range(2)]
    for maker in makers:
        maker.start()
    keys, made = zip(*(results.get(timeout=60) for _ in makers), strict=True)
    for maker in makers:
        maker.join(60)
    assert len({*keys}) == 1
    assert sum(made) == 1
    assert len(texts_of(keys[0], make_tokenizer())) == 500


def test_option_makes_it_and_the_drafter_opens_it(tmp_path, target):
    path = lines(tmp_path, {"text": "once upon a time"}, {"text": "once upon a hill"})
    suffix, union = (
        options_of(*words).drafter.build(target)
        for words in (
            ["drafter=suffix", f"drafter.store={path}"],
            ["drafter=union", "drafter.first=eagle", f"drafter.second.store={path}"],
        )
    )
    tokenizer = make_tokenizer()
    for drafter in (suffix, union.second):
        assert drafter.settings["store"] == str(path)
        (history,) = drafter.new_state(1)
        history.extend(tokenizer.encode("at once", add_special_tokens=False))
        assert tokenizer.decode([node.token for node in drafter.nodes(history, Plan(8))]) == " upon a "


@pytest.mark.parametrize("option", ["drafter=suffix drafter.store", "drafter=union drafter.second.store"])
def test_texts_that_are_not_there_are_refused_before_work_starts(option):
    words = [*f"{option}=/nowhere.jsonl".split()]
    with pytest.raises(UserError, match=r"store=/nowhere.jsonl: no such file or folder of texts"):
        check_paths(compose(rewrite(words, CONF), CONF))


@pytest.mark.parametrize("limit", [1000, 100_000])
def test_datastore_without_room_is_one_line_and_leaves_nothing(tmp_path, limit):
    """A limit on the size of files stands for a full disk; 1,000 bytes stop the tokens, more the places."""
    told = tmp_path / "said"

    def body() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with (
            told.open("w") as file,
            redirect_stderr(file),
            pytest.raises(SystemExit) as end,
            one_line_errors(),
        ):
            build.write_datastore(tmp_path / ("0" * 16), iter([np.ones(40_000, ">u2")]), 30)
        return end.value.code

    assert os.waitstatus_to_exitcode(fork(body)) == 1
    (said,) = told.read_text().splitlines()
    assert said.startswith(f"error: File too large ({tmp_path}/0000")
    assert [path.name for path in tmp_path.iterdir()] == ["said"]


def no_room(error: int):
    def fallocate(descriptor, offset, size):
        raise OSError(error, os.strerror(error))

    return fallocate


def test_places_are_reserved_before_they_are_mapped(tmp_path, monkeypatch):
    """A disk that gives no room says so there; writing to a mapped hole in a file ends the process."""
    monkeypatch.setattr(os, "posix_fallocate", no_room(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left") as error:
        build.write_datastore(tmp_path / ("0" * 16), iter([np.ones(40, ">u2")]), 30)
    assert "order.bin" in error.value.filename
    assert not list(tmp_path.iterdir())


def test_file_system_without_reservations_is_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", no_room(errno.EOPNOTSUPP))
    reserve(tmp_path / "x", 3 * 2**20 + 5)
    assert (tmp_path / "x").read_bytes() == bytes(3 * 2**20 + 5)


FEW = st.lists(st.integers(0, 2), max_size=60)  # so that many places are tied


def filled(tokens, kind, depth) -> np.ndarray:
    return np.array([*tokens, *[np.iinfo(kind).max] * depth]).astype(kind)


def by_hand(text, size, depth) -> list[int]:
    tokens = text.tolist()
    return sorted(range(size), key=lambda place: (tokens[place : place + depth], place))


@pytest.mark.parametrize("kind", [">u2", ">u4"])
@given(texts=st.one_of(FEW, st.lists(st.integers(0, 300), max_size=60)), bucket=st.integers(1, 70))
def test_places_are_sorted_by_the_tokens_behind_them(kind, texts, bucket):
    text, order = filled(texts, kind, 4), np.full(len(texts), 7, np.uint32)
    counts = list(sort_places(text, order, 4, bucket))
    assert sum(counts) == len(texts)
    assert order.tolist() == by_hand(text, len(texts), 4)


def test_repetitions_beyond_the_depth_are_sorted_by_place():
    text, order = filled([1, 2, 3] * 50, ">u2", 16), np.zeros(150, np.uint32)
    assert sum(sort_places(text, order, 16, 40)) == 150
    assert order.tolist() == by_hand(text, 150, 16)
