"""The repository keeps its own promises: files, imports, private names, security, versions and tables."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from workbench import ROOT

from drafters.export.formats import FORMATS
from newest import PACKAGES, TABLE, TESTS

SRC = ROOT / "src"
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = sorted(path for folder in ("src", "scripts") for path in (ROOT / folder).rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}
RULED = "ab30d324"  # the last commit before subjects were looked at


# -- documents -----------------------------------------------------------------------------------


def test_the_readme_has_a_command_that_trains_and_one_that_ci_runs():
    """.ci/run takes the first line that ends with pytest from README.md."""
    run, test = [line.strip() for line in README.splitlines() if line.startswith("    python3 -m venv")]
    assert run.endswith("python train.py")
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
        bases = (document.parent, ROOT, SRC, *SRC.glob("d*"))
        missing = [name for name in paths if not any((base / name).exists() for base in bases)]
        assert not missing, f"{document.name} names {missing}"


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


def test_literature_page_names_every_paper_in_conf():
    page = (ROOT / "docs" / "settings_of_papers.md").read_text()
    for group in ("drafter", "decode", "objective", "weights", "experiment"):
        for path in (ROOT / "conf" / group).rglob("*.yaml"):
            papers = set(re.findall(r"arXiv:(\d{4}\.\d{5})", path.read_text()))
            assert not [paper for paper in papers if paper not in page], path


def test_commits_say_what_the_code_now_does():
    """Those since the rule was made; a copy without their history has nothing to look at."""
    log = ["git", "-C", str(ROOT), "log", "--format=%s", f"{RULED}..HEAD"]
    ended = subprocess.run(log, capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.skip("no history")
    verbs = ("Add ", "Fix ", "Move ", "Remove ", "Speed up ", "Document ")
    assert not [line for line in ended.stdout.splitlines() if len(line) > 72 or not line.startswith(verbs)]


# -- files and imports ---------------------------------------------------------------------------


def test_no_folder_has_more_than_15_modules():
    """But for drafters/models, which are independent of one another."""
    count = Counter(str(path.parent.relative_to(SRC)) for path in SRC.rglob("*.py"))
    assert not {folder: n for folder, n in count.items() if n - 1 > 15 and folder != "drafters/models"}


def test_no_path_outside_the_repository_is_needed():
    for folder in ("src", "scripts", "conf", "tests", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".md", ".json") and path != Path(__file__):
                assert "/work/" not in path.read_text(), path
                assert folder == "tests" or "../shared" not in path.read_text(), path


def imports(tree: ast.AST, modules: dict[str, Path]) -> set[str]:
    """Modules of ours that a file imports anywhere, inside functions too."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in inner}
    return found & modules.keys()


