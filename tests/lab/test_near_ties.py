"""Texts that differ: which of them part where rounding decides, and which do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from workbench import make_target

from benchmarks import near_ties
from benchmarks.decode import differing_column
from benchmarks.near_ties import Differences
from decode.model.load import load_target

PROMPT, COMMON = [7, 8, 9], [11, 40, 23]
ONE, TWIN = 30, 31  # two tokens of one logit, but for `LIFT`
LIFT = 1e-4  # less than half a rounding of bf16, more than those of fp32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_target(tmp_path_factory.mktemp("near") / "target"))


def load(folder, dtype, lift=0.0):
    """The target, with two tokens whose logits after `COMMON` differ by `lift`."""
    target = load_target(folder, dtype)
    weight = target.head.weight
    with torch.inference_mode():
        state = target.read(torch.tensor([PROMPT + COMMON])).last[0, -1].double()
        other = weight[ONE].double() + lift * state / state.square().sum()
        weight[TWIN] = other.to(weight.dtype)
    return target


def compare(target, *others, first=(*COMMON, ONE, 50)):
    """What is said of other texts of the same prompt."""
    count = len(others)
    return Differences(target, [PROMPT] * count, [first] * count)(others)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_only_equal_logits_are_a_near_tie(folder, dtype):
    target = load(folder, dtype)
    tie = [*COMMON, TWIN, 60, 61]
    found = compare(target, tie)
    assert (found["differ"], found["near_ties"]) == (1, 1)
    assert found["largest_gap"] < 1e-6
    wide: Any = load(folder, dtype).model
    logits = wide.to(near_ties.WIDER[target.dtype])(torch.tensor([PROMPT + COMMON])).logits[0, -1]
    gaps = (logits - logits[ONE]).abs()
    far = int(gaps.argmax())
    found = compare(target, tie, [*COMMON, far], [*COMMON, ONE, 50])
    assert (found["differ"], found["near_ties"]) == (2, 1)
    assert found["largest_gap"] == pytest.approx(float(gaps[far]), rel=1e-5)
    assert target.dtype == getattr(torch, dtype), "only a copy is cast"


def test_float64_has_no_near_ties(folder):
    found = compare(load(folder, "float64"), [*COMMON, TWIN])
    assert found == {"differ": 1, "near_ties": 0, "largest_gap": 0.0}


def test_bf16_tie_is_none_in_float32(folder):
    """The same gap is above the rounding of fp32, and far below that of bf16."""
    exact = compare(load(folder, "float32", LIFT), [*COMMON, TWIN])
    assert exact["near_ties"] == 0
    assert exact["largest_gap"] == pytest.approx(LIFT, rel=0.2)
    assert compare(load(folder, "bfloat16", LIFT), [*COMMON, TWIN])["near_ties"] == 1


def test_an_equal_or_shorter_text_has_no_gap(folder, monkeypatch):
    monkeypatch.setattr(near_ties, "_logits", lambda *given: pytest.fail("nothing to read"))
    target = load(folder, "bfloat16")
    assert compare(target, COMMON) == {"differ": 1, "near_ties": 0, "largest_gap": None}
    assert compare(target, [*COMMON, ONE, 50]) == {"differ": 0, "near_ties": 0, "largest_gap": None}


def test_differences_of_a_target_too_large_to_cast_are_counted(folder, monkeypatch):
    monkeypatch.setattr(near_ties, "LARGEST_COPY", 10)
    found = compare(load(folder, "bfloat16"), [*COMMON, TWIN], [*COMMON, ONE, 50])
    assert found == {"differ": 1, "near_ties": None, "largest_gap": None}


@pytest.mark.parametrize(
    ("differ", "ties", "shown"),
    [(None, None, "-"), (0, 0, "0"), (3, 3, "3 (3 near ties)"), (2, None, "2")],
)
def test_the_column_says_how_many_are_near_ties(differ, ties, shown):
    assert differing_column({"differ": differ, "near_ties": ties}) == shown
