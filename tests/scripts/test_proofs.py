"""scripts/proofs.py: the page is made from pytest's report, each command's part apart."""

from __future__ import annotations

from xml.etree import ElementTree

import proofs

REPORT = """<testsuite time="150">
<testcase file="tests/scripts/test_proofs.py" name="a"/>
<testcase file="tests/scripts/test_proofs.py" name="b"><skipped message="none"/></testcase>
<testcase file="tests/repo/test_adding.py" name="c"/>
</testsuite>"""


def part():
    return proofs.page_part(ElementTree.fromstring(REPORT), "At commit 123")


def test_part_counts_cases_and_quotes_each_docstring():
    told, _, _, _, *rows = part().splitlines()
    assert told == "At commit 123: 2 passed, 1 skipped, in 2 minutes."
    assert [row.split(" | ")[1:] for row in rows] == [
        ["`tests/repo/test_adding.py`", "1", "0 |"],
        ["`tests/scripts/test_proofs.py`", "1", "1 |"],
    ]
    assert rows[1].startswith("| scripts/proofs.py: the page is made from pytest's report, each command's")


def test_a_commands_part_replaces_its_own_and_no_other():
    page = proofs.with_part("# Proofs\n\nOld.\n", "make long-proofs", "slow\n\n| a |")
    page = proofs.with_part(page, "make proofs", "old")
    page = proofs.with_part(page, "make proofs", part())
    assert page.startswith(proofs.ABOUT)
    assert page.endswith("\n## `make long-proofs`\n\nslow\n\n| a |\n")
    assert "old" not in page
    assert page.index("## `make proofs`") < page.index("123") < page.index("## `make long-proofs`")


def test_only_a_green_run_of_all_proofs_at_a_commit_writes_the_page(monkeypatch, tmp_path):
    page, report = tmp_path / "proofs.md", tmp_path / "proofs.xml"
    page.write_text("before")
    report.write_text(f"<testsuites>{REPORT}</testsuites>")
    monkeypatch.setattr(proofs, "PAGE", page)
    monkeypatch.setattr(proofs, "REPORT", report)
    for files, code, at, written in (
        ([], 1, "123", False),
        ([], 0, "123-dirty", False),
        (["tests/repo"], 0, "123", False),
        ([], 0, "123", True),
    ):
        monkeypatch.setattr(proofs, "run_tests", lambda *_, code=code: code)
        monkeypatch.setattr(proofs, "commit", lambda at=at: at)
        assert proofs.main(files, long=False) == code
        assert (page.read_text() != "before") == written
