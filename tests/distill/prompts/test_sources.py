"""Files and datasets of prompts: formats, what is set aside, shares of a mixture."""

import json
import string
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workbench import CONF, ROOT, make_tokenizer

from decode.errors import UserError
from distill.config.compose import compose
from distill.prompts.chat_template import Chat
from distill.prompts.mixing import mix, shares
from distill.prompts.prompt import opening, split
from distill.prompts.sources import Source, read_prompts, to_sources

DATA = ROOT.parent / "shared" / "data"
GOOD = {"prompt": "fine"}


def texts(prompts) -> list[str]:
    return [p.messages[0]["content"] for p in prompts]


def write(path: Path, *records) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def numbered(path: Path, count: int, first: int = 0) -> Source:
    return Source(path=write(path, *({"prompt": f"question {i}"} for i in range(first, first + count))))


def test_every_file_format_gives_the_same_prompts(tmp_path):
    records = [{"question": f"q{i}", "answer": f"a{i}", "key": f"k{i}"} for i in range(5)]
    files = [tmp_path / name for name in ("p.jsonl", "p.json", "lines.json", "p.parquet", "p.data")]
    for file in files:
        write(file, *records)
    files[1].write_text(json.dumps(records, indent=1))
    pq.write_table(pa.Table.from_pylist(records), files[3])
    for file in files:
        prompts = Source(path=str(file), columns={"id": "key"}).read(strict=True).prompts
        assert [p.id for p in prompts] == [f"k{i}" for i in range(5)]
        assert [[m["content"] for m in p.messages] for p in prompts] == [[f"q{i}", f"a{i}"] for i in range(5)]


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    (tmp_path / "p.txt").write_bytes("\ufefffirst\n\n zwei ü \r\n".encode())
    prompts = read_prompts(tmp_path / "p.txt")
    assert [(p.id, *texts([p])) for p in prompts] == [("1", "first"), ("3", "zwei ü")]


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    plain = numbered(tmp_path / "p.jsonl", 2)
    (tmp_path / "marked.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "p.jsonl").read_bytes())
    marked = read_prompts(tmp_path / "marked.jsonl")
    assert [replace(p, file=plain.path) for p in marked] == plain.read(True).prompts


@pytest.fixture
def local_dataset(tmp_path, monkeypatch) -> str:
    """A folder with two splits, whose records have names of their own and a column nobody wants."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    for name, count in (("train", 6), ("test", 2)):
        write(folder / f"{name}.jsonl", *({"wish": f"{name} {i}", "pixels": [i] * 9} for i in range(count)))
    return str(folder)


def test_a_dataset_is_read_by_its_columns(local_dataset):
    columns = {"prompt": "wish"}
    train, test = (
        Source(dataset=local_dataset, split=s, columns=columns).read(True) for s in ("train", "test")
    )
    assert texts(train.prompts) == [f"train {i}" for i in range(6)]
    assert texts(test.prompts) == ["test 0", "test 1"]
    one = Source(dataset="json", files=f"{local_dataset}/test.jsonl", columns=columns)
    assert texts(one.read(True).prompts) == ["test 0", "test 1"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": {"prompt": "qury"}}, "no column 'qury'; it has wish, pixels"),
        ({}, "no column that says what is asked; it has wish, pixels"),
        ({"split": "dev", "columns": {"prompt": "wish"}}, "prompts.dataset="),
        ({"name": "other", "columns": {"prompt": "wish"}}, "prompts.dataset="),
    ],
)
def test_what_is_wrong_with_a_dataset_is_one_line(options, said, local_dataset):
    with pytest.raises(UserError, match=said) as caught:
        Source(dataset=local_dataset, **options).read(False)
    assert "\n" not in str(caught.value)


def test_what_is_wrong_with_a_file_is_one_line(tmp_path):
    (tmp_path / "p.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        read_prompts(tmp_path / "p.parquet")
    with pytest.raises(UserError, match=r"a folder; prompts\.dataset="):
        read_prompts(tmp_path)
    with pytest.raises(UserError, match="no such file"):
        read_prompts(tmp_path / "nowhere.jsonl")
    for name, text in (("p.jsonl", "\n"), ("p.json", "[]"), ("p.txt", " \n"), ("q.json", "")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match="no prompts in it"):
            read_prompts(tmp_path / name)


def test_a_table_with_broken_text_names_the_row(tmp_path):
    broken = pa.array([b"fine", b"\xff\xfe", b"fine too"]).view(pa.binary()).cast(pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, broken.buffers())
    pq.write_table(pa.table({"prompt": text}), tmp_path / "p.parquet")
    reading = Source(path=str(tmp_path / "p.parquet")).read(False)
    assert texts(reading.prompts) == ["fine", "fine too"]
    assert [(r.line, r.reason) for r in reading.rejected] == [(2, "not UTF-8")]


def test_records_over_the_limit_are_set_aside_and_never_held(tmp_path):
    file = tmp_path / "p.jsonl"
    long = json.dumps({"prompt": "x" * 1_000_000}).encode()
    file.write_bytes(b"\n".join([b'{"prompt": "a"}', long, b'{"prompt": "b"}', long]))
    reading = Source(path=str(file)).read(False)
    assert texts(reading.prompts) == ["a", "b"]
    assert [(r.line, r.reason) for r in reading.rejected] == [
        (n, "longer than 1,000,000 bytes (prompts.max_bytes)") for n in (2, 4)
    ]
    assert all(len(r.raw) == 500 for r in reading.rejected)
    short = Source(path=str(file), max_bytes=100).read(False)
    assert (texts(short.prompts), [r.line for r in short.rejected]) == (["a", "b"], [2, 4])
    assert len(Source(path=str(file), max_bytes=len(long)).read(True).prompts) == 4
    table = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["a", "x" * 101]}), table)
    assert len(Source(path=str(table), max_bytes=100).read(False).rejected) == 1


def test_a_list_that_breaks_off_keeps_what_comes_before(tmp_path):
    file = tmp_path / "p.json"
    file.write_text('[\n{"prompt": "a"},\n{"prompt": 3},\n{"prompt": "b"},\n{"prompt": "c')
    reading = Source(path=str(file)).read(False)
    assert texts(reading.prompts) == ["a", "b"]
    assert [r.line for r in reading.rejected] == [3, 5]
    assert "nothing behind it was read" in reading.rejected[1].reason
    file.write_bytes(b'[{"prompt": "a"}, {"prompt": "\xff"}, {"prompt": "b"}]')
    reading = Source(path=str(file)).read(False)
    assert texts(reading.prompts) == ["a", "b"]
    assert [(r.line, r.reason) for r in reading.rejected] == [(1, "not UTF-8")]


def test_nothing_left_is_an_error_that_says_why(tmp_path):
    with pytest.raises(UserError, match=r"p.jsonl:1: needs .*; .*no prompts in it that can be used"):
        Source(path=write(tmp_path / "p.jsonl", {}, 3)).read(False)


WORDS = st.text(st.characters(codec="utf-8"), max_size=12)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
NO_TEXT = ANYTHING.filter(lambda v: not isinstance(v, str) or not v.strip() or v == "\ud800")
ROLE = st.sampled_from(["user", "assistant", "system", "tool"])
MESSAGE = st.fixed_dictionaries({"role": ROLE, "content": WORDS})
BROKEN_MESSAGE = st.one_of(
    NO_TEXT,
    st.fixed_dictionaries({"content": WORDS}),
    st.fixed_dictionaries({"role": NO_TEXT | st.just("robot"), "content": WORDS}),
    st.fixed_dictionaries({"role": ROLE, "content": st.sampled_from(["", " ", None, 3, "\ud83d", {}])}),
    st.fixed_dictionaries(
        {"role": ROLE, "content": WORDS, "tool_calls": st.sampled_from([3, "x", [3], [{}]])}
    ),
)
CERTAINLY_BROKEN = st.one_of(
    st.fixed_dictionaries({"messages": st.tuples(MESSAGE, BROKEN_MESSAGE).map(list)}),
    st.fixed_dictionaries({"turns": st.tuples(WORDS, NO_TEXT).map(list)}),
    st.fixed_dictionaries({"conversations": st.lists(NO_TEXT | WORDS, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"prompt": st.sampled_from(["", "\udc00", 1, []])}),
    st.fixed_dictionaries(
        {"question": st.just("q"), "weight": st.sampled_from([float("nan"), -1, "1", [], True])}
    ),
    st.fixed_dictionaries({"text": st.just("q"), "tools": st.sampled_from([3, "x", [3], {}])}),
    st.dictionaries(st.sampled_from(string.ascii_uppercase), ANYTHING, max_size=3),
    ANYTHING.filter(lambda v: not isinstance(v, dict)),
).map(lambda record: (json.dumps(record).encode(), True))
POSSIBLY_BROKEN = st.one_of(
    st.fixed_dictionaries({"messages": ANYTHING | st.lists(MESSAGE | BROKEN_MESSAGE, max_size=4)}, optional={
        "tools": ANYTHING, "id": ANYTHING, "weight": ANYTHING, "category": ANYTHING, "system": ANYTHING,
    }),
    st.dictionaries(st.sampled_from(["prompt", "instruction", "input", "answer", "turns", "id"]), ANYTHING),
).map(lambda record: (json.dumps(record).encode(), False))  # fmt: skip
BYTES = st.one_of(
    st.binary(min_size=1, max_size=40).map(lambda raw: (raw.replace(b"\n", b"?"), True)),
    st.integers(0, 12).map(lambda cut: (b'{"prompt": "x"}'[:cut] + b"\xff", True)),
    st.integers(3000, 9000).map(lambda n: (b'{"prompt": "' + b"x" * n + b'"}', True)),
    st.integers(500, 2900).map(lambda n: (b"[" * n, True)),
)


def gets_past_or_not(case, answers, tmp_path):
    raw, broken = case
    if not raw.strip():
        return
    broken = broken and answers == "keep"  # an answer that is dropped may be anything
    good = json.dumps(GOOD).encode()
    file = tmp_path / "p.jsonl"
    file.write_bytes(b"\n".join([good, raw, good]))
    source = Source(path=str(file), answers=answers, max_bytes=2990)
    reading = source.read(strict=False)
    assert reading.records == 3
    assert [r.line for r in reading.rejected] in ([[2]] if broken else [[2], []])
    assert texts(reading.prompts)[:: len(reading.prompts) - 1] == ["fine", "fine"]
    for rejected in reading.rejected:
        assert str(rejected).startswith(f"{file}:2: ")
        assert rejected.reason
        assert "\n" not in rejected.reason
        json.dumps(rejected).encode()
        with pytest.raises(UserError) as caught:
            source.read(strict=True)
        assert str(caught.value) == str(rejected)
    for prompt in reading.prompts:
        assert CHAT.encode(opening(prompt.messages))
        assert pa.array([prompt.id, prompt.category], pa.string())
        assert prompt.weight >= 0
    listed = tmp_path / "p.json"
    listed.write_bytes(b"[" + b",\n".join([good, raw, good]) + b"]")
    reading = Source(path=str(listed), answers=answers, max_bytes=2990).read(strict=False)
    assert texts(reading.prompts)[0] == "fine"
    assert all(2 <= r.line <= 3 and r.reason for r in reading.rejected)


CHAT = Chat(make_tokenizer())


@pytest.mark.proof
def test_nothing_malformed_gets_past_and_nothing_but_a_line_comes_of_it(tmp_path):
    @settings(max_examples=1000)
    @given(case=CERTAINLY_BROKEN | POSSIBLY_BROKEN | BYTES, answers=st.sampled_from(["keep", "drop"]))
    def check(case, answers):
        gets_past_or_not(case, answers, tmp_path)

    check()


def test_duplicates_are_dropped_and_counted_and_ids_are_told_apart(tmp_path):
    first = Source(
        path=write(tmp_path / "a.jsonl", {"id": "x", "prompt": "1"}, {"id": "x", "prompt": "2"}, GOOD)
    )
    second = Source(path=write(tmp_path / "b.jsonl", GOOD, GOOD, {"id": "x", "prompt": "3"}))
    alone = first.read(True)
    assert [p.id for p in mix([alone], 0)] == ["x", "x~2", "3"]
    readings = [first.read(True), second.read(True)]
    mixed = mix(readings, 6)
    assert [r.duplicates for r in readings] == [0, 2]
    assert sorted(p.id for p in mixed) == ["a/3", "a/x", "a/x~2", "b/x"]
    with pytest.raises(UserError, match=r"a\.jsonl: every prompt of it is in a source before it"):
        mix([first.read(True), first.read(True)], 0)


def test_shares_are_by_weight_and_never_more_than_there_is():
    assert shares([100], [3], 0) == [100]
    assert shares([100], [3], 30) == [30]
    assert shares([1000, 1000], [2, 1], 300) == [200, 100]
    assert shares([1000, 300], [2, 1], 0) == [600, 300]
    assert shares([1000, 1000, 1000], [1, 1, 1], 100) == [34, 33, 33]
    assert shares([1000, 10, 1000], [1, 1, 2], 400) == [130, 10, 260]
    assert shares([5, 5], [1, 9], 100) == [5, 5]
    assert shares([7, 9], [0.1, 0.3], 8) == [2, 6]


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


def test_a_mixture_is_a_fair_sample_whatever_the_order_of_the_files(tmp_path):
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
    assert 20 < sum(p.id.startswith("b/") for p in mixed[:100]) < 47, "one source stands behind the other"
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
        ("gsm8k", "train/gsm8k.train.jsonl", 7473, 1),
        ("gsm8k", "eval/gsm8k.test.jsonl", 1319, 1),
        ("humaneval", "eval/HumanEval.jsonl", 164, 1),
        ("spec_bench", "eval/spec_bench.question.jsonl", 480, 2),
        ("mt_bench", "eval/spec_bench.question.jsonl", 480, 2),
        ("jsonl", "train/gpteacher.codegen.json", 4535, 1),
        ("jsonl", "train/gpteacher.toolformer.json", 7673, 1),
        ("jsonl", "train/tldr_pages_en.jsonl", 7425, 1),
        ("jsonl", "train/sgd_dialogues.train.jsonl", 12174, 4),
    ],
    ids=lambda value: Path(value).name if isinstance(value, str) else "",
)
@pytest.mark.ci(
    "gsm8k-gsm8k.test.jsonl--", "humaneval-HumanEval.jsonl--", "spec_bench-spec_bench.question.jsonl--"
)
def test_the_real_files_are_read_by_the_yaml_that_is_ready_for_them(name, file, count, turns):
    reading = source(name, f"prompts.path={DATA / file}").read(strict=False)
    assert reading.records == count
    assert len(reading.rejected) <= 0.001 * count, [str(r) for r in reading.rejected[:3]]
    asked = [sum(m["role"] == "user" for m in p.messages) for p in reading.prompts]
    assert max(asked) >= turns
    if name in ("gsm8k", "humaneval"):
        assert all([m["role"] for m in p.messages] == ["user", "assistant"] for p in reading.prompts)


@pytest.mark.parametrize("name", ["gsm8k", "ultrachat", "sharegpt", "humaneval", "mt_bench", "spec_bench"])
@pytest.mark.ci("ultrachat", "spec_bench", "mt_bench", "humaneval")
def test_a_ready_yaml_names_its_dataset_and_what_is_read_of_it(name, monkeypatch):
    spoken = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    rows = {
        "gsm8k": {"question": "q", "answer": "a"},
        "ultrachat": {"prompt": "q", "prompt_id": "p", "messages": [{"role": "user", "content": "q"}]},
        "sharegpt": {"id": "x", "conversations": spoken},
        "humaneval": {"task_id": "t", "prompt": "q", "canonical_solution": "a", "test": "x"},
        "mt_bench": {"question_id": 81, "category": "c", "turns": ["q", "r"]},
        "spec_bench": {"question_id": 81, "category": "c", "turns": ["q"]},
    }
    asked = []

    def load(*names, **options):
        asked.append((names, options))
        return datasets.Dataset.from_list([rows[name]])

    monkeypatch.setattr(datasets, "load_dataset", load)
    (prompt,) = source(name).read(strict=True).prompts
    assert texts([prompt]) == ["q"]
    answers = [m for m in prompt.messages if m["role"] == "assistant"]
    assert len(answers) == (name in ("gsm8k", "humaneval"))
    ((names, options),) = asked
    assert names[0] in ("json", source(name).dataset)
    assert options.keys() == {"data_files", "split", "revision"}, "no code of a dataset is trusted"
