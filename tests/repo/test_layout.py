"""The tree alone tells where to go: small folders, and imports without a circle."""

from __future__ import annotations

import ast
import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

from workbench import ROOT

SRC = ROOT / "src"
MOST = 15  # modules of a folder
LEAVES = "drafters/models"  # independent of one another, so a dozen more do no harm


def test_no_folder_has_more_than_15_modules():
    count = Counter(str(path.parent.relative_to(SRC)) for path in SRC.rglob("*.py"))
    assert not {folder: n for folder, n in count.items() if n - 1 > MOST and folder != LEAVES}


def test_every_package_has_a_docstring():
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
    paths = {p.relative_to(SRC).with_suffix(""): p for p in SRC.rglob("*.py")}
    modules = {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}
    graph = {name: imports(path, modules) - {name} for name, path in modules.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_an_import_inside_a_function_counts(tmp_path):
    (tmp_path / "a.py").write_text("def f():\n    from b import g\n")
    assert imports(tmp_path / "a.py", {"b": tmp_path}) == {"b"}


def test_no_test_imports_another():
    """What several tests need lies in tests/support."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        others = [node.module for node in nodes if re.match(r"tests\b|(.+\.)?test_", node.module or "")]
        assert not others, path
