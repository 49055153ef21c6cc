"""docs/claims.md and the tables of results are what the scorecards say."""

from __future__ import annotations

import re
import shutil

import pytest
from workbench import ROOT

from claims import pages
from claims.cards import RESULTS
from decode.errors import UserError

LAB = RESULTS.relative_to(ROOT)


def test_every_page_follows_from_the_scorecards():
    assert pages.write_all(check=True) == []


SMALL = """
folders: {small: {title: A few drafters, target: a target, against: eagle}}
papers:
  - name: EAGLE-3
    arxiv: "2503.01840"
    claims: [{says: more, tests: [{folder: small, arm: eagle3-800, over: eagle-800}]}]
"""
CARDS = [
    *(f"{drafter}-800-{seed}.json" for drafter in ("eagle", "eagle3") for seed in range(3)),
    "suffix-0-0.json",
]


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A project with a few results, whose pages are written."""
    results = tmp_path / LAB
    (results / "small").mkdir(parents=True)
    for name in CARDS:
        shutil.copy(RESULTS / "h200" / "pocket" / name, results / "small" / name)
    (tmp_path / "docs" / "drafters").mkdir(parents=True)
    block = "before\n<!-- results: small {} -->\n<!-- end of results -->\nafter\n"
    (tmp_path / "docs" / "drafters" / "eagle.md").write_text(block.format("eagle-800"))
    (tmp_path / "README.md").write_text(block.format(""))
    (tmp_path / "claims.yaml").write_text(SMALL)
    for name, value in (("ROOT", tmp_path), ("RESULTS", results), ("CLAIMS", tmp_path / "claims.yaml")):
        monkeypatch.setattr(pages, name, value)
    pages.write_all(check=False)
    assert pages.write_all(check=True) == []
    return tmp_path


@pytest.mark.parametrize(
    "page", ["docs/claims.md", "docs/drafters/eagle.md", "README.md", f"{LAB}/small/README.md"]
)
def test_a_number_changed_by_hand_is_seen_and_written_again(copy, page):
    file = copy / page
    right = file.read_text()
    changed = re.sub(r"\b3\.54\b", "3.99", right, count=1)
    assert changed != right
    file.write_text(changed)
    assert pages.write_all(check=True) == [page]
    assert file.read_text() == changed
    assert pages.write_all(check=False) == [page]
    assert file.read_text() == right


def test_a_changed_scorecard_changes_its_pages(copy):
    file = copy / LAB / "small" / "eagle-800-1.json"
    file.write_text(file.read_text().replace('"tau": 3.5', '"tau": 3.7'))
    pages_of_eagle = {"docs/claims.md", "docs/drafters/eagle.md", "README.md", f"{LAB}/small/README.md"}
    assert set(pages.write_all(check=True)) == pages_of_eagle


def test_results_of_uncommitted_changes_and_unlisted_folders_are_refused(copy):
    folder = copy / LAB / "new"
    folder.mkdir()
    file = folder / "suffix-0-0.json"
    shutil.copy(copy / LAB / "small" / file.name, file)
    with pytest.raises(UserError, match=r"results/new: no such folder in claims\.yaml"):
        pages.write_all(check=True)
    text = file.read_text()
    file.write_text(re.sub(r'"(59fcc3045de8)"', r'"\1-dirty"', text, count=1))
    with pytest.raises(UserError, match=r"suffix-0-0\.json: made by uncommitted changes"):
        pages.write_all(check=True)


def test_an_unknown_name_in_a_page_is_refused(copy):
    file = copy / "docs" / "drafters" / "eagle.md"
    for wrong, said in (
        ("small eagel-800", "no eagel-800; there are"),
        ("h300", "h300: no such folder"),
    ):
        file.write_text(f"<!-- results: {wrong} -->\n<!-- end of results -->\n")
        with pytest.raises(UserError, match=said):
            pages.write_all(check=True)
