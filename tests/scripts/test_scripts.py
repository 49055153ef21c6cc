"""scripts/: changed files, configurations of benchmarks, pages made by programs."""

from __future__ import annotations

import subprocess
from importlib import import_module
from xml.etree import ElementTree

import hydra
import pytest
from workbench import CONF, ROOT

import changed
import proofs
import target_table
from benchmark import BENCHMARKS

# -- changed.py: tests of a tier run where its files, or files that it imports, have changed -----

FILES = {
    "src/drafters/zoo/one.py": "from drafters.base import Drafter\nfrom drafters import optional\n",
    "src/drafters/base.py": "",
    "src/drafters/optional.py": "",
    "src/drafters/other.py": "",
    "scripts/lab/benchmark.py": "",
    "scripts/lab/results/eagle.json": "",
    "conf/lab/auto.yaml": "",
    "docs/proofs.md": "At commit COMMIT on a machine: 3 passed\n",
}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A clone whose docs/proofs.md names its first commit."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Add files"]):
        subprocess.run([*git, *words], check=True)
    first = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    page = tmp_path / "docs" / "proofs.md"
    page.write_text(FILES["docs/proofs.md"].replace("COMMIT", first[:12]))
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "tiers"),
    [
        ("src/drafters/zoo/one.py", ["zoo"]),
        ("src/drafters/base.py", ["zoo"]),
        ("src/drafters/optional.py", ["zoo"]),
        ("src/drafters/other.py", []),
        ("scripts/lab/benchmark.py", ["lab"]),
        ("conf/lab/auto.yaml", ["lab"]),
        ("scripts/lab/results/eagle.json", []),
        ("docs/proofs.md", []),
    ],
)
def test_a_change_runs_the_tests_of_its_tier(repository, file, tiers):
    assert [tier for tier in changed.CODE if not changed.main(tier)] == []
    (repository / file).write_text((repository / file).read_text() + "# new\n")
    assert [tier for tier in changed.CODE if not changed.main(tier)] == tiers


def test_without_the_commit_of_the_proofs_all_run(repository):
    (repository / "docs" / "proofs.md").write_text("At commit 0123456789ab on a machine\n")
    assert [tier for tier in changed.CODE if not changed.main(tier)] == ["zoo", "lab"]


# -- lab: its other tests are in tests/lab --------------------------------------------------------


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_is_found_with_its_configuration(name):
    module, _, function = BENCHMARKS[name].partition(":")
    assert callable(getattr(import_module(module), function))
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        assert hydra.compose(f"lab/{name}")


def test_every_configuration_belongs_to_a_script():
    names = {path.stem for path in (CONF / "lab").glob("*.yaml")} - {"arms"}  # a base of others
    assert names == BENCHMARKS.keys() | {"check_speculators", "train_target"}


# -- proofs.py: the page is made from pytest's report ---------------------------------------------

REPORT = """<testsuite time="150">
<testcase file="tests/repo/test_site.py" name="a"/>
<testcase file="tests/repo/test_site.py" name="b"><skipped message="none"/></testcase>
<testcase file="tests/repo/test_adding.py" name="c"/>
</testsuite>"""
PART = proofs.page_part(ElementTree.fromstring(REPORT), "At commit 123")


def test_part_counts_cases_and_quotes_each_docstring():
    about, _, _, _, *rows = PART.splitlines()
    assert about == "At commit 123: 2 passed, 1 skipped, in 2 minutes."
    assert [row.split(" | ")[1:] for row in rows] == [
        ["`tests/repo/test_adding.py`", "1", "0 |"],
        ["`tests/repo/test_site.py`", "1", "1 |"],
    ]
    assert rows[1].startswith("| The site builds without a network")


def test_a_commands_part_replaces_its_own_and_no_other():
    page = proofs.with_part("# Proofs\n\nOld.\n", "make long-proofs", "slow\n\n| a |")
    page = proofs.with_part(page, "make proofs", "old")
    page = proofs.with_part(page, "make proofs", PART)
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


# -- target_table.py: docs/targets.md says what the probe says ------------------------------------

QUICK = ("Llama 2, 3", "gpt-oss", "DeepSeek-V3, R1, Kimi-K2", "Mamba", "Llama 4", "BLOOM")


def page_rows():
    text = (ROOT / "docs" / "targets.md").read_text()
    inside = text.partition(target_table.BEGIN)[2].partition(target_table.END)[0]
    return [row for row in inside.splitlines() if row.startswith("| ") and not row.startswith("| family")]


def test_every_family_has_its_row():
    families = [row.split(" | ")[0].removeprefix("| ") for row in page_rows()]
    assert sorted(families) == sorted(target_table.FAMILIES)


@pytest.mark.parametrize("name", target_table.FAMILIES)
@pytest.mark.ci(*QUICK)
@pytest.mark.usefixtures("own_cache")
def test_the_page_says_what_the_probe_says(name):
    assert target_table.line(name) in page_rows()
