"""Every kind of file is read, or refused in one line; damaged records are set aside by their line."""

import bz2
import gzip
import json
import lzma
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from decode.errors import UserError
from distill.prompts.sources import Source, read_prompts

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


SQUAD = {
    "title": "t",
    "paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": [{"text": "a"}]}]}],
}
OTHERS = {  # file -> its content, columns, texts of each prompt, and what is not read
    "p.txt": ("\ufefffirst\n\n zwei ü \r\n".encode(), {}, [["first"], ["zwei ü"]], {}),
    "p.txt.gz": (gzip.compress(b"one\ntwo\n"), {}, [["one"], ["two"]], {}),
    "p.json": (b'{\n"wish": "q"}', {"prompt": "wish"}, [["q"]], {}),
    "squad.json": (
        json.dumps({"data": [SQUAD, SQUAD | {"paragraphs": []}], "version": "2"}).encode(),
        {},
        [["c\n\nq", "a"]],
        {"title": 1, "version": 1},
    ),
    "rows.json": (
        b'{"rows": [{"row_idx": 0, "row": {"prompt": "q"}}]}',
        {"prompt": "row.prompt"},
        [["q"]],
        {"row_idx": 1},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_are_read(name, tmp_path):
    data, columns, said, unread = OTHERS[name]
    (tmp_path / name).write_bytes(data)
    reading = Source(path=str(tmp_path / name), columns=columns).read(strict=True)
    assert [[m["content"] for m in p.messages] for p in reading.prompts] == said
    assert reading.unread == unread


def test_lines_of_texts_are_ids(tmp_path):
    (tmp_path / "p.txt").write_bytes(OTHERS["p.txt"][0])
    assert [p.id for p in read_prompts(tmp_path / "p.txt")] == ["1", "3"]


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
    "rows.json": (OTHERS["rows.json"][0], r"row_idx, row; prompts\.columns"),
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
        assert (
            f"{options.get('max_bytes', 1_000_000):,} bytes (prompts.max_bytes)" in reading.rejected[0].reason
        )
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
