"""The scorecard as a file: nothing is lost, older files are read, damaged ones are refused."""

import json
import re
from dataclasses import fields

import cards
import pytest
from workbench import ROOT

from decode.errors import UserError
from decode.evaluation.audit import Audit
from decode.evaluation.json_records import DERIVED
from decode.evaluation.quality import Quality
from decode.evaluation.rows import Replay, Row, Timing
from decode.evaluation.sampling_tests import SampledRun
from decode.evaluation.scorecard import (
    Checkpoint,
    Conditions,
    PlanChoice,
    SampleText,
    SampleToken,
    Scorecard,
    TargetDrift,
    read_scorecard,
)
from decode.evaluation.served import Headline, Served

RECORDS = (
    *(Headline, Row, Served, Timing, Replay, Quality, Conditions, Checkpoint, TargetDrift),
    *(Audit, SampledRun, SampleText, PlanChoice),
)


def full() -> dict:
    drift = {"kl": 0.1, "reverse_kl": 0.2, "top1_agreement": 0.9, "greedy_prefix": 0.4}
    timing = {"seconds": [0.5], "tokens": [3], "plain_seconds": [1.0], "plain_tokens": [3]}
    timing |= {"passes": "compiled", "plain_passes": "uncompiled"}
    quality = {"log_likelihood": -1.5, "plain_log_likelihood": -1.25, "kl": 0.1, "changed": None}
    quality |= {"judge": 0.5, "plain_judge": 0.75}
    text = {"id": "p1", "category": "a", "prompt": "x", "temperature": 0.0, "decode": "chain-2"}
    tokens = [["a", "accepted", 0.5, 1, 0.25, 2], ["b", "plain", 1, 1, None, None]]
    choice = {"temperature": 0.0, "batch_size": 1, "chosen": "chain-2", "tree": [[0], [0, 1]]}
    return cards.scorecard(
        [cards.row(timing=timing), cards.row(1.0, replay=None, lossy=True, quality=quality)],
        target_drift=drift | {"prompts": 4, "tokens": 24},
        categories=["a", "b"],
        samples=[text | {"tokens": tokens}],
        plan_choices=[choice | {"curve": [{"depth": 1, "accuracy": [0.5]}]}],
        train_seconds=61.5,
    )


def test_scorecard_is_written_as_it_was_read():
    card = Scorecard.from_json(full(), "score.json")
    head = card.to_json()["headline"]
    assert card.to_json() == full() | {"headline": head}
    assert head["tau"] == card.rows[0].replay.tau != card.rows[0].tau
    assert head["speedup"] == card.rows[0].speedup
    assert Scorecard.from_json(json.loads(json.dumps(card.to_json())), "again") == card
    assert isinstance(card.rows[0].timing, Timing)
    assert card.samples[0].tokens[1] == SampleToken("b", "plain", 1, 1, None, None)
    assert card.rows[0].acceptance is card.rows[0].replay
    assert card.rows[1].acceptance is card.rows[1]


def without(name):
    return {key: value for key, value in full().items() if key != name}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (without("schema"), "version none"),
        (full() | {"schema": 3}, "version 3, "),
        ([], "version none"),
        (without("rows"), r"damaged \(rows is missing\)"),
        (without("seed"), r"damaged \(conditions\.seed is missing\)"),
        (full() | {"rows": []}, r"damaged \(rows: there are none\)"),
        (full() | {"rows": [cards.row() | {"tau": "2"}]}, r"rows\[0\]\.tau: '2' is no number"),
        (full() | {"rows": [cards.row(lossy=1)]}, r"rows\[0\]\.lossy: 1 is no bool"),
        (full() | {"rows": [cards.row(nodes=True)]}, r"rows\[0\]\.nodes: True is no int"),
        (full() | {"rows": [cards.row(replay=3)]}, r"rows\[0\]\.replay: 3 is no dict"),
        (full() | {"samples": [{**full()["samples"][0], "tokens": [["a", "plain"]]}]}, "2 parts, not 6"),
        (full() | {"versions": {"torch": 2}}, r"checkpoint\.versions\.torch: 2 is no str"),
    ],
)
def test_damaged_scorecard_is_refused_in_one_line(tmp_path, values, reason):
    path = tmp_path / "score.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=reason) as error:
        read_scorecard(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_all_keys_are_documented():
    text = (ROOT / "docs" / "report.md").read_text()
    tables = {}
    for name, table in re.findall(r"^\*\*(\w+)\*\*, [^\n]*:\n\n((?:\|[^\n]*\n)+)", text, re.MULTILINE):
        tables[name] = re.findall(r"^\| `(\w+)` \| \S", table, re.MULTILINE)
    for record in RECORDS:
        assert set(tables[record.__name__]) == {*(f.name for f in fields(record)), *DERIVED.get(record, ())}
    flat = {f.name for record in (Conditions, Checkpoint) for f in fields(record)}
    assert len(flat) == sum(len(fields(record)) for record in (Conditions, Checkpoint)), "two of a name"
    keys = full().keys() | {"headline"}
    assert set(tables["Scorecard"]) == keys - flat
    assert keys == set(tables["Scorecard"]) | flat
