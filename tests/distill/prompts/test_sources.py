"""Files and datasets of prompts: what is read, refused or set aside by line, and mixtures of sources."""

import bz2
import gzip
import json
import lzma
import re
import tracemalloc
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from workbench import CONF, ROOT

from decode.errors import UserError
from distill.config.compose import compose
from distill.prompts.mixing import mix, shares
from distill.prompts.prompt import split
from distill.prompts.sources import Source, to_sources

DATA = ROOT.parent / "shared" / "data"


def texts(prompts) -> list[str]:
    return [p.messages[0]["content"] for p in prompts]


def write(path: Path, *records) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def numbered(path: Path, count: int, first: int = 0) -> Source:
    return Source(path=write(path, *({"prompt": f"question {i}"} for i in range(first, first + count))))


@pytest.fixture
def local_dataset(tmp_path, monkeypatch) -> str:
    """A folder with two splits, whose records have names of their own and a column nobody wants."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    for name, count in (("train", 6), ("test", 2)):
        write(folder / f"{name}.jsonl", *({"wish": f"{name} {i}", "pixels": [i] * 9} for i in range(count)))
    return str(folder)


def test_dataset_is_read_by_its_columns(local_dataset):
    columns = {"prompt": "wish"}
    train = Source(dataset=local_dataset, split="train", columns=columns)
    assert texts(train.read(True).prompts) == [f"train {i}" for i in range(6)]
    files = {"dataset": "json", "files": f"{local_dataset}/test.jsonl"}
    for place in ({"dataset": local_dataset, "split": "test"}, files):
        assert texts(Source(**place, columns=columns).read(True).prompts) == ["test 0", "test 1"]


@pytest.fixture
def address(tmp_path) -> Iterator[str]:
    """Address of a server that has the folder's files."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_entries_of_a_mixture_read_urls(tmp_path, address, monkeypatch):
    """They are told apart in ids and messages, where no key of an address appears."""
    config = {"HF_DATASETS_CACHE": tmp_path / "cache", "DOWNLOADED_DATASETS_PATH": tmp_path / "downloads"}
    for name, value in (config | {"HF_HUB_OFFLINE": False, "HF_UPDATE_DOWNLOAD_COUNTS": False}).items():
        monkeypatch.setattr(datasets.config, name, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    code = [{"instruction": f"write {i}", "input": "", "response": "def"} for i in range(8)]
    (tmp_path / "code.json").write_text(json.dumps(code, indent=4))
    write(tmp_path / "sums.jsonl", *({"wish": f"add {i}"} for i in range(2)))
    words = [
        f"{{dataset: json, files: '{address}/code.json?key=secret', answers: drop, weight: 4}}",
        f"{{dataset: json, files: '{address}/sums.jsonl', columns: {{prompt: wish}}}}",
    ]
    options = compose(["prompts=mix", f"prompts.sources=[{', '.join(words)}]"], CONF).prompts
    sources = to_sources(json.loads(json.dumps(OmegaConf.to_container(options))))
    mixed = mix([one.read(strict=True) for one in sources], 10)
    assert sorted(texts(mixed)) == [*(f"add {i}" for i in range(2)), *(f"write {i}" for i in range(8))]
    assert all(len(prompt.messages) == 1 for prompt in mixed), "answers are to be dropped"
    assert [one.label for one in sources] == ["json/code.json/train", "json/sums.jsonl/train"]
    assert {prompt.id.partition("/")[0] for prompt in mixed} == {"code", "sums"}
    assert Source(dataset="owner/name", files="a.json").label == "owner/name/train"


def test_wrong_dataset_is_one_line(local_dataset):
    for options, said in (
        ({"columns": {"prompt": "qury"}}, "no column 'qury'; it has wish, pixels"),
        ({}, "no column with a question; it has wish, pixels"),
        ({"split": "dev", "columns": {"prompt": "wish"}}, "prompts.dataset="),
        ({"name": "other", "columns": {"prompt": "wish"}}, "prompts.dataset="),
    ):
        with pytest.raises(UserError, match=said) as caught:
            Source(dataset=local_dataset, **options).read(False)
        assert "\n" not in str(caught.value)


def test_duplicates_are_dropped_and_equal_ids_are_numbered(tmp_path):
    good = {"prompt": "fine"}
    named = ({"id": "x", "prompt": str(n)} for n in (1, 2, 3))
    first = Source(path=write(tmp_path / "a.jsonl", next(named), next(named), good))
    second = Source(path=write(tmp_path / "b.jsonl", good, good, next(named)))
    assert [p.id for p in mix([first.read(True)], 0)] == ["x", "x~2", "3"]
    readings = [first.read(True), second.read(True)]
    mixed = mix(readings, 6)
    assert [r.duplicates for r in readings] == [0, 2]
    assert sorted(p.id for p in mixed) == ["a/3", "a/x", "a/x~2", "b/x"]
    with pytest.raises(UserError, match=r"a\.jsonl: all its prompts are in earlier sources"):
        mix([first.read(True), first.read(True)], 0)


def test_shares_are_by_weight():
    assert shares([100], [3], 0) == [100]
    assert shares([1000, 300], [2, 1], 0) == [600, 300]
    assert shares([1000, 1000, 1000], [1, 1, 1], 100) == [34, 33, 33]
    assert shares([1000, 10, 1000], [1, 1, 2], 400) == [130, 10, 260]


@given(
    parts=st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 100)), min_size=1, max_size=5),
    limit=st.integers(1, 300),
)
def test_shares_fill_the_limit(parts, limit):
    counts, weights = zip(*parts, strict=True)
    taken = shares(counts, weights, limit)
    assert sum(taken) == min(limit, sum(counts))
    assert all(0 <= t <= c for t, c in zip(taken, counts, strict=True))
    free = [(t, w) for t, c, w in zip(taken, counts, weights, strict=True) if t < c]
    for t, w in free:  # sources that have more are in ratio, but for rounding
        whole = sum(t for t, _ in free) * w / sum(w for _, w in free)
        assert abs(t - whole) <= 1 + 1e-6


