"""The repository keeps its own promises."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from workbench import ROOT

from drafters.export.formats import FORMATS

README = (ROOT / "README.md").read_text()
RULED = "ab30d324"  # the last commit before subjects were looked at


def test_the_readme_has_a_command_that_trains_and_one_that_ci_runs():
    """.ci/run takes the first line that ends with pytest from README.md."""
    run, test = [line.strip() for line in README.splitlines() if line.startswith("    python3 -m venv")]
    assert run.endswith("train.py drafter=eagle")
    assert test == next(line.strip() for line in README.splitlines() if line.endswith("pytest"))
    assert test.endswith("-m pytest")
    assert "grep -m1 'pytest$' README.md" in (ROOT / ".ci" / "run").read_text()


def test_every_file_the_documents_name_exists():
    """Links are looked at by test_site.py."""
    made_up = ("adding.md", "proofs.md")  # a drafter that a test adds; the output of a program
    documents = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    documents += [path for path in (ROOT / "docs").rglob("*.md") if path.name not in made_up]
    for document in documents:
        paths = re.findall(r"`((?:src|tests|scripts|docs)/[\w/.]+|\w+/[\w/]+\.py)`", document.read_text())
        bases = (document.parent, ROOT, ROOT / "src", *(ROOT / "src").glob("d*"))
        missing = [name for name in paths if not any((base / name).exists() for base in bases)]
        assert not missing, f"{document.name} names {missing}"


def test_nothing_is_unpickled_and_no_remote_code_runs_unasked():
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").glob("*.py"), ROOT / "train.py"]
    sources = {path: path.read_text() for path in files}
    # Other programs' drafters come pickled: one call reads them, and makes tensors or nothing.
    pickled = sources[ROOT / "src" / "drafters" / "export" / "weight_files.py"]
    assert len(re.findall(r"\btorch\.load\(", pickled)) == 1 == pickled.count("weights_only=True")
    assert not re.search(r"\bpickle\b", pickled)
    for path, text in sources.items():
        if text is not pickled:
            assert not re.search(r"\btorch\.load\b|\bpickle\b|\bdill\b|\bjoblib\b", text), path
        assert "weights_only=False" not in text, path
        assert "trust_remote_code=True" not in text, path
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert not re.search(r"trust_remote_code:\s*true", path.read_text()), path


def test_no_path_outside_the_repository_is_needed():
    for folder in ("src", "scripts", "conf", "tests", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".md", ".json") and path != Path(__file__):
                assert "/work/" not in path.read_text(), path
                assert folder == "tests" or "../shared" not in path.read_text(), path


def test_commits_say_what_the_code_now_does():
    """Those since the rule was made; a copy without their history has nothing to look at."""
    log = ["git", "-C", str(ROOT), "log", "--format=%s", f"{RULED}..HEAD"]
    ended = subprocess.run(log, capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.skip("no history")
    verbs = ("Add ", "Fix ", "Move ", "Remove ", "Speed up ", "Document ")
    assert not [line for line in ended.stdout.splitlines() if len(line) > 72 or not line.startswith(verbs)]


def test_the_table_of_served_formats_is_that_of_the_code():
    lines = (ROOT / "docs" / "serving.md").read_text().partition("| `drafter=` |")[2].split("\n\n")[0]
    head, _, *rows = ([cell.strip() for cell in line.split("|")] for line in lines.splitlines())
    programs = re.findall(r"to=(\w+)", " ".join(head))
    assert programs == list(FORMATS)
    said = {
        (name, program)
        for _, names, *cells, _ in rows
        for name in re.findall(r"`(\w+)`", names)
        for program, cell in zip(programs, cells, strict=True)
        if cell and name not in ("hass", "ngram", "suffix")  # a setting of eagle; the engines' own
    }
    assert said == {(name, program) for program, formats in FORMATS.items() for name in formats}


FLAWED = {"lightning": "2.6.5"}  # the last version with a known hole: CVE-2026-58659


def test_no_version_with_a_known_hole_is_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    assert not [name for name, version in FLAWED.items() if version in allowed[name]]


def test_no_table_has_an_empty_head():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "data").rglob("*.md")]:
        assert not re.search(r"^\|(?: *\|)+\n\|(?:[ :]*-)", path.read_text(), re.M), path


def test_literature_page_names_every_paper_in_conf():
    page = (ROOT / "docs" / "settings_of_papers.md").read_text()
    for group in ("drafter", "decode", "objective", "weights", "experiment"):
        for path in (ROOT / "conf" / group).rglob("*.yaml"):
            papers = set(re.findall(r"arXiv:(\d{4}\.\d{5})", path.read_text()))
            assert not [paper for paper in papers if paper not in page], path
