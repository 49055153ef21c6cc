"""Kinds of files: each is read, or refused in one line that says what reads it; damage is one line too."""

import bz2
import gzip
import json
import lzma
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from decode.errors import UserError
from distill.prompts.sources import Source

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


SQUAD = {
    "title": "t",
    "paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": [{"text": "a"}]}]}],
}
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


def test_texts_are_read_compressed_as_well(tmp_path):
    (tmp_path / "p.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    assert len(Source(path=str(tmp_path / "p.txt.gz")).read(strict=True).prompts) == 2


def test_one_record_may_be_a_file(tmp_path):
    (tmp_path / "p.json").write_text(json.dumps({"wish": "q"}, indent=1))
    (prompt,) = Source(path=str(tmp_path / "p.json"), columns={"prompt": "wish"}).read(strict=True).prompts
    assert prompt.messages[0]["content"] == "q"


def test_squads_own_file_is_read(tmp_path):
    (tmp_path / "train.json").write_text(
        json.dumps({"data": [SQUAD, SQUAD | {"paragraphs": []}], "version": "2"})
    )
    reading = Source(path=str(tmp_path / "train.json")).read(strict=True)
    assert [[m["content"] for m in p.messages] for p in reading.prompts] == [["c\n\nq", "a"]]
    assert reading.unread == {"title": 1, "version": 1}


REFUSED = {
    "p.zip": (b"PK\x03\x04rest", "a zip archive or a workbook; unpack it, or save it as CSV"),
    "p.xlsx": (b"PK\x03\x04rest", "save it as CSV"),
    "p.arrow": (b"ARROW1\0\0", r"prompts\.dataset=arrow prompts\.files="),
    "p.jsonl.tar.gz": (gzip.compress(b"\0" * 257 + b"ustar" + b"\0" * 300), "a tar archive; unpack it"),
    "utf16.jsonl": (LINES.decode().encode("utf-16"), "UTF-16; save it as UTF-8"),
    "cut.jsonl.gz": (gzip.compress(LINES * 50)[:-20], "cannot be read to its end"),
    "flipped.jsonl.gz": (gzip.compress(LINES * 50)[:40] + b"\0\0\0\0" * 9, "cannot be read to its end"),
    "cut.jsonl.zst": (zstd(LINES * 50)[:-20], "cannot be read to its end"),
    "cut.jsonl.xz": (lzma.compress(LINES * 50)[:-20], "cannot be read to its end"),
    "cut.jsonl.bz2": (bz2.compress(LINES * 50)[:-20], "cannot be read to its end"),
    "cut.parquet": (b"PAR1" + b"\0" * 40, "cannot be read as Parquet"),
    "columns.json": (
        b'{"a": {"0": "q"}, "b": {"0": "a"}}',
        "an object with a, b, and no single list of records",
    ),
    "two.json": (b'{"train": [{"prompt": "q"}], "test": [{"prompt": "q"}]}', "object with train, test"),
    "names.csv": (
        b"first question,first answer\nq,a\n",
        r"it has first question, first answer; .*prompts\.columns",
    ),
    "empty.csv": (b"", "no column that says what is asked"),
    "old-mac.csv": (b"prompt\rq\rr\r", "its first line has no names of columns"),
    "twice.csv": (b"prompt,prompt\nq,r\n", "two columns have one name"),
    "long.csv": (
        b"prompt\n" + b"x" * 2_000_000,
        r":2: a line longer than 1,000,000 bytes \(prompts\.max_bytes\)",
    ),
    "twice.json": (
        b'{"data": [{"prompt": "q", "prompt": "r"}]}',
        "the key 'prompt' stands twice in an object",
    ),
    "rows.json": (b'{"rows": [{"row_idx": 0, "row": {"prompt": "q"}}]}', r"row_idx, row; prompts\.columns"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_not_read_is_one_line(name, tmp_path):
    data, said = REFUSED[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=said) as caught:
        Source(path=str(tmp_path / name)).read(strict=False)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_a_path_reads_the_rows_of_an_export(tmp_path):
    (tmp_path / "p.json").write_text('{"rows": [{"row_idx": 0, "row": {"prompt": "q"}}]}')
    reading = Source(path=str(tmp_path / "p.json"), columns={"prompt": "row.prompt"}).read(strict=True)
    assert (len(reading.prompts), reading.unread) == (1, {"row_idx": 1})


def test_rows_that_are_broken_are_set_aside_by_line(tmp_path):
    rows = (
        b'id,prompt\n1,"q\n\nq"\n2\n3,"q" r\n\n4,\xff\n5,q,r\n6,r\n7,'
        + b"x" * 900
        + b'\n8,"never ends\n9,s\n'
    )
    (tmp_path / "p.csv").write_bytes(rows)
    with pytest.raises(UserError, match=":11: a line longer than 800 bytes"):
        Source(path=str(tmp_path / "p.csv"), max_bytes=800).read(strict=False)
    (tmp_path / "p.csv").write_bytes(rows.replace(b"x" * 900, b"x"))
    reading = Source(path=str(tmp_path / "p.csv"), max_bytes=800).read(strict=False)
    assert [p.id for p in reading.prompts] == ["1", "6", "7"]
    said = [(r.line, r.reason) for r in reading.rejected]
    assert [line for line, _ in said] == [5, 6, 8, 9, 12]
    assert "1 cells, and there are 2 names" in said[0][1]
    assert "not CSV" in said[1][1]
    assert said[2][1] == "not UTF-8"
    assert "3 cells" in said[3][1]
    assert "not CSV" in said[4][1]


def test_a_key_that_stands_twice_is_a_fault(tmp_path):
    lines = ['{"prompt": "q"}', '{"prompt": "r", "meta": {"a": 1, "a": 2}}', '{"prompt": "s"}']
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    (tmp_path / "p.json").write_text(f"[{', '.join(lines)}]")
    for name in ("p.jsonl", "p.json"):
        reading = Source(path=str(tmp_path / name)).read(strict=False)
        assert [p.messages[0]["content"] for p in reading.prompts] == ["q", "s"]
        assert [r.reason for r in reading.rejected] == ["the key 'a' stands twice in an object"]


def test_a_long_line_is_not_loaded_and_nul_bytes_are_no_json(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + b"\0" * 30_000_000 + b'\n{"prompt": "b"}\n\0\0\n')
    tracemalloc.start()
    reading = Source(path=str(path), max_bytes=1000).read(strict=False)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1_000_000
    assert [p.messages[0]["content"] for p in reading.prompts] == ["a", "b"]
    assert [r.line for r in reading.rejected] == [2, 4]


def test_columns_of_tables_that_are_skipped_are_named(tmp_path):
    rows = [{"prompt": "q", "pixels": [1], "source": "web"}, {"prompt": "r", "pixels": [2], "source": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    reading = Source(path=str(tmp_path / "p.parquet")).read(strict=True)
    assert reading.unread == {"pixels": 2, "source": 2}
    (tmp_path / "p.csv").write_text("prompt,source\nq,web\nr,\n")
    reading = Source(path=str(tmp_path / "p.csv")).read(strict=True)
    assert reading.unread == {"source": 1}
    said = "field `source` of 1 record was not read; prompts.columns={prompt: ...} maps fields"
    assert reading.unread_line() == f"{tmp_path}/p.csv: {said}"


def test_calls_of_a_table_have_no_nulls_of_other_calls(tmp_path):
    calls = [{"city": "Ulm"}, {"a": 1, "b": None}]
    talks = [
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
        ]
        for arguments in calls
    ]
    pq.write_table(pa.table({"messages": talks}), tmp_path / "p.parquet")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    read = {
        name: [
            p.messages[1]["tool_calls"][0]["function"]["arguments"]
            for p in Source(path=str(tmp_path / name)).read(strict=True).prompts
        ]
        for name in ("p.parquet", "p.jsonl")
    }
    assert read == {"p.parquet": [{"city": "Ulm"}, {"a": 1}], "p.jsonl": calls}


def test_names_that_stand_twice_in_a_table_are_faults(tmp_path):
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