def test_no_imports_go_in_a_circle():
    assert imports(ast.parse("def f():\n    from b import g\n"), {"b": SRC}) == {"b"}
    paths = {p.relative_to(SRC).with_suffix(""): p for p in SRC.rglob("*.py")}
    modules = {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}
    graph = {name: imports(TREES[path], modules) - {name} for name, path in modules.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_no_test_imports_another():
    """What several tests need lies in tests/support."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        others = [node.module for node in nodes if re.match(r"tests\b|(.+\.)?test_", node.module or "")]
        assert not others, path


# -- security ------------------------------------------------------------------------------------


def test_nothing_is_unpickled_and_no_remote_code_runs_unasked():
    files = [*SRC.rglob("*.py"), *(ROOT / "scripts").glob("*.py"), ROOT / "train.py"]
    sources = {path: path.read_text() for path in files}
    # Other programs' drafters come pickled: one call reads them, and makes tensors or nothing.
    pickled = sources[SRC / "drafters" / "export" / "weight_files.py"]
    assert len(re.findall(r"\btorch\.load\(", pickled)) == 1 == pickled.count("weights_only=True")
    assert not re.search(r"\bpickle\b", pickled)
    for path, text in sources.items():
        if text is not pickled:
            assert not re.search(r"\btorch\.load\b|\bpickle\b|\bdill\b|\bjoblib\b", text), path
        assert "weights_only=False" not in text, path
        assert "trust_remote_code=True" not in text, path
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert not re.search(r"trust_remote_code:\s*true", path.read_text()), path


FLAWED = {"lightning": "2.6.5"}  # the last version with a known hole: CVE-2026-58659


def test_no_version_with_a_known_hole_is_allowed():
    allowed = {r.name: r.specifier for r in map(Requirement, PROJECT["dependencies"])}
    assert not [name for name, version in FLAWED.items() if version in allowed[name]]


# -- the newest releases (`make newest`), the allowed ranges and CI's pins ------------------------

NEWEST = json.loads(TABLE.read_text())


@pytest.mark.parametrize("name", PACKAGES)
def test_version_ranges_admit_the_pin_and_the_newest_run(name):
    pins = re.findall(rf"(?mi)^{re.escape(name)}==(\S+)$", (ROOT / "constraints.txt").read_text())
    assert pins, f"constraints.txt has no {name}"
    run, pin = Version(NEWEST["versions"][name]), Version(pins[0])
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    required = [Requirement(line) for lines in lists for line in lines]
    ranges = [one.specifier for one in required if one.name == name]
    assert ranges
    for admitted in ranges:
        assert admitted.contains(str(run)), f"{name} {run} was run, and pyproject.toml excludes it"
        assert admitted.contains(str(pin)), f"{name} {pin} is pinned, and pyproject.toml excludes it"
    assert pin <= run, f"{name} {pin} is pinned, and {run} was run last: make newest"


def test_newest_run_passed_a_quarter_of_the_tests_that_there_are():
    tests = NEWEST["tests"]
    assert tests["failures"] == tests["errors"] == 0 == len(NEWEST["failed"])
    assert 4 * (tests["tests"] - tests["skipped"]) >= tests["of"] > 0
    assert NEWEST["quick"]["exit"] == 0
    assert [name for name in TESTS if not (ROOT / name).exists()] == []
    assert {"torch", "transformers", "lightning", "peft", "datasets", "deepspeed"} <= {*PACKAGES}


# -- private names of dependencies ---------------------------------------------------------------

OUR_PACKAGES = {path.name for folder in ("src", "scripts") for path in (ROOT / folder).iterdir()}
# Documented in spite of the underscore: of named tuples, of Hydra's configurations, of the standard library.
DOCUMENTED = {"_replace", "_asdict", "_fields", "_make", "_target_", "_exit"}
REASON = re.compile(r"# private API: \w+ \w+")


def definitions(tree: ast.AST) -> Iterator[str]:
    """Private names that a file defines: functions, classes, variables and attributes of `self`.

    A method with @override is a dependency's, unless another file defines it without.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not any(ast.unparse(d) == "override" for d in node.decorator_list):
                yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


OURS = {name for tree in TREES.values() for name in definitions(tree)}


def unexplained(text: str) -> Iterator[str]:
    """Private names that are not ours, without the reason on the same line or just above it."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] not in OUR_PACKAGES:
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and node.attr not in OURS:
            names = [node.attr]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in OURS:
            names = [node.name]
        for name in names:
            private = name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED
            if private and not any(map(REASON.search, lines[max(0, node.lineno - 3) : node.lineno])):
                yield f"{node.lineno}: {name}"


def test_private_names_of_dependencies_come_with_a_reason():
    missing = [f"{path.relative_to(ROOT)}:{use}" for path in FILES for use in unexplained(path.read_text())]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    "line",
    [
        "from hydra._internal.callbacks import Callbacks",
        "from lightning.pytorch import _Secret",
        "import torch._dynamo",
        "trainer._signal_connector = None",
        "@override\ndef _format_config(self): ...",
    ],
)
def test_every_kind_of_private_use_is_seen(line):
    assert [*unexplained(line)]
    assert not [*unexplained(f"# private API: no public way\n{line}")]
