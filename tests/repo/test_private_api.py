"""Private names of dependencies: each use states in a comment why there is no public way."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("src", "scripts") for path in (ROOT / folder).rglob("*.py"))
OUR_PACKAGES = {path.name for folder in ("src", "scripts") for path in (ROOT / folder).iterdir()}
# Documented in spite of the underscore: of named tuples, of Hydra's configurations, of the standard library.
DOCUMENTED = {"_replace", "_asdict", "_fields", "_make", "_target_", "_exit"}
REASON = re.compile(r"# private API: \w+ \w+")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


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


def uses(tree: ast.AST, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of every private name in a file that is not ours."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] not in OUR_PACKAGES:
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and node.attr not in ours:
            names = [node.attr]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in ours:
            names = [node.name]
        yield from ((node.lineno, name) for name in names if is_private(name))


def unexplained(text: str, ours: set[str]) -> list[tuple[int, str]]:
    """Uses without the reason on the same line or just above it, decorators included."""
    lines = text.splitlines()
    missing = []
    for number, name in uses(ast.parse(text), ours):
        above = lines[max(0, number - 3) : number]
        if not any(REASON.search(line) for line in above):
            missing.append((number, name))
    return missing


@pytest.fixture(scope="module")
def ours() -> set[str]:
    return {name for path in FILES for name in definitions(ast.parse(path.read_text()))}


def test_private_names_of_dependencies_come_with_a_reason(ours):
    missing = [
        f"{path.relative_to(ROOT)}:{number}: {name}"
        for path in FILES
        for number, name in unexplained(path.read_text(), ours)
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    "line",
    [
        "from hydra._internal.callbacks import Callbacks",
        "from lightning.pytorch import _Secret",
        "import torch._dynamo",
        "trainer._signal_connector = None",
        "super()._format_config()",
        "@override\ndef _format_config(self): ...",
    ],
)
def test_every_kind_of_use_is_seen(line, ours):
    assert unexplained(line, ours)
    reason = "# private API: no public way"
    assert not unexplained(f"{reason}\n{line}", ours)