def test_mixture_is_a_fair_sample_in_any_order_of_lines(tmp_path):
    a, b = numbered(tmp_path / "a.jsonl", 300), numbered(tmp_path / "b.jsonl", 300, first=500)
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "turned").mkdir()
    (tmp_path / "turned" / "a.jsonl").write_text("".join(reversed(lines)))
    turned = Source(path=str(tmp_path / "turned" / "a.jsonl"), weight=2)
    a = Source(path=a.path, weight=2)
    mixed = mix([a.read(True), b.read(True)], 150)
    assert sum(p.id.startswith("a/") for p in mixed) == 100
    assert texts(mixed) == texts(mix([turned.read(True), b.read(True)], 150))
    assert len({p.id for p in mixed}) == 150
    assert 20 < sum(p.id.startswith("b/") for p in mixed[:100]) < 47, "the sources are not mixed"
    some = [int(t.split()[1]) for t in texts(mix([a.read(True)], 60))]
    assert 100 < sum(some) / 60 < 200, "no fair sample"
    assert set(texts(mix([a.read(True)], 30))) < set(texts(mix([a.read(True)], 60)))
    held = split(mix([a.read(True)], 60), 0.2)[1]
    assert 2 < len(held) < 30, "the sample and the split are by the same hash"


def source(name: str, *more: str) -> Source:
    cfg = compose([f"prompts={name}", *more], CONF)
    (only,) = to_sources(json.loads(json.dumps(dict(cfg.prompts), default=dict)))
    return only


@pytest.mark.skipif(not DATA.is_dir(), reason="not on this machine")
@pytest.mark.parametrize(
    ("name", "file", "count", "turns"),
    [
        ("gsm8k", "eval/gsm8k.test.jsonl", 1319, 1),
        ("humaneval", "eval/HumanEval.jsonl", 164, 1),
        ("spec_bench", "eval/spec_bench.question.jsonl", 480, 2),
        ("jsonl", "train/gpteacher.toolformer.json", 7673, 1),
        ("jsonl", "train/sgd_dialogues.train.jsonl", 12174, 4),
    ],
)
def test_real_files_are_read_by_their_yaml(name, file, count, turns):
    reading = source(name, f"prompts.path={DATA / file}").read(strict=False)
    assert reading.records == count
    assert len(reading.rejected) <= 0.001 * count, [str(r) for r in reading.rejected[:3]]
    asked = [sum(m["role"] == "user" for m in p.messages) for p in reading.prompts]
    assert max(asked) >= turns
    if name in ("gsm8k", "humaneval"):
        assert all([m["role"] for m in p.messages] == ["user", "assistant"] for p in reading.prompts)


