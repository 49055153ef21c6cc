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


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The pages and the results in a folder of their own."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("images", "pictures"))
    shutil.copytree(RESULTS, tmp_path / LAB)
    shutil.copy(ROOT / "README.md", tmp_path / "README.md")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "RESULTS", tmp_path / LAB)
    return tmp_path


@pytest.mark.parametrize("page", ["docs/claims.md", "docs/drafters/eagle.md", f"{LAB}/h200/pocket/README.md"])
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
    file = copy / LAB / "h200" / "pocket" / "suffix-0-0.json"
    file.write_text(file.read_text().replace('"tau": 2.6', '"tau": 2.7'))
    changed = pages.write_all(check=True)
    assert {"docs/drafters.md", "docs/drafters/suffix.md", f"{LAB}/h200/pocket/README.md"} <= set(changed)


def test_results_of_uncommitted_changes_and_unlisted_folders_are_refused(copy):
    folder = copy / LAB / "new"
    folder.mkdir()
    file = folder / "suffix-0-0.json"
    shutil.copy(copy / LAB / "h200" / "pocket" / file.name, file)
    with pytest.raises(UserError, match=r"results/new: no such folder in claims\.yaml"):
        pages.write_all(check=True)
    text = file.read_text()
    file.write_text(re.sub(r'"(59fcc3045de8)"', r'"\1-dirty"', text, count=1))
    with pytest.raises(UserError, match=r"suffix-0-0\.json: made by uncommitted changes"):
        pages.write_all(check=True)


def test_an_unknown_name_in_a_page_is_refused(copy):
    file = copy / "docs" / "drafters" / "eagle.md"
    for wrong, said in (
        ("h200/pocket eagel-800", "no eagel-800; there are"),
        ("h300", "h300: no such folder"),
    ):
        file.write_text(f"<!-- results: {wrong} -->\n<!-- end of results -->\n")
        with pytest.raises(UserError, match=said):
            pages.write_all(check=True)
