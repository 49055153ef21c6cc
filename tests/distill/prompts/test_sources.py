"""Datasets of prompts, mixtures of sources, and the sources that conf/ has."""

import json
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st
from workbench import CONF, ROOT

from decode.errors import UserError
from distill.config.compose import compose
from distill.prompts.mixing import mix, shares
from distill.prompts.prompt import split
from distill.prompts.sources import Source, to_sources

DATA = ROOT.parent / "shared" / "data"
GOOD = {"prompt": "fine"}


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
        ({}, "no column with a question; it has wish, pixels"),
        ({"split": "dev", "columns": {"prompt": "wish"}}, "prompts.dataset="),
        ({"name": "other", "columns": {"prompt": "wish"}}, "prompts.dataset="),
    ],
)
def test_wrong_dataset_is_one_line(options, said, local_dataset):
    with pytest.raises(UserError, match=said) as caught:
        Source(dataset=local_dataset, **options).read(False)
    assert "\n" not in str(caught.value)


def test_duplicates_are_dropped_and_equal_ids_are_numbered(tmp_path):
    named = ({"id": "x", "prompt": str(n)} for n in (1, 2, 3))
    first = Source(path=write(tmp_path / "a.jsonl", next(named), next(named), GOOD))
    second = Source(path=write(tmp_path / "b.jsonl", GOOD, GOOD, next(named)))
    assert [p.id for p in mix([first.read(True)], 0)] == ["x", "x~2", "3"]
    readings = [first.read(True), second.read(True)]
    mixed = mix(readings, 6)
    assert [r.duplicates for r in readings] == [0, 2]
    assert sorted(p.id for p in mixed) == ["a/3", "a/x", "a/x~2", "b/x"]
    with pytest.raises(UserError, match=r"a\.jsonl: all its prompts are in earlier sources"):
        mix([first.read(True), first.read(True)], 0)


@pytest.mark.parametrize(
    ("counts", "weights", "limit", "taken"),
    [
        ([100], [3], 0, [100]),
        ([1000, 1000], [2, 1], 300, [200, 100]),
        ([1000, 300], [2, 1], 0, [600, 300]),
        ([1000, 1000, 1000], [1, 1, 1], 100, [34, 33, 33]),
        ([1000, 10, 1000], [1, 1, 2], 400, [130, 10, 260]),
    ],
)
def test_shares_are_by_weight(counts, weights, limit, taken):
    assert shares(counts, weights, limit) == taken


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


SPOKEN = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
ROWS = {
    "gsm8k": {"question": "q", "answer": "a"},
    "ultrachat": {"prompt": "q", "prompt_id": "p", "messages": [{"role": "user", "content": "q"}]},
    "sharegpt": {"id": "x", "conversations": SPOKEN},
    "humaneval": {"task_id": "t", "prompt": "q", "canonical_solution": "a", "test": "x"},
    "mt_bench": {"question_id": 81, "category": "c", "turns": ["q", "r"]},
    "spec_bench": {"question_id": 81, "category": "c", "turns": ["q"]},
}


@pytest.mark.parametrize("name", ROWS)
def test_yaml_of_a_dataset_reads_its_rows(name, monkeypatch):
    asked = []

    def load(*names, **options):
        asked.append((names, options))
        return datasets.Dataset.from_list([ROWS[name]])

    monkeypatch.setattr(datasets, "load_dataset", load)
    (prompt,) = source(name).read(strict=True).prompts
    assert texts([prompt]) == ["q"]
    answers = [m for m in prompt.messages if m["role"] == "assistant"]
    assert len(answers) == (name in ("gsm8k", "humaneval"))
    ((names, options),) = asked
    assert names[0] in ("json", source(name).dataset)
    assert options.keys() == {"data_files", "split", "revision"}, "no code of a dataset is trusted"