DATASETS = {
    "gsm8k": {"question": "q", "answer": "a"},
    "ultrachat": {"prompt": "q", "prompt_id": "p", "messages": [{"role": "user", "content": "q"}]},
    "sharegpt": {"id": "x", "conversations": [{"from": "human", "value": "q"}]},
    "humaneval": {"task_id": "t", "prompt": "q", "canonical_solution": "a", "test": "x"},
    "mt_bench": {"question_id": 81, "category": "c", "turns": ["q", "r"]},
    "spec_bench": {"question_id": 81, "category": "c", "turns": ["q"]},
}


@pytest.mark.parametrize("name", DATASETS)
def test_yaml_of_a_dataset_reads_its_rows(name, monkeypatch):
    asked = []

    def load(*names, **options):
        asked.append((names, options))
        return datasets.Dataset.from_list([DATASETS[name]])

    monkeypatch.setattr(datasets, "load_dataset", load)
    (prompt,) = source(name).read(strict=True).prompts
    assert texts([prompt]) == ["q"]
    answers = [m for m in prompt.messages if m["role"] == "assistant"]
    assert len(answers) == (name in ("gsm8k", "humaneval"))
    ((names, options),) = asked
    assert names[0] in ("json", source(name).dataset)
    assert options.keys() == {"data_files", "split", "revision"}, "no code of a dataset is trusted"


def test_code_experiment_asks_for_code_and_sums_and_drops_answers(monkeypatch):
    records = {
        "json": {"instruction": "write", "input": "", "response": "def"},
        "openai/gsm8k": {"question": "add", "answer": "2"},
    }
    loaded = {name: datasets.Dataset.from_list([record]) for name, record in records.items()}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *_, **options: loaded[name])
    options = compose(["experiment=qwen_coder"], CONF).prompts
    code, sums = sources = to_sources(json.loads(json.dumps(OmegaConf.to_container(options))))
    assert [source.label for source in sources] == [
        "json/codegen-instruct.json/train",
        "openai/gsm8k/main/train",
    ]
    assert (code.weight, sums.weight) == (4, 1)
    assert re.search("/[0-9a-f]{40}/", str(code.files)), "a branch would move"
    read = [source.read(strict=True).prompts[0].messages for source in sources]
    assert [[m["content"] for m in messages] for messages in read] == [["write"], ["add"]]


