"""The tree alone tells where to go: small folders, and imports without a circle."""

from __future__ import annotations

import ast
import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from workbench import ROOT

SRC = ROOT / "src"
MOST = 15  # modules of a folder
LEAVES = "drafters/models"  # independent of one another, so a dozen more do no harm


def _modules() -> dict[str, Path]:
    paths = {p.relative_to(SRC).with_suffix(""): p for p in SRC.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}


def test_no_folder_has_more_modules_than_a_reader_can_hold():
    count = Counter(str(path.parent.relative_to(SRC)) for path in _modules().values())
    assert not {folder: n for folder, n in count.items() if n - 1 > MOST and folder != LEAVES}


def test_every_package_says_what_it_is():
    for path in SRC.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """Modules of ours that a file imports anywhere, inside functions too."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in inner}
    return found & modules.keys()


def test_no_imports_go_in_a_circle():
    modules = _modules()
    graph = {name: imports(path, modules) - {name} for name, path in modules.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_a_circle_through_a_function_is_seen(tmp_path):
    (tmp_path / "a.py").write_text("def f():\n    from b import g\n")
    (tmp_path / "b.py").write_text("import a\n")
    modules = {name: tmp_path / f"{name}.py" for name in "ab"}
    graph = {name: imports(path, modules) for name, path in modules.items()}
    with pytest.raises(ValueError, match="cycle"):
        TopologicalSorter(graph).prepare()


def test_no_test_imports_another():
    """What several tests need lies in tests/support."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        assert not [node.module for node in nodes if re.match(r"tests\b|(.+\.)?test_", node.module or "")], (
            path
        )
