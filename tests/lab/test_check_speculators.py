"""speculators itself, in an environment of its own, opens our exports and has our logits."""

from __future__ import annotations

import os
import sys

import pytest
from workbench import ROOT

from benchmarks.check_speculators.check import TOLERANCE, compare
from decode.model.load import load_target

PYTHON = os.environ.get("SPECULATORS_PYTHON", "")
CASES = {
    "eagle3": {},
    "eagle3 of speculators": {"norm_before_residual": True, "norm_output": True, "layers": 2},
    "p_eagle": {"layers": 2},
    "p_eagle of gpt-oss": {"norm_before_fc": True, "fc_norm": False},
    "dflash": {},
    "dspark": {},
    "dspark of masks": {"sample_from_anchor": False},
    "dspark of fewer tokens": {"draft_vocab_size": 1000},
}


@pytest.fixture
def pocket_target():
    """With the path that speculators reads it from."""
    return load_target(str(ROOT / "data" / "pocket"), "float32")


@pytest.mark.proof
@pytest.mark.skipif(not PYTHON, reason="SPECULATORS_PYTHON names no environment with speculators")
@pytest.mark.parametrize("case", CASES)
def test_speculators_has_our_logits(pocket_target, make_drafter, case):
    drafter = make_drafter(case.split(" ")[0], pocket_target, depth=4, **CASES[case])
    opened = compare(drafter, pocket_target, PYTHON, 5)
    assert not isinstance(opened, str), opened
    assert opened.places >= 100
    assert opened.most < TOLERANCE * opened.scale
    print(case, opened)


def test_without_the_package_it_says_so(pocket_target, make_drafter, tmp_path):
    drafter = make_drafter("eagle3", pocket_target, draft_vocab_size=9)
    assert "no such file" in str(compare(drafter, pocket_target, str(tmp_path / "python"), 1))
    said = compare(drafter, pocket_target, sys.executable, 1)
    assert isinstance(said, str)
    assert "No module named 'speculators'" in said