RECORDS = [{"question": f'q{i}, "so"\n{i}', "answer": f"a{i}", "weight": i} for i in range(4)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
CELLS = ["question", *(f'"{r["question"].replace(chr(34), chr(34) * 2)}"' for r in RECORDS)]


def table(mark: str, end: str = "\n") -> bytes:
    rows = zip(CELLS, ["answer", *(r["answer"] for r in RECORDS)], ["weight", *"0123"], strict=True)
    return "".join(mark.join(row) + end for row in rows).encode()


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


def parquet(path) -> bytes:
    pq.write_table(pa.Table.from_pylist(RECORDS), path)
    return path.read_bytes()


KINDS = {
    "p.jsonl": LINES,
    "marked.jsonl": b"\xef\xbb\xbf" + LINES,
    "crlf.jsonl": LINES.replace(b"\n", b"\r\n"),
    "list.json": json.dumps(RECORDS, indent=1).encode(),
    "list.jsonl": json.dumps(RECORDS).encode(),
    "lines.json": LINES,
    "object.json": json.dumps({"version": 1, "data": RECORDS}).encode(),
    "pretty.json": json.dumps({"data": RECORDS}, indent=2).encode(),
    "p.csv": table(","),
    "marked.csv": b"\xef\xbb\xbf" + table(","),
    "crlf.csv": table(",", "\r\n"),
    "german.csv": table(";"),
    "p.tsv": table("\t"),
    "p.jsonl.gz": gzip.compress(LINES),
    "p.json.gz": gzip.compress(json.dumps(RECORDS).encode()),
    "p.csv.gz": gzip.compress(table(",")),
    "unnamed.jsonl": gzip.compress(LINES),
    "p.jsonl.bz2": bz2.compress(LINES),
    "p.jsonl.xz": lzma.compress(LINES),
    "p.jsonl.zst": zstd(LINES),
    "p.csv.zst": zstd(table(",")),
    "p.data": LINES,
}


@pytest.mark.parametrize("name", [*KINDS, "p.parquet", "parquet.data"])
def test_every_kind_of_file_gives_the_same_prompts(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(KINDS[name] if name in KINDS else parquet(tmp_path / "made"))
    reading = Source(path=str(path)).read(strict=True)
    said = [(*(m["content"].replace("\r\n", "\n") for m in p.messages), p.weight) for p in reading.prompts]
    assert said == [(r["question"], r["answer"], r["weight"]) for r in RECORDS]
    assert reading.unread == ({"version": 1} if name == "object.json" else {})


ASKED = {"question": "q", "answers": [{"text": "a"}]}
SQUAD = {"title": "t", "paragraphs": [{"context": "c", "qas": [ASKED]}]}
SQUADS = json.dumps({"data": [SQUAD, SQUAD | {"paragraphs": []}], "version": "2"}).encode()
ROWS = b'{"rows": [{"row_idx": 0, "row": {"prompt": "q"}}]}'
OTHERS = {  # file -> its content, columns, texts of each prompt, and what is not read
    "p.txt": ("\ufefffirst\n\n zwei ü \r\n".encode(), {}, [["first"], ["zwei ü"]], {}),
    "p.txt.gz": (gzip.compress(b"one\ntwo\n"), {}, [["one"], ["two"]], {}),
    "p.json": (b'{\n"wish": "q"}', {"prompt": "wish"}, [["q"]], {}),
    "squad.json": (SQUADS, {}, [["c\n\nq", "a"]], {"title": 1, "version": 1}),
    "rows.json": (ROWS, {"prompt": "row.prompt"}, [["q"]], {"row_idx": 1}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_are_read(name, tmp_path):
    data, columns, said, unread = OTHERS[name]
    (tmp_path / name).write_bytes(data)
    reading = Source(path=str(tmp_path / name), columns=columns).read(strict=True)
    assert [[m["content"] for m in p.messages] for p in reading.prompts] == said
    assert reading.unread == unread
    if name == "p.txt":
        assert [p.id for p in reading.prompts] == ["1", "3"], "the numbers of their lines"


FEW = gzip.compress(LINES * 50)
UNREADABLE = "cannot be read to its end"
REFUSED = {
    "p.zip": (b"PK\x03\x04rest", "a zip archive or a workbook"),
    "p.xlsx": (b"PK\x03\x04rest", "save it as CSV"),
    "p.arrow": (b"ARROW1\0\0", r"prompts\.dataset=arrow prompts\.files="),
    "p.jsonl.tar.gz": (gzip.compress(b"\0" * 257 + b"ustar" + b"\0" * 300), "a tar archive"),
    "utf16.jsonl": (LINES.decode().encode("utf-16"), "UTF-16"),
    "cut.jsonl.gz": (FEW[:-20], UNREADABLE),
    "flipped.jsonl.gz": (FEW[:40] + b"\0\0\0\0" * 9, UNREADABLE),
    "cut.jsonl.zst": (zstd(LINES * 50)[:-20], UNREADABLE),
    "cut.jsonl.xz": (lzma.compress(LINES * 50)[:-20], UNREADABLE),
    "cut.jsonl.bz2": (bz2.compress(LINES * 50)[:-20], UNREADABLE),
    "cut.parquet": (b"PAR1" + b"\0" * 40, "cannot be read as Parquet"),
    "columns.json": (b'{"a": {"0": "q"}, "b": {"0": "a"}}', "an object with a, b, and no single list"),
    "two.json": (b'{"train": [{"prompt": "q"}], "test": [{"prompt": "q"}]}', "object with train, test"),
    "names.csv": (b"first question,first answer\nq,a\n", r"first question, first .*prompts\.columns"),
    "empty.csv": (b"", "no column with a question"),
    "old-mac.csv": (b"prompt\rq\rr\r", "its first line has no names of columns"),
    "twice.csv": (b"prompt,prompt\nq,r\n", "two columns have one name"),
    "long.csv": (b"prompt\n" + b"x" * 2_000_000, r":2: .* 1,000,000 bytes \(prompts\.max_bytes\)"),
    "twice.json": (b'{"data": [{"prompt": "q", "prompt": "r"}]}', "the key 'prompt' stands twice"),
    "rows.json": (ROWS, r"row_idx, row; prompts\.columns"),
    "malformed.jsonl": (b"{}\n3\n", "malformed.jsonl:1: needs .*; .*no usable prompts"),
    **dict.fromkeys(("blank.jsonl", "blank.txt"), (b" \n", "no prompts in it")),
    "none.json": (b"[]", "no prompts in it"),
    "empty.json": (b"", "no prompts in it"),
    "folder": (None, r"a folder; prompts\.dataset="),
    "nowhere.jsonl": (None, "no such file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_file_that_cannot_be_read_is_one_line(name, tmp_path):
    data, said = REFUSED[name]
    (tmp_path / "folder").mkdir()
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=said) as caught:
        Source(path=str(tmp_path / name)).read(strict=False)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_broken_rows_of_csv_are_set_aside_by_line(tmp_path):
    rows = b'id,prompt\n1,"q\n\nq"\n2\n3,"q" r\n\n4,\xff\n5,q,r\n6,r\n7,LONG\n8,"never ends\n9,s\n'
    path = tmp_path / "p.csv"
    path.write_bytes(rows.replace(b"LONG", b"x" * 900))
    with pytest.raises(UserError, match=":11: a line longer than 800 bytes"):
        Source(path=str(path), max_bytes=800).read(strict=False)
    path.write_bytes(rows)
    reading = Source(path=str(path), max_bytes=800).read(strict=False)
    assert [p.id for p in reading.prompts] == ["1", "6", "7"]
    assert [r.line for r in reading.rejected] == [5, 6, 8, 9, 12]
    reasons = ["1 cells, and there are 2 names", "not CSV", "not UTF-8", "3 cells", "not CSV"]
    for rejected, reason in zip(reading.rejected, reasons, strict=True):
        assert reason in rejected.reason


def test_duplicate_key_is_a_fault(tmp_path):
    lines = ['{"prompt": "q"}', '{"prompt": "r", "meta": {"a": 1, "a": 2}}', '{"prompt": "s"}']
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    (tmp_path / "p.json").write_text(f"[{', '.join(lines)}]")
    for name in ("p.jsonl", "p.json"):
        reading = Source(path=str(tmp_path / name)).read(strict=False)
        assert [p.messages[0]["content"] for p in reading.prompts] == ["q", "s"]
        assert [r.reason for r in reading.rejected] == ["the key 'a' stands twice in an object"]


def test_long_records_are_set_aside_and_not_held(tmp_path):
    path, table = tmp_path / "p.jsonl", tmp_path / "p.parquet"
    long = json.dumps({"prompt": "x" * 1_000_000}).encode()
    path.write_bytes(b'{"prompt": "a"}\n' + long + b'\n{"prompt": "b"}\n' + b"\0" * 30_000_000 + b"\n\0\0\n")
    for options in ({}, {"max_bytes": 1000}):
        tracemalloc.start()
        reading = Source(path=str(path), **options).read(strict=False)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < (1_000_000 if options else 10_000_000)
        assert [p.messages[0]["content"] for p in reading.prompts] == ["a", "b"]
        assert [r.line for r in reading.rejected] == [2, 4, 5]
        assert all(len(r.raw) == 500 for r in reading.rejected[:2])
        said = f"{options.get('max_bytes', 1_000_000):,} bytes (prompts.max_bytes)"
        assert said in reading.rejected[0].reason
    path.write_bytes(long)
    assert len(Source(path=str(path), max_bytes=len(long)).read(strict=True).prompts) == 1
    pq.write_table(pa.table({"prompt": ["a", "x" * 101]}), table)
    assert len(Source(path=str(table), max_bytes=100).read(strict=False).rejected) == 1


def test_list_that_breaks_off_keeps_what_comes_before(tmp_path):
    path = tmp_path / "p.json"
    path.write_text('[\n{"prompt": "a"},\n{"prompt": 3},\n{"prompt": "b"},\n{"prompt": "c')
    reading = Source(path=str(path)).read(strict=False)
    assert [p.messages[0]["content"] for p in reading.prompts] == ["a", "b"]
    assert [r.line for r in reading.rejected] == [3, 5]
    assert "nothing after it was read" in reading.rejected[1].reason


def test_record_that_is_not_utf8_is_set_aside(tmp_path):
    (tmp_path / "p.json").write_bytes(b'[{"prompt": "a"},\n{"prompt": "\xff"}, {"prompt": "b"}]')
    broken = pa.array([b"a", b"\xff\xfe", b"b"])
    column = pa.Array.from_buffers(pa.string(), 3, broken.buffers())
    pq.write_table(pa.table({"prompt": column}), tmp_path / "p.parquet")
    for name in ("p.json", "p.parquet"):
        reading = Source(path=str(tmp_path / name)).read(strict=False)
        assert [p.messages[0]["content"] for p in reading.prompts] == ["a", "b"]
        assert [(r.line, r.reason) for r in reading.rejected] == [(2, "not UTF-8")]


def test_columns_that_are_not_read_are_named(tmp_path):
    rows = [{"prompt": "q", "pixels": [1], "source": "web"}, {"prompt": "r", "pixels": [2], "source": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    reading = Source(path=str(tmp_path / "p.parquet")).read(strict=True)
    assert reading.unread == {"pixels": 2, "source": 2}
    (tmp_path / "p.csv").write_text("prompt,source\nq,web\nr,\n")
    reading = Source(path=str(tmp_path / "p.csv")).read(strict=True)
    assert reading.unread == {"source": 1}
    assert reading.unread_line().startswith(f"{tmp_path}/p.csv: field `source` of 1 record was not read")


def test_calls_in_a_table_have_no_nulls_of_other_calls(tmp_path):
    calls = [{"city": "Ulm"}, {"a": 1, "b": None}]
    functions = [{"function": {"name": "f", "arguments": arguments}} for arguments in calls]
    talks = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [function]}]
        for function in functions
    ]
    pq.write_table(pa.table({"messages": talks}), tmp_path / "p.parquet")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    for name, read in (("p.parquet", [{"city": "Ulm"}, {"a": 1}]), ("p.jsonl", calls)):
        prompts = Source(path=str(tmp_path / name)).read(strict=True).prompts
        assert [p.messages[1]["tool_calls"][0]["function"]["arguments"] for p in prompts] == read


def test_duplicate_names_in_a_table_are_faults(tmp_path):
    columns = [pa.array(["q", "r"])] * 2
    pq.write_table(pa.table(columns, names=["prompt", "prompt"]), tmp_path / "columns.parquet")
    with pytest.raises(UserError, match="two columns have one name"):
        Source(path=str(tmp_path / "columns.parquet")).read(strict=False)
    texts = [pa.array(["user"]), pa.array(["a"]), pa.array(["b"])]
    fields = [pa.field(name, pa.string()) for name in ("role", "content", "content")]
    message = pa.StructArray.from_arrays(texts, fields=fields)
    table = pa.table({"messages": pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), message)})
    pq.write_table(table, tmp_path / "objects.parquet")
    with pytest.raises(UserError, match=r"objects\.parquet:1: an object in it has two fields of one name"):
        Source(path=str(tmp_path / "objects.parquet")).read(strict=False)
